// Biases of entries that stand for chunks of tokens, of which some are selected.
//
//   tokens    0 1 2 3 | 4 5 6 7 | 8 9          chunks of 4 tokens; the last is not full
//   selected    1       4 5 6 7   8
//   bias      log 3   | -inf                   one entry per full chunk
//
// A bias is the logarithm of how many tokens of a chunk are not selected.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvp {

// The tokens that one KV head of a request has selected, distinct.
struct SelectedTokens {
  const std::int64_t* tokens;
  std::int64_t count;
};

// The entries of one KV head. logs[n] is the bias of a chunk with n unselected tokens,
// for 0 <= n <= chunk_tokens.
struct ChunkEntries {
  float* bias;
  std::int64_t chunks, chunk_tokens;
  const float* logs;
};

// Writes the biases of all chunks. Tokens behind the last full chunk count for none.
// Returns false, and writes nothing, if a token is negative or more tokens are in a chunk
// than it has. `left` is scratch.
inline bool write_unselected(const SelectedTokens& selected,
                             const ChunkEntries& entries,
                             std::vector<std::int64_t>& left) {
  left.assign(static_cast<std::size_t>(entries.chunks), entries.chunk_tokens);
  for (std::int64_t i = 0; i < selected.count; ++i) {
    const std::int64_t token = selected.tokens[i];
    if (token < 0) return false;
    const std::int64_t chunk = token / entries.chunk_tokens;
    if (chunk < entries.chunks && --left[static_cast<std::size_t>(chunk)] < 0) {
      return false;
    }
  }
  std::transform(left.begin(), left.end(), entries.bias,
                 [&](std::int64_t number) { return entries.logs[number]; });
  return true;
}

}  // namespace kvp
