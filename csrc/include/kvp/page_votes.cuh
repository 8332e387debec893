// Page votes on CUDA: three launches per call, on plain pointers and a stream.
//
//     part_softmax   a block per 32 rows and 1024 keys: peak and sum of the part
//     merge_parts    a thread per row: log-sum-exp, parts in their order
//     add_votes      a block per 64 slots of a query head: weights of all its queries
//
// A row is a query of a query head. No sum depends on the order of blocks or threads.
// As in page_copy.cuh, the host checks nothing: a page out of range traps.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kvp/elements.cuh"
#include "kvp/launch.cuh"
#include "kvp/paged_kv.hpp"

namespace kvp::cuda {

// A tile of scores: kTileRows rows x kTileKeys keys, kTileDims dimensions at a time. A
// warp has kRowsPerWarp rows; a lane two keys of each.
constexpr int kWarps = kThreads / 32;
constexpr int kRowsPerWarp = 4;
constexpr int kTileRows = kWarps * kRowsPerWarp;
constexpr int kTileKeys = 64;
constexpr int kTileDims = 32;
// One element longer than a row, so that lanes that read different keys read different
// banks.
constexpr int kTileStride = kTileDims + 1;
constexpr std::int64_t kPartKeys = 1024;

// Arguments of one call, see page_votes.hpp. Key i of a head is in its pages if i < slots,
// and otherwise key i - slots of own_keys.
template <typename Element>
struct VoteCall {
  std::int64_t kv_heads, group, num_queries, slots;
  float scale;
  bool largest;
  const Element* queries;
  const std::int64_t* query_positions;
  const Element* own_keys;
  PagedKV<const Element> kv;      // only the plane of keys is read
  PageTable<std::int64_t> table;  // one row per KV head
  const std::int64_t* positions;
  float* out;

  __host__ __device__ std::int64_t keys() const {
    return slots + (own_keys != nullptr ? num_queries : 0);
  }
  __host__ __device__ std::int64_t rows_per_head() const { return group * num_queries; }
  __host__ __device__ std::int64_t parts() const {
    return (keys() + kPartKeys - 1) / kPartKeys;
  }
};

// Floats of scratch: peak and sum of every part of every row, then the log-sum-exps.
template <typename Element>
std::int64_t vote_scratch(const VoteCall<Element>& call) {
  return call.kv_heads * call.rows_per_head() * (2 * call.parts() + 1);
}

constexpr float kNoScore = -INFINITY;

// Dimension d of a key. If the position of the key is negative, the result is 0 and the
// page is not read and need not exist.
template <typename Element>
__device__ inline float key_element(const VoteCall<Element>& call, std::int64_t head,
                                    std::int64_t key, std::int64_t d) {
  if (key >= call.slots) {
    const std::int64_t own = head * call.num_queries + (key - call.slots);
    return element_to_float(call.own_keys[own * call.kv.head_dim() + d]);
  }
  if (call.positions[head * call.slots + key] < 0) return 0.0f;
  const Plane& keys = call.kv.layout.keys;
  const std::int64_t entry = key / call.kv.block_size();
  const std::int64_t slot = key - entry * call.kv.block_size();
  const std::int64_t page = call.table.row(head)[entry];
  require_below(page, call.kv.num_pages);
  const std::int64_t at = keys.kind == PlaneKind::kRows
                              ? keys.base + slot * keys.slot_stride + d
                              : keys.offsets[slot * call.kv.head_dim() + d];
  return element_to_float(call.kv.page(page)[at]);
}

template <typename Element>
__device__ inline std::int64_t key_position(const VoteCall<Element>& call,
                                            std::int64_t head, std::int64_t key) {
  return key < call.slots ? call.positions[head * call.slots + key]
                          : call.query_positions[key - call.slots];
}

// This thread's scores of a tile, kNoScore where a query does not see a key:
// scores[r][k] of row first_row + warp * kRowsPerWarp + r and key first_key + lane +
// 32 * k, if row and key exist. All threads of a block must call it.
template <typename Element>
__device__ inline void score_tile(const VoteCall<Element>& call, std::int64_t head,
                                  std::int64_t first_row, std::int64_t end_row,
                                  std::int64_t first_key, std::int64_t end_key,
                                  float (&scores)[kRowsPerWarp][2]) {
  KVP_SHARED(float, rows, kTileRows* kTileStride);
  KVP_SHARED(float, keys, kTileKeys* kTileStride);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  for (int r = 0; r < kRowsPerWarp; ++r) scores[r][0] = scores[r][1] = 0.0f;
  for (std::int64_t dim = 0; dim < call.kv.head_dim(); dim += kTileDims) {
    const std::int64_t d = dim + lane;
    const bool inside = d < call.kv.head_dim();
    for (int r = warp; r < kTileRows; r += kWarps) {
      const std::int64_t row = first_row + r;
      const bool there = inside && row < end_row;
      rows[r * kTileStride + lane] =
          there ? element_to_float(call.queries[(head * call.rows_per_head() + row) *
                                                    call.kv.head_dim() +
                                                d])
                : 0.0f;
    }
    for (int k = warp; k < kTileKeys; k += kWarps) {
      const std::int64_t key = first_key + k;
      keys[k * kTileStride + lane] =
          inside && key < end_key ? key_element(call, head, key, d) : 0.0f;
    }
    __syncthreads();
    for (int i = 0; i < kTileDims; ++i) {
      const float left = keys[lane * kTileStride + i];
      const float right = keys[(lane + 32) * kTileStride + i];
      for (int r = 0; r < kRowsPerWarp; ++r) {
        const float query = rows[(warp * kRowsPerWarp + r) * kTileStride + i];
        scores[r][0] += query * left;
        scores[r][1] += query * right;
      }
    }
    __syncthreads();
  }
  for (int r = 0; r < kRowsPerWarp; ++r) {
    const std::int64_t row = first_row + warp * kRowsPerWarp + r;
    for (int k = 0; k < 2; ++k) {
      const std::int64_t key = first_key + lane + 32 * k;
      bool seen = row < end_row && key < end_key;
      if (seen) {
        const std::int64_t at = key_position(call, head, key);
        seen = at >= 0 && at <= call.query_positions[row % call.num_queries];
      }
      const float score = scores[r][k] * call.scale;
      // NaN weighs nothing, as on a CPU; it would also break the maximum of the row
      scores[r][k] = seen && score > kNoScore ? score : kNoScore;
    }
  }
}

// Adds (peak, sum) of another part of a row; the order does not matter.
__device__ inline void merge_part(float& peak, float& sum, float other_peak,
                                  float other_sum) {
  const float largest = peak > other_peak ? peak : other_peak;
  if (largest == kNoScore) return;
  const float own = peak > kNoScore ? expf(peak - largest) * sum : 0.0f;
  const float other =
      other_peak > kNoScore ? expf(other_peak - largest) * other_sum : 0.0f;
  peak = largest;
  sum = own + other;
}

// parts[row][part] = (peak, sum of exp(score - peak)), rows of all KV heads.
template <typename Element>
__global__ void part_softmax(VoteCall<Element> call, float* parts) {
  const std::int64_t row_blocks = (call.rows_per_head() + kTileRows - 1) / kTileRows;
  const std::int64_t total = call.kv_heads * row_blocks * call.parts();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (std::int64_t work = blockIdx.x; work < total; work += gridDim.x) {
    const std::int64_t part = work % call.parts();
    const std::int64_t block = work / call.parts();
    const std::int64_t head = block / row_blocks;
    const std::int64_t first_row = block % row_blocks * kTileRows;
    const std::int64_t end = (part + 1) * kPartKeys;
    const std::int64_t end_key = end < call.keys() ? end : call.keys();
    float peaks[kRowsPerWarp], sums[kRowsPerWarp];
    for (int r = 0; r < kRowsPerWarp; ++r) peaks[r] = kNoScore, sums[r] = 0.0f;
    for (std::int64_t key = part * kPartKeys; key < end_key; key += kTileKeys) {
      float scores[kRowsPerWarp][2];
      score_tile(call, head, first_row, call.rows_per_head(), key, end_key, scores);
      for (int r = 0; r < kRowsPerWarp; ++r) {
        for (int k = 0; k < 2; ++k) merge_part(peaks[r], sums[r], scores[r][k], 1.0f);
      }
    }
    for (int r = 0; r < kRowsPerWarp; ++r) {
      for (int step = 16; step > 0; step /= 2) {
        const float peak = __shfl_xor_sync(0xffffffffu, peaks[r], step);
        const float sum = __shfl_xor_sync(0xffffffffu, sums[r], step);
        merge_part(peaks[r], sums[r], peak, sum);
      }
      const std::int64_t row = first_row + warp * kRowsPerWarp + r;
      if (threadIdx.x % 32 != 0 || row >= call.rows_per_head()) continue;
      float* to =
          parts + ((head * call.rows_per_head() + row) * call.parts() + part) * 2;
      to[0] = peaks[r];
      to[1] = sums[r];
    }
  }
}

// lse[row] = log of the sum of exp(score) over all parts; kNoScore without any.
static __global__ void merge_parts(const float* parts, std::int64_t num_rows,
                                   std::int64_t num_parts, float* lse) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       row < num_rows; row += step) {
    float peak = kNoScore, sum = 0.0f;
    for (std::int64_t part = 0; part < num_parts; ++part) {
      const float* from = parts + (row * num_parts + part) * 2;
      merge_part(peak, sum, from[0], from[1]);
    }
    lse[row] = peak > kNoScore ? peak + logf(sum) : kNoScore;
  }
}

// out[query head][slot] = the sum of the weights of the head's queries, or the largest.
template <typename Element>
__global__ void add_votes(VoteCall<Element> call, const float* lse) {
  KVP_SHARED(float, votes, kWarps* kTileKeys);
  const std::int64_t tiles = (call.slots + kTileKeys - 1) / kTileKeys;
  const std::int64_t total = call.kv_heads * call.group * tiles;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (std::int64_t work = blockIdx.x; work < total; work += gridDim.x) {
    const std::int64_t query_head = work / tiles;
    const std::int64_t head = query_head / call.group;
    const std::int64_t first_key = work % tiles * kTileKeys;
    const std::int64_t first_row = query_head % call.group * call.num_queries;
    const std::int64_t end_row = first_row + call.num_queries;
    float mine[2] = {0.0f, 0.0f};
    for (std::int64_t row = first_row; row < end_row; row += kTileRows) {
      float scores[kRowsPerWarp][2];
      score_tile(call, head, row, end_row, first_key, call.slots, scores);
      for (int r = 0; r < kRowsPerWarp; ++r) {
        const std::int64_t at = row + warp * kRowsPerWarp + r;
        if (at >= end_row) break;
        const float from = lse[head * call.rows_per_head() + at];
        for (int k = 0; k < 2; ++k) {
          if (scores[r][k] == kNoScore) continue;
          const float weight = expf(scores[r][k] - from);
          mine[k] = !call.largest      ? mine[k] + weight
                    : weight > mine[k] ? weight
                                       : mine[k];
        }
      }
    }
    for (int k = 0; k < 2; ++k) votes[warp * kTileKeys + lane + 32 * k] = mine[k];
    __syncthreads();
    const std::int64_t slot = first_key + threadIdx.x;
    if (threadIdx.x < kTileKeys && slot < call.slots) {
      float vote = 0.0f;
      for (int w = 0; w < kWarps; ++w) {
        const float part = votes[w * kTileKeys + static_cast<int>(threadIdx.x)];
        vote = !call.largest ? vote + part : part > vote ? part : vote;
      }
      call.out[query_head * call.slots + slot] = vote;
    }
    // The votes of the next tile are written after the barriers of its scores.
  }
}

// See page_votes::vote. `scratch` has room for vote_scratch(call) floats.
template <typename Element>
void vote(const VoteCall<Element>& call, float* scratch, cudaStream_t stream) {
  const std::int64_t rows = call.kv_heads * call.rows_per_head();
  const std::int64_t votes = call.kv_heads * call.group * call.slots;
  if (votes == 0) return;
  if (rows == 0) {  // no queries
    (void)cudaMemsetAsync(call.out, 0, votes * sizeof(float), stream);
    return;
  }
  float* lse = scratch + rows * 2 * call.parts();
  const std::int64_t row_blocks = (call.rows_per_head() + kTileRows - 1) / kTileRows;
  launch(part_softmax<Element>,
         at_most_blocks(call.kv_heads * row_blocks * call.parts()), kThreads, stream,
         call, scratch);
  launch(merge_parts, blocks_for(rows), kThreads, stream, scratch, rows, call.parts(),
         lse);
  const std::int64_t tiles = (call.slots + kTileKeys - 1) / kTileKeys;
  launch(add_votes<Element>, at_most_blocks(call.kv_heads * call.group * tiles),
         kThreads, stream, call, lse);
}

}  // namespace kvp::cuda
