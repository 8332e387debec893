// Attention of one group of query heads to pages and to rows of tokens, for the
// widest vectors of the CPU; see decode_tile.hpp. Pages of an fp8 cache become float32
// a tile at a time.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "kvp/decode_tile.hpp"
#include "kvp/page_copy.hpp"
#include "kvp/paged_kv.hpp"
#include "kvp/quantized_rows.hpp"
#include "kvp/simd.hpp"

namespace kvp::decode {

// How many pages ahead keys are prefetched; values are prefetched one tile ahead.
constexpr std::int64_t kAhead = 2;

// Buffers of one thread; they only grow.
template <typename Element>
struct Scratch {
  std::vector<float> scores;
  std::vector<Element> keys,
      values;  // unpacked pages that are neither rows nor columns
  std::vector<Run<Element>> runs;
};

// Buffers of one thread for pages of an fp8 cache.
struct Fp8Scratch {
  std::vector<float> pages;  // of one tile
  std::vector<std::int32_t> list;  // their numbers: 0, 1, ...
  Scratch<float> floats;
};

// Attends to the first count tokens of the listed pages. The last page may be partly
// full; its other slots are read but do not change the result.
template <int W, typename Element>
KVP_INLINE void attend_pages_body(const PagedKV<const Element>& kv,
                                  const std::int32_t* list, std::int64_t count,
                                  const Heads& heads, Scratch<Element>& scratch) {
  const PageLayout& layout = kv.layout;
  const std::int64_t slots = layout.block_size, dims = heads.dims;
  const bool columns = layout.keys.kind == PlaneKind::kTransposed && slots % W == 0;
  const bool key_rows = layout.keys.is_matrix(dims);
  const bool value_rows = layout.values.is_matrix(dims);
  const std::int64_t per_tile = slots < kTileSlots ? kTileSlots / slots : 1;
  const std::int64_t stride = index::round_up(per_tile * slots, kWidest);
  float* scores = index::at_least(scratch.scores, heads.group * stride);
  Element* keys =
      columns || key_rows ? nullptr : index::at_least(scratch.keys, slots * dims);
  Element* values =
      value_rows ? nullptr : index::at_least(scratch.values, per_tile * slots * dims);
  const std::int64_t num_pages = (count + slots - 1) / slots;
  const auto page_at = [&](std::int64_t i) {  // clamped to the last page
    const std::int64_t number = list[i < num_pages ? i : num_pages - 1];
    return kv.page(number);
  };
  std::int64_t done = 0, next = 0;
  while (done < count) {
    scratch.runs.clear();
    std::int64_t n = 0;
    for (std::int64_t i = 0; i < per_tile && done < count; ++i, ++next) {
      const Element* page = page_at(next);
      const std::int64_t left = count - done;
      const std::int64_t here = left < slots ? left : slots;
      const Element* page_values = page + layout.values.base;
      if (columns) {
        score_page_of_columns<W>(heads, page + layout.keys.base,
                                 page_at(next + kAhead) + layout.keys.base, slots, here,
                                 scores + n, stride);
      } else {
        if (!key_rows) unpack_plane(page, layout.keys, slots, dims, keys);
        score_rows<W>(heads, key_rows ? page + layout.keys.base : keys, here,
                      scores + n, stride);
      }
      if (!value_rows) {
        page_values = values + i * slots * dims;
        unpack_plane(page, layout.values, slots, dims, values + i * slots * dims);
      }
      scratch.runs.push_back(
          {page_values, here, page_at(next + per_tile) + layout.values.base});
      n += here;
      done += here;
    }
    add_tile<W>(scratch.runs, scores, n, stride, heads);
  }
}

// The same for pages of fp8 elements, which are read without the scale of their layer.
template <int W>
KVP_INLINE void attend_fp8_pages_body(const PagedKV<const std::uint8_t>& kv, Fp8 type,
                                      const std::int32_t* list, std::int64_t count,
                                      const Heads& heads, Fp8Scratch& scratch) {
  const std::int64_t slots = kv.block_size(), elems = kv.layout.page_elems();
  const std::int64_t per_tile = slots < kTileSlots ? kTileSlots / slots : 1;
  const QuantizedFormat page_format{elems, 8, type};
  float* pages = index::at_least(scratch.pages, per_tile * elems);
  while (static_cast<std::int64_t>(scratch.list.size()) < per_tile) {
    scratch.list.push_back(static_cast<std::int32_t>(scratch.list.size()));
  }
  const PagedKV<const float> tile{pages, per_tile, elems, kv.layout};
  for (std::int64_t done = 0; done < count; done += per_tile * slots) {
    const std::int64_t left = count - done, room = per_tile * slots;
    const std::int64_t here = left < room ? left : room;
    for (std::int64_t i = 0; i * slots < here; ++i) {
      widen_fp8_row_body<W>(page_format, kv.page(list[done / slots + i]),
                            pages + i * elems);
    }
    attend_pages_body<W>(tile, scratch.list.data(), here, heads, scratch.floats);
  }
}

// Attends to count rows of keys and values, with a bias added to their scores. A
// row whose bias is -infinity is not read.
template <int W, typename Element>
KVP_INLINE void attend_rows_body(const Element* keys, const Element* values,
                                 const float* bias, std::int64_t count,
                                 const Heads& heads, Scratch<Element>& scratch) {
  constexpr float kOff = -std::numeric_limits<float>::infinity();
  const std::int64_t dims = heads.dims;
  float* scores = index::at_least(scratch.scores, heads.group * kTileSlots);
  std::int64_t i = 0;
  while (i < count) {
    scratch.runs.clear();
    std::int64_t n = 0;
    while (i < count && n < kTileSlots) {
      if (bias[i] == kOff) {
        ++i;
        continue;
      }
      std::int64_t end = i + 1;
      while (end < count && n + end - i < kTileSlots && bias[end] != kOff) ++end;
      score_rows<W>(heads, keys + i * dims, end - i, scores + n, kTileSlots);
      for (std::int64_t h = 0; h < heads.group; ++h) {
        float* biased = scores + h * kTileSlots + n;
        for (std::int64_t j = i; j < end; ++j) biased[j - i] += bias[j];
      }
      scratch.runs.push_back({values + i * dims, end - i, values + end * dims});
      n += end - i;
      i = end;
    }
    if (n > 0) add_tile<W>(scratch.runs, scores, n, kTileSlots, heads);
  }
}

struct Kernels {
  Simd simd;
  static constexpr auto tables();

  void (*pages_f32)(const PagedKV<const float>&, const std::int32_t*, std::int64_t,
                    const Heads&, Scratch<float>&);
  void (*pages_bf16)(const PagedKV<const std::uint16_t>&, const std::int32_t*,
                     std::int64_t, const Heads&, Scratch<std::uint16_t>&);
  void (*pages_fp8)(const PagedKV<const std::uint8_t>&, Fp8, const std::int32_t*,
                    std::int64_t, const Heads&, Fp8Scratch&);
  void (*rows_f32)(const float*, const float*, const float*, std::int64_t, const Heads&,
                   Scratch<float>&);
  void (*rows_bf16)(const std::uint16_t*, const std::uint16_t*, const float*,
                    std::int64_t, const Heads&, Scratch<std::uint16_t>&);

  void attend(const PagedKV<const float>& kv, const std::int32_t* list,
              std::int64_t count, const Heads& heads, Scratch<float>& scratch) const {
    pages_f32(kv, list, count, heads, scratch);
  }
  void attend(const PagedKV<const std::uint16_t>& kv, const std::int32_t* list,
              std::int64_t count, const Heads& heads,
              Scratch<std::uint16_t>& scratch) const {
    pages_bf16(kv, list, count, heads, scratch);
  }
  void attend(const float* keys, const float* values, const float* bias,
              std::int64_t count, const Heads& heads, Scratch<float>& scratch) const {
    rows_f32(keys, values, bias, count, heads, scratch);
  }
  void attend(const std::uint16_t* keys, const std::uint16_t* values, const float* bias,
              std::int64_t count, const Heads& heads,
              Scratch<std::uint16_t>& scratch) const {
    rows_bf16(keys, values, bias, count, heads, scratch);
  }
};

// The five kernels for one width, compiled for TARGET.
#define KVP_DECODE_KERNELS(NAME, SIMD, TARGET)                                         \
  namespace NAME {                                                                     \
  constexpr int kWidth = static_cast<int>(lanes_of(SIMD));                             \
  TARGET inline void pages_f32(const PagedKV<const float>& kv,                         \
                               const std::int32_t* list, std::int64_t count,           \
                               const Heads& heads, Scratch<float>& scratch) {          \
    attend_pages_body<kWidth>(kv, list, count, heads, scratch);                        \
  }                                                                                    \
  TARGET inline void pages_bf16(const PagedKV<const std::uint16_t>& kv,                \
                                const std::int32_t* list, std::int64_t count,          \
                                const Heads& heads, Scratch<std::uint16_t>& scratch) { \
    attend_pages_body<kWidth>(kv, list, count, heads, scratch);                        \
  }                                                                                    \
  TARGET inline void pages_fp8(const PagedKV<const std::uint8_t>& kv, Fp8 type,        \
                               const std::int32_t* list, std::int64_t count,           \
                               const Heads& heads, Fp8Scratch& scratch) {              \
    attend_fp8_pages_body<kWidth>(kv, type, list, count, heads, scratch);              \
  }                                                                                    \
  TARGET inline void rows_f32(const float* keys, const float* values,                  \
                              const float* bias, std::int64_t count,                   \
                              const Heads& heads, Scratch<float>& scratch) {           \
    attend_rows_body<kWidth>(keys, values, bias, count, heads, scratch);               \
  }                                                                                    \
  TARGET inline void rows_bf16(const std::uint16_t* keys, const std::uint16_t* values, \
                               const float* bias, std::int64_t count,                  \
                               const Heads& heads, Scratch<std::uint16_t>& scratch) {  \
    attend_rows_body<kWidth>(keys, values, bias, count, heads, scratch);               \
  }                                                                                    \
  inline constexpr Kernels table{SIMD,      pages_f32, pages_bf16,                     \
                                 pages_fp8, rows_f32,  rows_bf16};                     \
  }

KVP_DECODE_KERNELS(baseline, Simd::kBaseline, KVP_TARGET_BASELINE)
#if defined(KVP_X86)
KVP_DECODE_KERNELS(avx2, Simd::kAvx2, KVP_TARGET_AVX2)
KVP_DECODE_KERNELS(avx512, Simd::kAvx512, KVP_TARGET_AVX512)
#endif

#undef KVP_DECODE_KERNELS

inline constexpr auto Kernels::tables() {
#if defined(KVP_X86)
  return std::array{&baseline::table, &avx2::table, &avx512::table};
#else
  return std::array{&baseline::table};
#endif
}

}  // namespace kvp::decode
