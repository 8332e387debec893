// Tests of the CUDA bulk copy, under the emulator, against bulk_copy.hpp: units of 16,
// 4 and 1 bytes, bytes around each page included.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_fixtures.hpp"
#include "kvp/bulk_copy.cuh"
#include "kvp/bulk_copy.hpp"

namespace {

using namespace cuda_test;
using Index = std::int64_t;
using Indices = std::vector<Index>;
using Bytes = std::vector<std::uint8_t>;

Bytes random_bytes(Index n, std::mt19937& random) {
  Bytes out(static_cast<std::size_t>(n));
  for (std::uint8_t& x : out) x = static_cast<std::uint8_t>(random());
  return out;
}

// Sizes of one copy, in bytes.
struct Sizes {
  Index page, to_stride, from_stride, shift;  // shift: of the target's first page
};

void test_lists(const Sizes& size, Index n, std::mt19937& random) {
  const Index num_targets = n + 2, num_sources = n + 1;
  const Bytes source = random_bytes(num_sources * size.from_stride, random);
  const Bytes before = random_bytes(num_targets * size.to_stride + 16, random);
  Indices targets(static_cast<std::size_t>(num_targets)), sources;
  std::iota(targets.begin(), targets.end(), 0);
  std::shuffle(targets.begin(), targets.end(), random);
  for (Index i = 0; i < n; ++i) {
    sources.push_back(static_cast<Index>(random() % num_sources));
  }
  for (int orders = 0; orders < 4; ++orders) {
    const Index* to_ids = orders & 1 ? targets.data() : nullptr;
    const Index* from_ids = orders & 2 ? sources.data() : nullptr;
    Bytes expected = before;
    kvp::bulk::copy_pages({expected.data() + size.shift, size.to_stride, to_ids},
                          {source.data(), size.from_stride, from_ids}, n, size.page);
    check_all_turns(expected, [&] {
      Bytes target = before;
      kvp::cuda::copy_pages(target.data() + size.shift,
                            {num_targets, size.to_stride, to_ids}, source.data(),
                            {num_sources, size.from_stride, from_ids}, n, size.page,
                            nullptr);
      return target;
    });
  }
}

void test_traps() {
  Bytes target(4 * 32), source(3 * 32);
  const auto copy = [&](const Indices& to, const Indices& from) {
    return traps([&] {
      kvp::cuda::copy_pages(target.data(), {4, 32, to.data()}, source.data(),
                            {3, 32, from.data()}, 2, 32, nullptr);
    });
  };
  CHECK(!copy({0, 3}, {2, 0}));
  CHECK(copy({0, 4}, {2, 0}) && copy({-1, 3}, {2, 0}));
  CHECK(copy({0, 3}, {2, 3}) && copy({0, 3}, {2, -1}));
}

}  // namespace

int main() {
  const unsigned seed = 20252;
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  current_case = "lists";
  const Sizes sizes[] = {{64, 64, 80, 0}, {8208, 8224, 8208, 0}, {64, 64, 80, 4},
                         {64, 68, 80, 0}, {60, 64, 64, 0},       {64, 64, 80, 1},
                         {64, 64, 65, 0}, {1, 1, 2, 0},          {999, 1000, 999, 3}};
  for (const Sizes& size : sizes) {
    for (const Index n : {0, 1, 7}) {
      if (!kFewThreads || (&size == sizes && n == 7)) test_lists(size, n, random);
    }
  }
  current_case = "many blocks";
  if (!kFewThreads) test_lists({16, 16, 16, 0}, kvp::cuda::kMaxBlocks + 3, random);
  current_case = "traps";
  test_traps();
  return report();
}
