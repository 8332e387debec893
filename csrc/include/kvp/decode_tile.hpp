// Attention of one group of query heads to a tile of tokens, W floats at a time.
//
// All query heads of a group share one pass over keys and values. For each tile of
// tokens: compute the scores, then their softmax relative to the largest score so far
// (FlashAttention's online softmax), then the weighted sum of values. Earlier sums are
// rescaled when a larger score appears. Everything is float32 except the elements in
// memory.
//
//     keys, by columns   [dims][slots]   one vector = one dimension of W tokens
//     keys, by rows      [tokens][dims]  dot products of simd.hpp
//     values, by rows    [tokens][dims]  one vector = W dimensions of one token
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kvp/dot_products.hpp"
#include "kvp/exponential.hpp"
#include "kvp/index_common.hpp"

namespace kvp::decode {

// Tokens whose scores are held at once; a page may be larger.
constexpr std::int64_t kTileSlots = 256;
// Scores are computed in whole vectors, so the last vector may reach past the tile.
constexpr std::int64_t kWidest = 16;

// The query heads that share a KV head, and their softmax so far.
// A head's share of the output is totals / sums, its log-sum-exp peak + log(sum).
struct Heads {
  std::int64_t group;
  std::int64_t dims;
  const float* queries;  // [group][dims], times the scale of the scores
  float* peaks;          // [group], the largest score; -infinity at first
  float* sums;           // [group], of exp(score - peak)
  float* totals;         // [group][dims], the same times values
};

// The values of a run of tokens, and those of a later run to prefetch.
template <typename Element>
struct Run {
  const Element* values;
  std::int64_t count;
  const Element* ahead;
};

// Heads that share the loads of keys or values, limited by the number of registers.
template <int W>
constexpr int kHeadsAtOnce = W == 16 ? 4 : 2;

// Prefetches N elements into L2. L1 supports fewer outstanding lines: prefetching into it
// was half as fast.
template <int N, typename Element>
KVP_INLINE void fetch(const Element* from) {
  constexpr int kLine = 64 / sizeof(Element);
#pragma GCC unroll 8
  for (int i = 0; i < N; i += kLine) __builtin_prefetch(from + i, 0, 2);
}

// Loads two vectors of elements. For bfloat16 these are the even and the odd elements:
// a shift and a mask split words of two, several times cheaper than widening.
template <int W>
KVP_INLINE void load_pair(const float* from, typename Vec<W>::F* to) {
  load<W>(from, to[0]);
  load<W>(from + W, to[1]);
}

template <int W>
KVP_INLINE void load_pair(const std::uint16_t* from, typename Vec<W>::F* to) {
  typename Vec<W>::U words, even, odd;
  std::memcpy(&words, from, sizeof words);
  even = words << 16;
  odd = words & 0xffff0000u;
  std::memcpy(&to[0], &even, sizeof even);
  std::memcpy(&to[1], &odd, sizeof odd);
}

// Floats in the order that load_pair has for Element, and back.
template <int W, typename Element, int... I>
KVP_INLINE void load_pair_of(const float* from, typename Vec<W>::F* to,
                             std::integer_sequence<int, I...>) {
  load_pair<W>(from, to);
  if constexpr (sizeof(Element) == 2) {
    const typename Vec<W>::F low = to[0], high = to[1];
    to[0] = __builtin_shufflevector(low, high, 2 * I...);
    to[1] = __builtin_shufflevector(low, high, 2 * I + 1 ...);
  }
}

template <int W, typename Element, int... I>
KVP_INLINE void store_pair_of(const typename Vec<W>::F* pair, float* to,
                              std::integer_sequence<int, I...>) {
  typename Vec<W>::F low = pair[0], high = pair[1];
  if constexpr (sizeof(Element) == 2) {
    low = __builtin_shufflevector(pair[0], pair[1], I / 2 + I % 2 * W...);
    high = __builtin_shufflevector(pair[0], pair[1], (I + W) / 2 + I % 2 * W...);
  }
  std::memcpy(to, &low, sizeof low);
  std::memcpy(to + W, &high, sizeof high);
}

// S vectors of elements or of floats in their order, S being 1 or a multiple of 2.
template <int W, int S, typename Element>
KVP_INLINE void load_some_vectors(const Element* from, typename Vec<W>::F* to) {
  if constexpr (S == 1) {
    load<W>(from, to[0]);
  } else {
#pragma GCC unroll 2
    for (int s = 0; s < S; s += 2) load_pair<W>(from + s * W, to + s);
  }
}

template <int W, int S, typename Element>
KVP_INLINE void load_floats(const float* from, typename Vec<W>::F* to) {
  if constexpr (S == 1) {
    load<W>(from, to[0]);
  } else {
#pragma GCC unroll 2
    for (int s = 0; s < S; s += 2) {
      load_pair_of<W, Element>(from + s * W, to + s,
                               std::make_integer_sequence<int, W>());
    }
  }
}

template <int W, int S, typename Element>
KVP_INLINE void store_floats(const typename Vec<W>::F* from, float* to) {
  if constexpr (S == 1) {
    std::memcpy(to, from, sizeof *from);
  } else {
#pragma GCC unroll 2
    for (int s = 0; s < S; s += 2) {
      store_pair_of<W, Element>(from + s, to + s * W,
                                std::make_integer_sequence<int, W>());
    }
  }
}

// out[h * stride + s] = queries[h] . keys[:, s] for H heads and S vectors of slots.
// Also prefetches the same part of the plane at `ahead`. Two sums per score, of even and
// odd dimensions, because one sum would wait for its own previous addition.
template <int W, int H, int S, typename Element>
KVP_INLINE void score_columns(const float* queries, std::int64_t dims,
                              const Element* keys, const Element* ahead,
                              std::int64_t slots, float* out, std::int64_t stride) {
  typename Vec<W>::F sums[2][H][S] = {}, key[S];
  std::int64_t d = 0;
  for (; d + 2 <= dims; d += 2) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      fetch<S * W>(ahead + (d + odd) * slots);
      load_some_vectors<W, S>(keys + (d + odd) * slots, key);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) {
          sums[odd][h][s] += queries[h * dims + d + odd] * key[s];
        }
      }
    }
  }
  if (d < dims) {
    load_some_vectors<W, S>(keys + d * slots, key);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) sums[0][h][s] += queries[h * dims + d] * key[s];
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) sums[0][h][s] += sums[1][h][s];
    store_floats<W, S, Element>(sums[0][h], out + h * stride);
  }
}

// Scores of H heads with the first count slots of a page, rounded up to vectors.
template <int W, int H, typename Element>
KVP_INLINE void score_page(const float* queries, std::int64_t dims, const Element* keys,
                           const Element* ahead, std::int64_t slots, std::int64_t count,
                           float* out, std::int64_t stride) {
  std::int64_t s = 0;
  for (; s < count && s + 2 * W <= slots; s += 2 * W) {
    score_columns<W, H, 2>(queries, dims, keys + s, ahead + s, slots, out + s, stride);
  }
  for (; s < count; s += W) {
    score_columns<W, H, 1>(queries, dims, keys + s, ahead + s, slots, out + s, stride);
  }
}

// The same for all heads. Slots of a page are a multiple of W.
template <int W, typename Element>
KVP_INLINE void score_page_of_columns(const Heads& heads, const Element* keys,
                                      const Element* ahead, std::int64_t slots,
                                      std::int64_t count, float* out,
                                      std::int64_t stride) {
  const std::int64_t dims = heads.dims;
  std::int64_t h = 0;
  while (h < heads.group) {
    const float* queries = heads.queries + h * dims;
    float* scores = out + h * stride;
    const std::int64_t left = heads.group - h;
    if (left >= 4 && kHeadsAtOnce<W> == 4) {
      score_page<W, 4>(queries, dims, keys, ahead, slots, count, scores, stride);
      h += 4;
    } else if (left >= 3 && kHeadsAtOnce<W> == 4) {
      score_page<W, 3>(queries, dims, keys, ahead, slots, count, scores, stride);
      h += 3;
    } else if (left >= 2) {
      score_page<W, 2>(queries, dims, keys, ahead, slots, count, scores, stride);
      h += 2;
    } else {
      score_page<W, 1>(queries, dims, keys, ahead, slots, count, scores, stride);
      h += 1;
    }
  }
}

// The same for `count` keys that are rows.
template <int W, typename Element>
KVP_INLINE void score_rows(const Heads& heads, const Element* keys, std::int64_t count,
                           float* out, std::int64_t stride) {
  for (std::int64_t h = 0; h < heads.group; ++h) {
    index::score_rows_body<W>(heads.queries + h * heads.dims, heads.dims, keys, nullptr,
                              heads.dims, count, out + h * stride);
  }
}

// Replaces the scores of one head by exp(score - peak) with the new peak. Returns the
// factor for earlier sums. `scores` has room for whole vectors.
template <int W>
KVP_INLINE float soften(float* scores, std::int64_t n, float& peak, float& sum) {
  using F = typename Vec<W>::F;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const std::int64_t padded = index::round_up(n, W);
  for (std::int64_t i = n; i < padded; ++i) scores[i] = kNone;
  F best = F{} + kNone, some;
  for (std::int64_t i = 0; i < padded; i += W) {
    load<W>(scores + i, some);
    best = some > best ? some : best;
  }
  float top = peak;
  for (int lane = 0; lane < W; ++lane) top = best[lane] > top ? best[lane] : top;
  for (std::int64_t i = 0; i < n; ++i) {
    scores[i] = index::exp_of_logit(scores[i] - top);
  }
  for (std::int64_t i = n; i < padded; ++i) scores[i] = 0.0f;
  F parts = {};
  for (std::int64_t i = 0; i < padded; i += W) {
    load<W>(scores + i, some);
    parts += some;
  }
  const Vec<4>::F four = fold(parts);
  const float factor = index::exp_of_logit(peak - top);
  sum = sum * factor + ((four[0] + four[1]) + (four[2] + four[3]));
  peak = top;
  return factor;
}

// n elements, padded with zeros to a vector.
template <int W, typename Element>
KVP_INLINE void load_some(const Element* from, std::int64_t n, typename Vec<W>::F& to) {
  Element padded[W] = {};
  std::memcpy(padded, from, static_cast<std::size_t>(n) * sizeof(Element));
  load<W>(padded, to);
}

// totals[h] = totals[h] * factors[h] + sum of weights[h][t] * values[t], for H heads
// and C vectors of dimensions, which start at a column.
template <int W, int H, int C, typename Element>
KVP_INLINE void add_columns(const Run<Element>* runs, std::int64_t num_runs,
                            std::int64_t column, std::int64_t dims,
                            const float* weights, std::int64_t stride,
                            const float* factors, float* totals) {
  typename Vec<W>::F sums[H][C], value[C];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
    load_floats<W, C, Element>(totals + h * dims + column, sums[h]);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[h][c] *= factors[h];
  }
  for (std::int64_t r = 0; r < num_runs; ++r) {
    const Element* row = runs[r].values + column;
    const Element* later = runs[r].ahead + column;
    for (std::int64_t t = 0; t < runs[r].count; ++t) {
      fetch<C * W>(later);
      load_some_vectors<W, C>(row, value);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[h][c] += weights[h * stride] * value[c];
      }
      row += dims;
      later += dims;
      ++weights;
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
    store_floats<W, C, Element>(sums[h], totals + h * dims + column);
  }
}

// The same for one head and the dimensions after the last whole vector.
template <int W, typename Element>
KVP_INLINE void add_rest(const Run<Element>* runs, std::int64_t num_runs,
                         std::int64_t column, std::int64_t dims, const float* weights,
                         float factor, float* totals) {
  typename Vec<W>::F sum, value;
  const std::int64_t rest = dims - column;
  load_some<W>(totals + column, rest, sum);
  sum *= factor;
  for (std::int64_t r = 0; r < num_runs; ++r) {
    const Element* row = runs[r].values + column;
    for (std::int64_t t = 0; t < runs[r].count; ++t, row += dims, ++weights) {
      load_some<W>(row, rest, value);
      sum += *weights * value;
    }
  }
  std::memcpy(totals + column, &sum, static_cast<std::size_t>(rest) * sizeof(float));
}

template <int W, int H, typename Element>
KVP_INLINE void add_values(const Run<Element>* runs, std::int64_t num_runs,
                           std::int64_t dims, const float* weights, std::int64_t stride,
                           const float* factors, float* totals) {
  std::int64_t column = 0;
  while (column + W <= dims) {
    const std::int64_t left = (dims - column) / W;
    const std::int64_t step = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    if (step == 4) {
      add_columns<W, H, 4>(runs, num_runs, column, dims, weights, stride, factors,
                           totals);
    } else if (step == 2) {
      add_columns<W, H, 2>(runs, num_runs, column, dims, weights, stride, factors,
                           totals);
    } else {
      add_columns<W, H, 1>(runs, num_runs, column, dims, weights, stride, factors,
                           totals);
    }
    column += step * W;
  }
  if (column == dims) return;
  for (int h = 0; h < H; ++h) {
    add_rest<W>(runs, num_runs, column, dims, weights + h * stride, factors[h],
                totals + h * dims);
  }
}

// Adds a tile of n tokens with given scores to the sums of the heads.
template <int W, typename Element>
KVP_INLINE void add_tile(const std::vector<Run<Element>>& runs, float* scores,
                         std::int64_t n, std::int64_t stride, const Heads& heads) {
  const auto num_runs = static_cast<std::int64_t>(runs.size());
  const std::int64_t dims = heads.dims;
  std::int64_t h = 0;
  while (h < heads.group) {
    const std::int64_t left = heads.group - h;
    const std::int64_t step = left < kHeadsAtOnce<W> ? left : kHeadsAtOnce<W>;
    float factors[4];
    float* weights = scores + h * stride;
    for (std::int64_t i = 0; i < step; ++i) {
      factors[i] =
          soften<W>(weights + i * stride, n, heads.peaks[h + i], heads.sums[h + i]);
    }
    float* totals = heads.totals + h * dims;
    if (step == 4) {
      add_values<W, 4>(runs.data(), num_runs, dims, weights, stride, factors, totals);
    } else if (step == 3) {
      add_values<W, 3>(runs.data(), num_runs, dims, weights, stride, factors, totals);
    } else if (step == 2) {
      add_values<W, 2>(runs.data(), num_runs, dims, weights, stride, factors, totals);
    } else {
      add_values<W, 1>(runs.data(), num_runs, dims, weights, stride, factors, totals);
    }
    h += step;
  }
}

}  // namespace kvp::decode
