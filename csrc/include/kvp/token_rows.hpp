// Tokens as rows of an array.
#pragma once

#include <cstdint>

namespace kvp {

// That of each token's key, and that of its value: pages of the host tier, say, seen as
// one list of rows.
template <typename Element>
struct TokenRows {
  const Element* data;  // [num_rows, head_dim]
  std::int64_t num_rows;
  const std::int64_t* keys;  // [n], rows
  const std::int64_t* values;
};

}  // namespace kvp
