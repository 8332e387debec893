// The reconstruction of low_rank.hpp on CUDA: one launch per call, on plain pointers
// and a stream. Records are on the device; the host knows where each begins.
//
// A block computes a tile of 32 tokens x 64 dimensions of U diag(sigma) V^T, 32 components
// at a time through shared memory. Sums are float32, in the order of the components.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "kvp/elements.cuh"
#include "kvp/factor_record.hpp"
#include "kvp/launch.cuh"

namespace kvp::cuda {

constexpr int kRowTileTokens = 32;
constexpr int kRowTileDims = 64;
constexpr int kComponents = 32;
constexpr int kTokensPerWarp = kRowTileTokens / (kThreads / 32);

// A tile of tokens of a matrix, and where the parts of its record begin, in elements.
// Where the record holds rows, only left is used.
struct RowTile {
  std::int64_t sigma, left, right;  // left: of the first token of the tile
  std::int64_t rank, tokens;  // tokens: at most kRowTileTokens
  std::int64_t first_row;  // among all rows of the call
};

// Appends the tiles of one matrix. `first_row` is the row of its first token.
template <typename Factor>
void list_rows(const svd::Record<Factor>& shape, std::int64_t begin,
               std::int64_t first_row, std::vector<RowTile>& list) {
  for (std::int64_t t = 0; t < shape.tokens; t += kRowTileTokens) {
    const std::int64_t left = shape.tokens - t;
    const std::int64_t tokens = left < kRowTileTokens ? left : kRowTileTokens;
    if (shape.holds_rows()) {
      list.push_back(
          {0, begin + t * shape.head_dim, 0, shape.rank, tokens, first_row + t});
      continue;
    }
    list.push_back({begin, begin + shape.left() + t * shape.rank, begin + shape.right(),
                    shape.rank, tokens, first_row + t});
  }
}

// A float32 among elements of either type.
__device__ inline float float_at(const float* record) { return *record; }
__device__ inline float float_at(const BFloat16* record) {
  return __uint_as_float(static_cast<std::uint32_t>(record[1].bits) << 16 |
                         record[0].bits);
}

// Writes the rows [tokens, head_dim] of all listed tiles to `out`.
template <typename Factor, typename Element>
__global__ void make_rows(const Factor* factors, const RowTile* list, std::int64_t n,
                          std::int64_t head_dim, Element* out) {
  // One element longer than a row, so that lanes write to different banks.
  KVP_SHARED(float, left, kRowTileTokens*(kComponents + 1));
  KVP_SHARED(float, right, kComponents* kRowTileDims);
  constexpr int kPerFloat = static_cast<int>(sizeof(float) / sizeof(Factor));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t across = (head_dim + kRowTileDims - 1) / kRowTileDims;
  for (std::int64_t work = blockIdx.x; work < n * across; work += gridDim.x) {
    const RowTile rows = list[work / across];
    const std::int64_t first_dim = work % across * kRowTileDims;
    float sums[kTokensPerWarp][2] = {};
    for (std::int64_t first = 0; first < rows.rank; first += kComponents) {
      const std::int64_t k = first + lane;
      for (int t = warp; t < kRowTileTokens; t += kThreads / 32) {
        const bool in_range = t < rows.tokens && k < rows.rank;
        left[t * (kComponents + 1) + lane] =
            in_range ? element_to_float(factors[rows.left + t * rows.rank + k]) : 0.0f;
      }
      for (int i = static_cast<int>(threadIdx.x); i < kComponents * kRowTileDims;
           i += kThreads) {
        const std::int64_t component = first + i / kRowTileDims;
        const std::int64_t d = first_dim + i % kRowTileDims;
        float value = 0.0f;
        if (component < rows.rank && d < head_dim) {
          value = element_to_float(factors[rows.right + component * head_dim + d]) *
                  float_at(factors + rows.sigma + component * kPerFloat);
        }
        right[i] = value;
      }
      __syncthreads();
      for (int i = 0; i < kComponents; ++i) {
        const float low = right[i * kRowTileDims + lane];
        const float high = right[i * kRowTileDims + lane + 32];
        for (int t = 0; t < kTokensPerWarp; ++t) {
          const float u = left[(warp * kTokensPerWarp + t) * (kComponents + 1) + i];
          sums[t][0] += u * low;
          sums[t][1] += u * high;
        }
      }
      __syncthreads();
    }
    for (int t = 0; t < kTokensPerWarp; ++t) {
      const int token = warp * kTokensPerWarp + t;
      for (int half = 0; half < 2; ++half) {
        const std::int64_t d = first_dim + lane + 32 * half;
        if (token >= rows.tokens || d >= head_dim) continue;
        const float value =
            rows.rank == svd::kRows
                ? element_to_float(factors[rows.left + token * head_dim + d])
                : sums[t][half];
        store_element(value, out + (rows.first_row + token) * head_dim + d);
      }
    }
  }
}

// Writes the rows of all listed tiles to `out`. `list` is on the device.
template <typename Factor, typename Element>
void reconstruct(const Factor* factors, const RowTile* list, std::int64_t n,
                 std::int64_t head_dim, Element* out, cudaStream_t stream) {
  if (n * head_dim == 0) return;
  const std::int64_t across = (head_dim + kRowTileDims - 1) / kRowTileDims;
  launch(make_rows<Factor, Element>, at_most_blocks(n * across), kThreads, stream,
         factors, list, n, head_dim, out);
}

}  // namespace kvp::cuda
