// Checks of what paged_decode.hpp trusts: run once per call.
#pragma once

#include <cstdint>
#include <limits>

#include "kvp/page_check.hpp"

namespace kvp {

// Whether lengths[n] fit their page lists, and the pages that they cover exist.
// kLengthOutOfRange: index of the length; kPageOutOfRange: index in page_table.
inline Status check_page_lists(const std::int32_t* page_table,
                               std::int64_t most_pages, const std::int32_t* lengths,
                               std::int64_t n, std::int64_t block_size,
                               std::int64_t num_pages) {
  const Status status =
      check_range(lengths, n, most_pages * block_size + 1, Fault::kLengthOutOfRange);
  if (!status.ok()) return status;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t pages = (lengths[i] + block_size - 1) / block_size;
    Status found = check_range(page_table + i * most_pages, pages, num_pages,
                               Fault::kPageOutOfRange);
    if (found.ok()) continue;
    found.index += i * most_pages;
    return found;
  }
  return {};
}

// Whether starts[n + 1] cut entries into n ragged rows.
inline Status check_starts(const std::int64_t* starts, std::int64_t n,
                           std::int64_t entries) {
  for (std::int64_t i = 0; i <= n; ++i) {
    const std::int64_t least = i == 0 ? 0 : starts[i - 1];
    const bool bad = (i == 0 && starts[0] != 0) || starts[i] < least ||
                     starts[i] > entries || (i == n && starts[n] != entries);
    if (bad) return {Fault::kStartOutOfOrder, i, starts[i]};
  }
  return {};
}

// Whether bias[n] are finite or -infinity, which means off.
inline Status check_bias(const float* bias, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (!(bias[i] < std::numeric_limits<float>::infinity())) {
      return {Fault::kBiasNotFinite, i, 0};
    }
  }
  return {};
}

}  // namespace kvp
