// Checks of what paged_decode.hpp trusts: run once per call.
#pragma once

#include <cstdint>
#include <limits>

#include "kvp/page_check.hpp"
#include "kvp/paged_kv.hpp"

namespace kvp {

// Whether the lengths [rows] fit their page lists, and the pages that they cover
// exist. kLengthOutOfRange: index of the length; kPageOutOfRange: index in the table.
inline Status check_page_lists(const PageTable<std::int32_t>& table,
                               const std::int32_t* lengths, std::int64_t block_size,
                               std::int64_t num_pages) {
  const Status status =
      check_range(lengths, table.rows, table.pages_per_row * block_size + 1,
                  Fault::kLengthOutOfRange);
  if (!status.ok()) return status;
  for (std::int64_t i = 0; i < table.rows; ++i) {
    const std::int64_t pages = (lengths[i] + block_size - 1) / block_size;
    Status found = check_range(table.row(i), pages, num_pages, Fault::kPageOutOfRange);
    if (found.ok()) continue;
    found.index += i * table.pages_per_row;
    return found;
  }
  return {};
}

// Whether n runs of counts[i] from starts[i] lie within the entries.
inline Status check_runs(const std::int64_t* starts, const std::int64_t* counts,
                         std::int64_t n, std::int64_t entries) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (starts[i] < 0 || counts[i] < 0 || starts[i] > entries ||
        counts[i] > entries - starts[i]) {
      return {Fault::kRunOutOfRange, i, starts[i]};
    }
  }
  return {};
}

// Whether the bias of every entry of n runs is finite or -infinity, which means off.
// Index: of the entry.
inline Status check_bias(const float* bias, const std::int64_t* starts,
                         const std::int64_t* counts, std::int64_t n) {
  for (std::int64_t r = 0; r < n; ++r) {
    bool bad = false;  // one flag keeps the loop free of branches
    const float* run = bias + starts[r];
    for (std::int64_t i = 0; i < counts[r]; ++i) {
      bad |= !(run[i] < std::numeric_limits<float>::infinity());
    }
    if (!bad) continue;
    std::int64_t i = 0;
    while (run[i] < std::numeric_limits<float>::infinity()) ++i;
    return {Fault::kBiasNotFinite, starts[r] + i, 0};
  }
  return {};
}

}  // namespace kvp
