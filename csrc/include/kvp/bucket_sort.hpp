// Sorts a few hundred numbers by buckets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace kvp::index {

// Sorts values, largest first: into buckets of equal width, and then each bucket.
//
// Args: room: scratch memory.
inline void sort_largest_first(std::vector<std::uint64_t>& values,
                               std::vector<std::uint64_t>& room) {
  constexpr std::size_t kFew = 32, kBuckets = 512;
  const std::size_t n = values.size();
  if (n < kFew) {
    std::sort(values.begin(), values.end(), std::greater<>());
    return;
  }
  std::uint64_t least = values[0], most = values[0];
  for (const std::uint64_t value : values) {
    least = std::min(least, value);
    most = std::max(most, value);
  }
  int shift = 0;
  while (((most - least) >> shift) >= kBuckets) ++shift;
  std::uint32_t stops[kBuckets + 1] = {};  // of the bucket before
  for (const std::uint64_t value : values) ++stops[((most - value) >> shift) + 1];
  for (std::size_t i = 0; i < kBuckets; ++i) stops[i + 1] += stops[i];
  room.resize(n);
  for (const std::uint64_t value : values) {
    room[stops[(most - value) >> shift]++] = value;
  }
  for (std::size_t i = 0, first = 0; i < kBuckets; first = stops[i++]) {
    const auto begin = room.begin();
    std::sort(begin + static_cast<std::ptrdiff_t>(first),
              begin + static_cast<std::ptrdiff_t>(stops[i]), std::greater<>());
  }
  values.swap(room);
}

}  // namespace kvp::index
