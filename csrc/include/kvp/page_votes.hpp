// Attention that some queries pay to each slot of a request's pages, by which policies
// score slots. No matrix of weights is stored.
//
// Two passes over the keys, a tile of slots at a time:
//
//     1. log-sum-exp of every query's scores
//     2. out[slot] += exp(score - log-sum-exp), or the largest of them
//
// The mask is causal by position: a query sees slots whose position is at most its own.
// Position -1 marks a slot without a token, which no query sees. Queries may have keys
// of their own at their positions (a probe's tokens, which are in no page): these take
// part in the softmax and get no votes.
//
// Every query head is processed independently and in one order: results are the same
// bits for any number of threads. Element is float, BFloat16 or Float16; all sums are
// float32. Arguments are trusted.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "kvp/elements.hpp"
#include "kvp/exponential.hpp"
#include "kvp/for_all.hpp"
#include "kvp/index_common.hpp"
#include "kvp/page_copy.hpp"
#include "kvp/simd.hpp"

namespace kvp::page_votes {

constexpr float kHidden = -std::numeric_limits<float>::infinity();
// Slots whose keys are held as float32 at a time, in whole pages, and the lanes of the
// widest pair of vectors.
constexpr std::int64_t kTileSlots = 64;
constexpr std::int64_t kTwoVectors = 32;
constexpr int kQueriesAtOnce = 4;

template <typename Element>
struct Call {
  std::int64_t kv_heads, group, num_queries, slots;
  float scale;
  bool largest;  // the largest weight of a slot instead of the sum

  const Element* queries;  // [kv_heads * group, num_queries, head_dim]
  const std::int64_t* query_positions;  // [num_queries]
  const Element* own_keys;  // [kv_heads, num_queries, head_dim]; null: none

  PagedKV<const Element> kv;
  PageTable<std::int64_t> table;  // one row per KV head
  const std::int64_t* positions;  // [kv_heads, slots]

  float* out;  // [kv_heads * group, slots]

  KVP_HOST_DEVICE std::int64_t head_dim() const { return kv.head_dim(); }
};

// A tile of keys, one column per slot: [head_dim][stride] float32. Padding columns hold
// unspecified values and are hidden.
struct Tile {
  const float* columns;
  std::int64_t stride, count;
  const std::int64_t* positions;  // [count]
};

// Queries of one head, each a row times the scale, and their softmax so far.
struct Rows {
  std::int64_t count, head_dim;
  const float* queries;  // [count + 3][head_dim]
  const std::int64_t* positions;  // [count]
  float* peaks;  // [count]
  float* sums;  // [count]
};

// scores[j][slot] = query j . key, for kQueriesAtOnce queries.
template <int W>
KVP_INLINE void score_tile(const float* queries, std::int64_t head_dim,
                           const Tile& tile, float* scores) {
  using F = typename Vec<W>::F;
  for (std::int64_t at = 0; at < tile.count; at += 2 * W) {
    F sums[kQueriesAtOnce][2] = {};
    for (std::int64_t d = 0; d < head_dim; ++d) {
      F left, right;
      load<W>(tile.columns + d * tile.stride + at, left);
      load<W>(tile.columns + d * tile.stride + at + W, right);
#pragma GCC unroll 4
      for (int j = 0; j < kQueriesAtOnce; ++j) {
        const float query = queries[j * head_dim + d];
        sums[j][0] += left * query;
        sums[j][1] += right * query;
      }
    }
    for (int j = 0; j < kQueriesAtOnce; ++j) {
      std::memcpy(scores + j * tile.stride + at, sums[j], sizeof sums[j]);
    }
  }
}

// Hides slots that a query does not see, and padding. Returns the largest score.
KVP_INLINE float hide(const Tile& tile, std::int64_t position, float* scores) {
  float peak = kHidden;
  for (std::int64_t i = 0; i < tile.count; ++i) {
    const bool seen = (tile.positions[i] >= 0) & (tile.positions[i] <= position);
    scores[i] = seen ? scores[i] : kHidden;
    peak = scores[i] > peak ? scores[i] : peak;
  }
  const std::int64_t padded = index::round_up(tile.count, kTwoVectors);
  for (std::int64_t i = tile.count; i < padded; ++i) scores[i] = kHidden;
  return peak;
}

// exp(score - from), 0 where hidden.
KVP_INLINE float weight_of(float score, float from) {
  const float weight = index::exp_of_logit(score - from);
  return score > kHidden ? weight : 0.0f;
}

// Adds a tile to the softmax of all queries. A score of NaN weighs nothing.
template <int W>
KVP_INLINE void add_to_softmax(const Rows& rows, const Tile& tile, float* scores) {
  for (std::int64_t first = 0; first < rows.count; first += kQueriesAtOnce) {
    score_tile<W>(rows.queries + first * rows.head_dim, rows.head_dim, tile, scores);
    const std::int64_t left = rows.count - first;
    for (std::int64_t j = 0; j < kQueriesAtOnce && j < left; ++j) {
      float* here = scores + j * tile.stride;
      const float before = rows.peaks[first + j];
      const float largest = hide(tile, rows.positions[first + j], here);
      const float peak = largest > before ? largest : before;
      if (peak == kHidden) continue;
      float parts[kTwoVectors] = {};
      for (std::int64_t i = 0; i < tile.count; i += kTwoVectors) {
        for (std::int64_t lane = 0; lane < kTwoVectors; ++lane) {
          parts[lane] += weight_of(here[i + lane], peak);
        }
      }
      float sum = 0.0f;
      for (const float part : parts) sum += part;
      const float share = before > kHidden ? std::exp(before - peak) : 0.0f;
      rows.sums[first + j] = rows.sums[first + j] * share + sum;
      rows.peaks[first + j] = peak;
    }
  }
}

// votes[slot] += the weight of every query, or becomes the largest. `peaks` are
// log-sum-exps here.
template <int W>
KVP_INLINE void add_votes(const Rows& rows, const Tile& tile, bool largest,
                          float* scores, float* votes) {
  for (std::int64_t first = 0; first < rows.count; first += kQueriesAtOnce) {
    score_tile<W>(rows.queries + first * rows.head_dim, rows.head_dim, tile, scores);
    const std::int64_t left = rows.count - first;
    for (std::int64_t j = 0; j < kQueriesAtOnce && j < left; ++j) {
      float* here = scores + j * tile.stride;
      const float from = rows.peaks[first + j];
      if (hide(tile, rows.positions[first + j], here) == kHidden) continue;
      for (std::int64_t i = 0; i < tile.count; ++i) {
        const float weight = weight_of(here[i], from);
        votes[i] =
            largest ? (weight > votes[i] ? weight : votes[i]) : votes[i] + weight;
      }
    }
  }
}

template <typename Element>
KVP_INLINE void widen_all(const Element* from, std::int64_t n, float* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

struct Kernels {
  Simd simd;
  static constexpr auto tables();

  void (*softmax)(const Rows&, const Tile&, float*);
  void (*votes)(const Rows&, const Tile&, bool, float*, float*);
  void (*widen_f32)(const float*, std::int64_t, float*);
  void (*widen_bf16)(const BFloat16*, std::int64_t, float*);
  void (*widen_f16)(const Float16*, std::int64_t, float*);

  void widen(const float* from, std::int64_t n, float* to) const {
    widen_f32(from, n, to);
  }
  void widen(const BFloat16* from, std::int64_t n, float* to) const {
    widen_bf16(from, n, to);
  }
  void widen(const Float16* from, std::int64_t n, float* to) const {
    widen_f16(from, n, to);
  }
};

// The kernels for one width, compiled for TARGET.
#define KVP_VOTE_KERNELS(NAME, SIMD, TARGET)                                       \
  namespace NAME {                                                                 \
  constexpr int kWidth = static_cast<int>(lanes_of(SIMD));                         \
  TARGET inline void softmax(const Rows& rows, const Tile& tile, float* scores) {  \
    add_to_softmax<kWidth>(rows, tile, scores);                                    \
  }                                                                                \
  TARGET inline void votes(const Rows& rows, const Tile& tile, bool largest,       \
                           float* scores, float* out) {                            \
    largest ? add_votes<kWidth>(rows, tile, true, scores, out)                     \
            : add_votes<kWidth>(rows, tile, false, scores, out);                   \
  }                                                                                \
  TARGET inline void widen_f32(const float* from, std::int64_t n, float* to) {     \
    widen_all(from, n, to);                                                        \
  }                                                                                \
  TARGET inline void widen_bf16(const BFloat16* from, std::int64_t n, float* to) { \
    widen_all(from, n, to);                                                        \
  }                                                                                \
  TARGET inline void widen_f16(const Float16* from, std::int64_t n, float* to) {   \
    widen_all(from, n, to);                                                        \
  }                                                                                \
  inline constexpr Kernels table{SIMD,      softmax,    votes,                     \
                                 widen_f32, widen_bf16, widen_f16};                \
  }

KVP_VOTE_KERNELS(baseline, Simd::kBaseline, KVP_TARGET_BASELINE)
#if defined(KVP_X86)
KVP_VOTE_KERNELS(avx2, Simd::kAvx2, KVP_TARGET_AVX2)
KVP_VOTE_KERNELS(avx512, Simd::kAvx512, KVP_TARGET_AVX512)
#endif

#undef KVP_VOTE_KERNELS

inline constexpr auto Kernels::tables() {
#if defined(KVP_X86)
  return std::array{&baseline::table, &avx2::table, &avx512::table};
#else
  return std::array{&baseline::table};
#endif
}

// Buffers of one thread; they only grow.
struct Scratch {
  std::vector<float> queries, peaks, sums, columns, scores;
  std::vector<std::uint32_t> rows, turned;  // of elements up to 4 bytes
};

// The integer type that transpose() and unpack_plane() take.
template <typename Element>
using Bits = std::conditional_t<sizeof(Element) == 4, std::uint32_t, std::uint16_t>;

// Reads tiles of one KV head.
template <typename Element>
class Tiles {
 public:
  Tiles(const Kernels& kernels, const Call<Element>& call, std::int64_t kv_head,
        Scratch& scratch)
      : kernels_(kernels), call_(call), head_(kv_head) {
    const std::int64_t size = call.kv.block_size(), dims = call.head_dim();
    pages_ = size < kTileSlots ? kTileSlots / size : 1;
    // Not a power of two: otherwise rows would share cache sets.
    stride_ = index::round_up(pages_ * size, kTwoVectors) + 16;
    columns_ = index::at_least(scratch.columns, dims * stride_);
    rows_ = bits(index::at_least(scratch.rows, pages_ * size * dims));
    turned_ = bits(index::at_least(scratch.turned, pages_ * size * dims));
  }

  std::int64_t stride() const { return stride_; }
  std::int64_t slots() const { return pages_ * call_.kv.block_size(); }

  // The existing slots of [first, first + slots()); `first` is the start of a tile.
  Tile cached(std::int64_t first) {
    const std::int64_t size = call_.kv.block_size(), dims = call_.head_dim();
    const std::int64_t count = std::min(slots(), call_.slots - first);
    const std::int64_t* pages = call_.table.row(head_) + first / size;
    const auto page_at = [&](std::int64_t i) {
      return reinterpret_cast<const Bits<Element>*>(call_.kv.page(pages[i]));
    };
    const Plane& plane = call_.kv.layout.keys;
    if (plane.kind == PlaneKind::kTransposed && pages_ == 1) {
      widen_columns(page_at(0) + plane.base, size, count);
    } else {
      for (std::int64_t i = 0; i * size < count; ++i) {
        unpack_plane(page_at(i), plane, size, dims, rows_ + i * size * dims);
      }
      turn_rows(rows_, count);
    }
    return {columns_, stride_, count, call_.positions + head_ * call_.slots + first};
  }

  // The same for the queries' own keys.
  Tile own(std::int64_t first) {
    const std::int64_t count = std::min(slots(), call_.num_queries - first);
    turn_rows(reinterpret_cast<const Bits<Element>*>(call_.own_keys) +
                  (head_ * call_.num_queries + first) * call_.head_dim(),
              count);
    return {columns_, stride_, count, call_.query_positions + first};
  }

 private:
  static Bits<Element>* bits(std::uint32_t* buffer) {
    return reinterpret_cast<Bits<Element>*>(buffer);
  }

  void turn_rows(const Bits<Element>* rows, std::int64_t count) {
    transpose(rows, count, call_.head_dim(), turned_);
    widen_columns(turned_, count, count);
  }

  void widen_columns(const Bits<Element>* from, std::int64_t from_stride,
                     std::int64_t count) {
    for (std::int64_t d = 0; d < call_.head_dim(); ++d) {
      kernels_.widen(reinterpret_cast<const Element*>(from + d * from_stride), count,
                     columns_ + d * stride_);
    }
  }

  const Kernels& kernels_;
  const Call<Element>& call_;
  std::int64_t head_, pages_, stride_;
  float* columns_;
  Bits<Element>*rows_, *turned_;
};

// Writes out[head], for one query head.
template <typename Element>
void vote_head(const Kernels& kernels, const Call<Element>& call, std::int64_t head,
               Scratch& scratch) {
  const std::int64_t n = call.num_queries, dims = call.head_dim();
  float* queries = index::at_least(scratch.queries, (n + kQueriesAtOnce) * dims);
  kernels.widen(call.queries + head * n * dims, n * dims, queries);
  for (std::int64_t i = 0; i < n * dims; ++i) queries[i] *= call.scale;
  std::fill_n(queries + n * dims, kQueriesAtOnce * dims, 0.0f);
  const Rows rows{n,
                  dims,
                  queries,
                  call.query_positions,
                  index::at_least(scratch.peaks, n),
                  index::at_least(scratch.sums, n)};
  std::fill_n(rows.peaks, n, kHidden);
  std::fill_n(rows.sums, n, 0.0f);
  Tiles<Element> tiles(kernels, call, head / call.group, scratch);
  float* scores = index::at_least(scratch.scores, kQueriesAtOnce * tiles.stride());
  for (std::int64_t at = 0; at < call.slots; at += tiles.slots()) {
    kernels.softmax(rows, tiles.cached(at), scores);
  }
  for (std::int64_t at = 0; call.own_keys && at < n; at += tiles.slots()) {
    kernels.softmax(rows, tiles.own(at), scores);
  }
  for (std::int64_t i = 0; i < n; ++i) rows.peaks[i] += std::log(rows.sums[i]);
  float* votes = call.out + head * call.slots;
  std::fill_n(votes, call.slots, 0.0f);
  for (std::int64_t at = 0; at < call.slots; at += tiles.slots()) {
    kernels.votes(rows, tiles.cached(at), call.largest, scores, votes + at);
  }
}

// Cost: keys are read twice per query head, 4 * num_queries * slots * head_dim
// floating-point operations and 2 * num_queries * slots exponentials each.
template <typename Element>
void vote(const Kernels& kernels, const Call<Element>& call) {
  const std::int64_t heads = call.kv_heads * call.group;
  const std::int64_t products =
      2 * heads * call.num_queries * call.slots * call.head_dim();
  for_all(heads, Work::products(products), [&](std::int64_t head) {
    static thread_local Scratch scratch;
    vote_head(kernels, call, head, scratch);
  });
}

}  // namespace kvp::page_votes
