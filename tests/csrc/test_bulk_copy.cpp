// Tests of the bulk copy: every kernel that this CPU can run, bytes around each page
// included (sanitizers need not see streaming stores).
// No framework: CHECK counts, main returns non-zero if anything failed.
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "kvp/bulk_copy.hpp"
#include "kvp/page_check.hpp"

namespace {

int failures = 0;

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      std::printf("%s:%d: %s (kernels %s)\n", __FILE__, __LINE__, #condition, \
                  current_kernels);                                           \
      ++failures;                                                             \
    }                                                                         \
  } while (0)

const char* current_kernels = "";

using Index = std::int64_t;
using Indices = std::vector<Index>;
using Bytes = std::vector<std::uint8_t>;

Bytes random_bytes(Index n, std::mt19937& random) {
  Bytes out(static_cast<std::size_t>(n));
  for (std::uint8_t& x : out) x = static_cast<std::uint8_t>(random());
  return out;
}

// One page at every alignment. The source is exactly as long as the page, so that a
// sanitizer sees a read past it.
void test_single_pages(const kvp::bulk::Kernels& kernels, std::mt19937& random) {
  constexpr Index kGuard = 128;
  for (Index bytes : {1,   2,   31,  63,  64,   65,   255,  256,  257,  300,
                      319, 320, 511, 512, 1000, 4095, 4096, 4097, 8192, 9001}) {
    for (Index shift : {0, 1, 8, 32, 63}) {
      const Bytes source = random_bytes(bytes, random);
      const Bytes next = random_bytes(bytes, random);
      const kvp::bulk::Ahead ahead{next.data(),
                                   std::min(bytes, kvp::bulk::kAheadBytes)};
      for (kvp::bulk::CopyPage copy : {kernels.plain, kernels.stream}) {
        Bytes target = random_bytes(2 * kGuard + bytes, random);
        Bytes expected = target;
        const Index at = kGuard - 64 + shift;
        for (Index i = 0; i < bytes; ++i) expected[at + i] = source[i];
        copy(target.data() + at, source.data(), bytes, ahead);
        kvp::bulk::fence();
        CHECK(target == expected);
      }
    }
  }
}

// Both sides with gaps between pages, with and without ids; sources repeat.
void test_lists(const kvp::bulk::Kernels& kernels, Index page_bytes, Index n,
                std::mt19937& random) {
  const Index num_targets = n + 2, num_sources = n + 1;
  const Index to_stride = page_bytes + 5, from_stride = page_bytes + 16;
  const Bytes source = random_bytes(num_sources * from_stride, random);
  const Bytes before = random_bytes(num_targets * to_stride, random);
  Indices targets(static_cast<std::size_t>(num_targets));
  std::iota(targets.begin(), targets.end(), 0);
  std::shuffle(targets.begin(), targets.end(), random);
  Indices sources;
  for (Index i = 0; i < n; ++i) {
    sources.push_back(static_cast<Index>(random() % num_sources));
  }
  for (int orders = 0; orders < 4; ++orders) {
    const Index* to_ids = orders & 1 ? targets.data() : nullptr;
    const Index* from_ids = orders & 2 ? sources.data() : nullptr;
    Bytes target = before, expected = before;
    for (Index i = 0; i < n; ++i) {
      const Index to = to_ids ? to_ids[i] : i, from = from_ids ? from_ids[i] : i;
      std::copy_n(source.begin() + from * from_stride, page_bytes,
                  expected.begin() + to * to_stride);
    }
    kvp::bulk::copy_pages({target.data(), to_stride, to_ids},
                          {source.data(), from_stride, from_ids}, n, page_bytes,
                          kernels);
    CHECK(target == expected);
  }
}

void test_ahead() {
  const std::uint8_t* base = nullptr;
  const Indices ids = {4, 2, 9};
  const auto next = [&](Index i, Index page_bytes) {
    const kvp::bulk::Sources list{base, page_bytes, ids.data()};
    const kvp::bulk::Ahead ahead = kvp::bulk::Ahead::of(list, i, 3, page_bytes);
    CHECK(ahead.lead <= page_bytes);
    return (ahead.next - base) / page_bytes;
  };
  CHECK(next(0, 8192) == 2);
  CHECK(next(2, 8192) == 9);  // clamped to the last
  CHECK(next(0, 2048) == 9);
  CHECK(next(1, 2048) == 9);
}

void test_distinct() {
  const auto check = [](const Indices& pages) {
    const auto n = static_cast<Index>(pages.size());
    const kvp::PageSpan span = kvp::span_of(pages.data(), n);
    std::vector<std::uint64_t> bits(static_cast<std::size_t>(span.bitmap_words(1)));
    return kvp::check_distinct_pages(pages.data(), n, span, bits.data());
  };
  CHECK(check({}).ok());
  CHECK(check({1000000, 1000063, 1000064}).ok());
  const kvp::Status status = check({70, 6, 71, 6, 70});
  CHECK(status.fault == kvp::Fault::kDuplicateDestination);
  CHECK(status.index == 3 && status.value == 6);
}

}  // namespace

int main() {
  const unsigned seed = 20263;
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  for (const kvp::bulk::Kernels* kernels :
       kvp::runnable_kernels<kvp::bulk::Kernels>()) {
    current_kernels = kvp::name_of(kernels->simd);
    test_single_pages(*kernels, random);
    for (Index page_bytes : {1, 48, 1000, 2048, 8192}) {
      for (Index n : {0, 1, 2, 50}) test_lists(*kernels, page_bytes, n, random);
    }
    // Enough for the parallel loop and for streaming stores.
    test_lists(*kernels, 8191, kvp::bulk::kStreamBytes / 8191 + 1, random);
  }
  test_ahead();
  test_distinct();
  std::printf("%d failure(s)\n", failures);
  return failures != 0;
}
