// Copies of many whole pages between two buffers: gathers, scatters, or both.
//
// Pages are bytes. Indices are trusted (page_check.hpp checks them). Results do
// not depend on the number of threads: iterations write disjoint pages.
//
// Two things make it faster than a memcpy per page, measured with pages of 2 to 64 KiB picked at random from 1 GiB, 64 MiB at a time (benchmarks/kernels/gather.py):
//
// - Streaming stores, which do not read the target's lines before they overwrite
//   them: two thirds of the traffic. memcpy streams large copies too, but sees one
//   page at a time.
// - Prefetching 4 KiB ahead across page borders: the CPU's own prefetcher stops
//   at each 4 KiB boundary and has to detect the stream again.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "kvp/simd.hpp"

#if defined(KVP_X86)
#include <immintrin.h>
#endif

#include "kvp/page_copy.hpp"

namespace kvp::bulk {

// From this size of a whole copy on, stores stream past the caches. Measured as
// the time to copy and then read the target once, on a core with 1 MiB of L2 and
// 32 MiB of L3: streaming takes 1.15 times as long at 4 MiB, as long at 8 MiB,
// and 0.8 times as long from 16 MiB on.
constexpr std::int64_t kStreamBytes = 8 * 1024 * 1024;

// How far ahead of the copy its source is prefetched, in bytes of whole pages.
constexpr std::int64_t kAheadBytes = 4096;

// Pages ahead of the copy of which one line per 4 KiB is touched, on both sides, so
// that address translation does not delay the copy. Measured: saves up to 5 % of a
// gather's time and 3 to 16 % of a scatter's.
constexpr std::int64_t kTouchPages = 4;
constexpr std::int64_t kTouchBytes = 16 * 1024;

// Bytes per iteration of the kernels.
constexpr std::int64_t kBlockBytes = 256;

// The pages of one side: page i is at base + (ids ? ids[i] : i) * stride_bytes.
template <typename Byte>
struct PageList {
  Byte* base;
  std::int64_t stride_bytes;
  const std::int64_t* ids;  // null: 0, 1, 2, ...

  Byte* at(std::int64_t i) const {
    return base + (ids != nullptr ? ids[i] : i) * stride_bytes;
  }
};

inline void touch(const std::uint8_t* page, std::int64_t bytes) {
  for (std::int64_t i = 0; i < std::min(bytes, kTouchBytes); i += 4096) {
    __builtin_prefetch(page + i, 0, 2);
  }
}

using Targets = PageList<std::uint8_t>;
using Sources = PageList<const std::uint8_t>;

// What to prefetch while one page is copied: the bytes `lead` ahead in this page, and
// after its end those of `next`.
struct Ahead {
  const std::uint8_t* next;
  std::int64_t lead;  // at most a page

  // For page i of n of the source. If pages are smaller than kAheadBytes, it is several
  // pages ahead.
  static Ahead of(const Sources& source, std::int64_t i, std::int64_t n,
                  std::int64_t page_bytes) {
    const std::int64_t pages = std::max<std::int64_t>(1, kAheadBytes / page_bytes);
    return {source.at(std::min(i + pages, n - 1)), std::min(page_bytes, kAheadBytes)};
  }

  // Prefetches into L2: L1 is too small for the lead.
  void fetch(const std::uint8_t* from, std::int64_t done, std::int64_t bytes) const {
    const std::int64_t there = done + lead;
    const std::uint8_t* line = there < bytes ? from + there : next + (there - bytes);
    for (std::int64_t i = 0; i < kBlockBytes; i += 64) {
      __builtin_prefetch(line + i, 0, 2);
    }
  }
};

using CopyPage = void (*)(std::uint8_t* to, const std::uint8_t* from,
                          std::int64_t bytes, const Ahead& ahead);

struct Kernels {
  Simd simd;
  static constexpr auto tables();

  CopyPage plain;
  CopyPage stream;  // fence() orders its stores with others
};

#if defined(KVP_X86)

inline void fence() { _mm_sfence(); }

// Copies one page with vectors of one width, compiled for TARGET. Streaming stores
// must be aligned: the first bytes of the page, up to a cache line, are copied
// unaligned.
#define KVP_COPY_PAGE(NAME, SIMD, TARGET, VECTOR, LOAD, STORE, STREAM)           \
  namespace NAME {                                                               \
  template <bool kStream>                                                        \
  TARGET inline void copy_page(std::uint8_t* to, const std::uint8_t* from,       \
                               std::int64_t bytes, const Ahead& ahead) {         \
    constexpr std::int64_t kWidth = sizeof(VECTOR);                              \
    const auto past =                                                            \
        static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % 64);    \
    std::int64_t done = kStream ? std::min((64 - past) % 64, bytes) : 0;         \
    std::memcpy(to, from, static_cast<std::size_t>(done));                       \
    for (; done + kBlockBytes <= bytes; done += kBlockBytes) {                   \
      ahead.fetch(from, done, bytes);                                            \
      for (std::int64_t i = done; i < done + kBlockBytes; i += 4 * kWidth) {     \
        const auto* source = reinterpret_cast<const VECTOR*>(from + i);          \
        auto* target = reinterpret_cast<VECTOR*>(to + i);                        \
        const VECTOR a = LOAD(source), b = LOAD(source + 1);                     \
        const VECTOR c = LOAD(source + 2), d = LOAD(source + 3);                 \
        if constexpr (kStream) {                                                 \
          STREAM(target, a), STREAM(target + 1, b);                              \
          STREAM(target + 2, c), STREAM(target + 3, d);                          \
        } else {                                                                 \
          STORE(target, a), STORE(target + 1, b);                                \
          STORE(target + 2, c), STORE(target + 3, d);                            \
        }                                                                        \
      }                                                                          \
    }                                                                            \
    std::memcpy(to + done, from + done, static_cast<std::size_t>(bytes - done)); \
  }                                                                              \
  inline constexpr Kernels table{SIMD, copy_page<false>, copy_page<true>};       \
  }

KVP_COPY_PAGE(baseline, Simd::kBaseline, KVP_TARGET_BASELINE, __m128i, _mm_loadu_si128,
              _mm_storeu_si128, _mm_stream_si128)
KVP_COPY_PAGE(avx2, Simd::kAvx2, KVP_TARGET_AVX2, __m256i, _mm256_loadu_si256,
              _mm256_storeu_si256, _mm256_stream_si256)
KVP_COPY_PAGE(avx512, Simd::kAvx512, KVP_TARGET_AVX512, __m512i, _mm512_loadu_si512,
              _mm512_storeu_si512, _mm512_stream_si512)

#undef KVP_COPY_PAGE

#else

inline void fence() {}

namespace baseline {

inline void copy_page(std::uint8_t* to, const std::uint8_t* from, std::int64_t bytes,
                      const Ahead& ahead) {
  for (std::int64_t done = 0; done < bytes; done += kBlockBytes) {
    ahead.fetch(from, done, bytes);
  }
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

inline constexpr Kernels table{Simd::kBaseline, copy_page, copy_page};

}  // namespace baseline

#endif

inline constexpr auto Kernels::tables() {
#if defined(KVP_X86)
  return std::array{&baseline::table, &avx2::table, &avx512::table};
#else
  return std::array{&baseline::table};
#endif
}

// Copies n pages: target page i = source page i, bit for bit. The target's pages
// must be distinct and share no byte with the source; the source's may repeat.
//
// Cost: 2 * n * page_bytes of traffic; below kStreamBytes 3, most of it in caches.
inline void copy_pages(const Targets& target, const Sources& source, std::int64_t n,
                       std::int64_t page_bytes,
                       const Kernels& kernels = select_kernels<Kernels>()) {
  const std::int64_t total = n * page_bytes;
  if (total == 0) return;
  const bool stream = total >= kStreamBytes;
  const CopyPage copy_page = stream ? kernels.stream : kernels.plain;
  [[maybe_unused]] const Work work = Work::bytes(total);
#pragma omp parallel if (work.parallel())
  {
#pragma omp for schedule(static) nowait
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t later = std::min(i + kTouchPages, n - 1);
      touch(source.at(later), page_bytes);
      touch(target.at(later), page_bytes);
      copy_page(target.at(i), source.at(i), page_bytes,
                Ahead::of(source, i, n, page_bytes));
    }
    // Every thread fences its own stores before the barrier at the end of the region.
    if (stream) fence();
  }
}

}  // namespace kvp::bulk
