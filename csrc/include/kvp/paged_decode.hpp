// Decode attention of one new token per row to pages and to coarse entries, under one
// softmax: "a single attention computation over a mixed-resolution memory" (SeKV,
// section 3.3).
//
// Every (row, KV head) is one sequence:
//
//     page list    [ 7 | 2 | 19 ]              tokens at full resolution
//     coarse       (key, value, bias) ...      one entry stands for a span of |S|
//                                              tokens; its bias is log|S|
//     scores       scale * q.k                 scale * q.k + bias
//                  \______________ one softmax ______________/
//
// A sequence is cut into parts whose sizes depend only on the sequence. Parts are
// merged in order by log-sum-exp (FlashDecoding). Results are the same bits for any number
// of threads and whatever other sequences are in the call.
//
// All arguments are trusted (paged_decode_check.hpp checks them).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "kvp/decode_kernels.hpp"
#include "kvp/elements.hpp"
#include "kvp/for_all.hpp"
#include "kvp/key_view.hpp"
#include "kvp/page_copy.hpp"
#include "kvp/paged_kv.hpp"
#include "kvp/quantized_rows.hpp"

namespace kvp::decode {

using index::ElementType;

// Multiply-adds below which one thread does all work: about a tenth of a millisecond.
// Lower than kParallelWork: layers follow each other, so threads are still awake.
constexpr std::int64_t kParallelAttention = 1 << 21;
// Tokens per part, rounded up to whole pages; also coarse entries per part.
constexpr std::int64_t kPartTokens = 512;

// Arguments of one call. Matrices are row-major, without gaps.
struct Call {
  std::int64_t rows, kv_heads, group;
  float scale;

  const void* queries;  // [rows, kv_heads * group, head_dim]
  ElementType query_type;

  PagedKV<const void> kv;
  ElementType page_type;
  Fp8 page_fp8;  // the type of fp8 elements, read without a scale; kNone: page_type
  PageTable<std::int32_t> table;  // one row per sequence
  const std::int32_t* lengths;  // [sequences], tokens

  const void* coarse_keys;  // [entries, head_dim]
  const void* coarse_values;
  ElementType coarse_type;
  const float* bias;  // [entries]
  // [sequences], the run of entries of each sequence; in any order
  const std::int64_t* starts;
  const std::int64_t* counts;

  void* out;  // as queries
  float* lse;  // [rows, kv_heads * group]

  std::int64_t sequences() const { return rows * kv_heads; }
  std::int64_t head_dim() const { return kv.head_dim(); }
};

// Calls body with a pointer of the elements' type.
template <typename Body>
void with_type(ElementType type, const void* data, const Body& body) {
  if (type == ElementType::kFloat32) {
    body(static_cast<const float*>(data));
  } else {
    body(static_cast<const std::uint16_t*>(data));
  }
}

// Some tokens or coarse entries of a sequence, processed by one thread.
struct Part {
  std::int64_t sequence;
  std::int64_t first, count;
  bool coarse;
};

// The parts of all sequences, in order: pages first. Those of sequence s are
// [first[s], first[s + 1]).
struct Parts {
  std::vector<Part> list;
  std::vector<std::int64_t> first;
};

inline Parts list_parts(const Call& call) {
  Parts parts;
  const std::int64_t step = index::round_up(kPartTokens, call.kv.block_size());
  for (std::int64_t s = 0; s < call.sequences(); ++s) {
    parts.first.push_back(static_cast<std::int64_t>(parts.list.size()));
    const std::int64_t length = call.lengths[s];
    for (std::int64_t at = 0; at < length; at += step) {
      parts.list.push_back({s, at, std::min(step, length - at), false});
    }
    const std::int64_t entries = call.counts[s];
    for (std::int64_t at = 0; at < entries; at += kPartTokens) {
      const std::int64_t count = std::min(kPartTokens, entries - at);
      parts.list.push_back({s, call.starts[s] + at, count, true});
    }
  }
  parts.first.push_back(static_cast<std::int64_t>(parts.list.size()));
  return parts;
}

// Softmax results of the parts, see Heads.
struct Partials {
  std::int64_t group, head_dim;
  std::vector<float> peaks, sums;  // [parts, group]
  std::vector<float> totals;  // [parts, group, head_dim]

  Partials(std::int64_t parts, std::int64_t heads, std::int64_t dims)
      : group(heads),
        head_dim(dims),
        peaks(static_cast<std::size_t>(parts * heads),
              -std::numeric_limits<float>::infinity()),
        sums(static_cast<std::size_t>(parts * heads)),
        totals(static_cast<std::size_t>(parts * heads * dims)) {}

  Heads part(std::int64_t number, const float* queries) {
    const std::int64_t at = number * group;
    return {group,
            head_dim,
            queries,
            peaks.data() + at,
            sums.data() + at,
            totals.data() + at * head_dim};
  }
};

struct ThreadScratch {
  std::vector<float> queries;
  Scratch<float> wide;
  Scratch<std::uint16_t> narrow;
  Fp8Scratch fp8;

  Scratch<float>& of(const float*) { return wide; }
  Scratch<std::uint16_t>& of(const std::uint16_t*) { return narrow; }
};

// Attends to one part.
inline void attend_part(const Kernels& kernels, const Call& call, const Part& part,
                        std::int64_t number, Partials& partials,
                        ThreadScratch& scratch) {
  const std::int64_t dims = call.head_dim(), elems = call.group * dims;
  float* queries = index::at_least(scratch.queries, elems);
  with_type(call.query_type, call.queries, [&](const auto* base) {
    for (std::int64_t i = 0; i < elems; ++i) {
      queries[i] = widen(base[part.sequence * elems + i]) * call.scale;
    }
  });
  const Heads heads = partials.part(number, queries);
  if (part.coarse) {
    with_type(call.coarse_type, call.coarse_keys, [&](const auto* base) {
      const auto* values = static_cast<decltype(base)>(call.coarse_values);
      kernels.attend(base + part.first * dims, values + part.first * dims,
                     call.bias + part.first, part.count, heads, scratch.of(base));
    });
    return;
  }
  const std::int32_t* list =
      call.table.row(part.sequence) + part.first / call.kv.block_size();
  if (call.page_fp8 != Fp8::kNone) {
    kernels.pages_fp8(call.kv.as<const std::uint8_t>(), call.page_fp8, list, part.count,
                      heads, scratch.fp8);
    return;
  }
  with_type(call.page_type, call.kv.pages, [&](const auto* pages) {
    using Element = std::remove_pointer_t<decltype(pages)>;  // const
    kernels.attend(call.kv.as<Element>(), list, part.count, heads, scratch.of(pages));
  });
}

inline void store(float value, float* to) { *to = value; }

inline void store(float value, std::uint16_t* to) {
  *to = static_cast<std::uint16_t>(round_to_bfloat16(value));
}

// Merges the parts [begin, end) of one query head; totals receives the output.
// Returns its log-sum-exp.
inline float merge_head(const Partials& partials, std::int64_t begin, std::int64_t end,
                        std::int64_t head, std::vector<float>& totals) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const std::int64_t dims = partials.head_dim;
  totals.assign(static_cast<std::size_t>(dims), 0.0f);
  const auto at = [&](std::int64_t part) {
    return static_cast<std::size_t>(part * partials.group + head);
  };
  float peak = kNone, sum = 0.0f;
  for (std::int64_t p = begin; p < end; ++p)
    peak = std::max(peak, partials.peaks[at(p)]);
  for (std::int64_t p = begin; p < end; ++p) {
    if (partials.sums[at(p)] == 0.0f) continue;  // all of its entries are off
    const float share = std::exp(partials.peaks[at(p)] - peak);
    const float* part = partials.totals.data() + at(p) * static_cast<std::size_t>(dims);
    sum += share * partials.sums[at(p)];
    for (std::int64_t d = 0; d < dims; ++d) {
      totals[static_cast<std::size_t>(d)] += share * part[d];
    }
  }
  if (sum == 0.0f) return kNone;
  const float per_sum = 1.0f / sum;
  for (float& total : totals) total *= per_sum;
  return peak + std::log(sum);
}

// Writes the outputs of one sequence.
inline void merge_sequence(const Call& call, const Parts& parts, std::int64_t sequence,
                           const Partials& partials, std::vector<float>& totals) {
  const std::int64_t dims = call.head_dim();
  const auto s = static_cast<std::size_t>(sequence);
  for (std::int64_t h = 0; h < call.group; ++h) {
    const std::int64_t head = sequence * call.group + h;
    call.lse[head] =
        merge_head(partials, parts.first[s], parts.first[s + 1], h, totals);
    with_type(call.query_type, call.out, [&](const auto* base) {
      using Element = std::remove_cv_t<std::remove_pointer_t<decltype(base)>>;
      Element* out = static_cast<Element*>(call.out) + head * dims;
      for (std::int64_t d = 0; d < dims; ++d) {
        store(totals[static_cast<std::size_t>(d)], out + d);
      }
    });
  }
}

// Writes out and lse. A sequence with nothing to attend to gets zeros and -infinity.
//
// Cost: reads keys and values once per kHeadsAtOnce heads of a group, from the caches after
// the first time; 4 * group * head_dim operations and group exponentials per
// token.
inline void attend_mixed(const Kernels& kernels, const Call& call) {
  const Parts parts = list_parts(call);
  const auto num_parts = static_cast<std::int64_t>(parts.list.size());
  Partials partials(num_parts, call.group, call.head_dim());
  std::int64_t tokens = 0;
  for (const Part& part : parts.list) tokens += part.count;
  const Work work{2 * tokens * call.group * call.head_dim(), kParallelAttention};
  for_all(num_parts, work, [&](std::int64_t number) {
    static thread_local ThreadScratch scratch;
    attend_part(kernels, call, parts.list[static_cast<std::size_t>(number)], number,
                partials, scratch);
  });
  const auto partial_bytes =
      static_cast<std::int64_t>(partials.totals.size() * sizeof(float));
  for_all(call.sequences(), Work::bytes(partial_bytes), [&](std::int64_t sequence) {
    static thread_local std::vector<float> totals;
    merge_sequence(call, parts, sequence, partials, totals);
  });
}

}  // namespace kvp::decode
