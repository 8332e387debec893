// assign.hpp on CUDA: three launches per call, on plain pointers and a stream.
//
//     find_peaks   the largest |value| of each head, for the unit of its sums
//     assign_keys  a block per 32 keys: nearest prototype; sums and sizes of clusters
//     look_up      a thread per slot: its cluster's mean
//
// Cluster sums are 64-bit integers, as in assign.hpp: atomic additions give the same bits
// in any order. Products are float32, added in the order of the dimensions.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "kvp/elements.cuh"
#include "kvp/launch.cuh"

namespace kvp::cuda {

// A tile of products: kAssignKeys keys times kAssignPrototypes prototypes, kAssignDims
// dimensions at a time. A warp has kKeysPerWarp keys; a lane two prototypes.
constexpr int kAssignKeys = 32;
constexpr int kAssignPrototypes = 64;
constexpr int kAssignDims = 32;
constexpr int kAssignStride = kAssignDims + 1;  // rows start in different banks
constexpr int kAssignWarps = kThreads / 32;
constexpr int kKeysPerWarp = kAssignKeys / kAssignWarps;

using Word = unsigned long long;  // type of atomic additions; negative sums wrap

template <typename Element>
struct AssignCall {
  const Element* keys;  // [heads, slots, head_dim], elements of a key contiguous
  std::int64_t head_stride, slot_stride;
  std::int64_t heads, slots, head_dim, prototypes;
  const float* rows;  // [heads, prototypes, head_dim]
  const float* values;  // [heads, slots]
  const bool* valid;  // [heads, slots]; null: all
  std::int64_t* clusters;
  float* means;

  __host__ __device__ std::int64_t table() const { return prototypes + 1; }
};

// Words of scratch: the peaks, then sum and size of every cluster.
template <typename Element>
std::int64_t assign_scratch(const AssignCall<Element>& call) {
  return call.heads * (1 + 2 * call.table());
}

// Exponent of a power of two such that num_values times the largest value fits into 62
// bits.
__device__ inline int unit_exponent(Word peak_bits, std::int64_t num_values) {
  int exponent = 0;
  frexp(static_cast<double>(__uint_as_float(static_cast<unsigned>(peak_bits))),
        &exponent);
  int bits = 62;
  for (std::int64_t rest = num_values; rest > 0; rest >>= 1) --bits;
  return exponent - bits;
}

template <typename Element>
__global__ void find_peaks(AssignCall<Element> call, Word* peaks) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = call.heads * call.slots;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total;
       i += step) {
    if (call.valid != nullptr && !call.valid[i]) continue;
    // The bits of non-negative floats are ordered like the floats.
    const Word size = __float_as_uint(fabsf(call.values[i]));
    if (size > 0) atomicMax(peaks + i / call.slots, size);
  }
}

// The nearest prototype that this thread has seen; ties go to the lower.
struct Nearest {
  float cosine;
  int number;

  __device__ void take(float other, int at) {
    const bool better = other > cosine || (other == cosine && at < number);
    cosine = better ? other : cosine;
    number = better ? at : number;
  }
};

// Adds products of one tile: sums[t][p] of key warp * kKeysPerWarp + t with prototype
// first + lane + 32 * p. exists[p]: whether that is not a row of zeros. All threads of a
// block must call it.
template <typename Element>
__device__ inline void multiply_tile(const AssignCall<Element>& call, std::int64_t head,
                                     std::int64_t first_slot, std::int64_t first,
                                     float (&sums)[kKeysPerWarp][2],
                                     bool (&exists)[2]) {
  KVP_SHARED(float, keys, kAssignKeys* kAssignStride);
  KVP_SHARED(float, rows, kAssignPrototypes* kAssignStride);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (std::int64_t dim = 0; dim < call.head_dim; dim += kAssignDims) {
    const std::int64_t d = dim + lane;
    for (int t = warp; t < kAssignKeys; t += kAssignWarps) {
      const std::int64_t slot = first_slot + t;
      const bool in_range = slot < call.slots && d < call.head_dim;
      keys[t * kAssignStride + lane] =
          in_range
              ? element_to_float(
                    call.keys[head * call.head_stride + slot * call.slot_stride + d])
              : 0.0f;
    }
    for (int p = warp; p < kAssignPrototypes; p += kAssignWarps) {
      const bool in_range = first + p < call.prototypes && d < call.head_dim;
      const std::int64_t row = head * call.prototypes + first + p;
      rows[p * kAssignStride + lane] =
          in_range ? call.rows[row * call.head_dim + d] : 0.0f;
    }
    __syncthreads();
    for (int i = 0; i < kAssignDims; ++i) {
      const float low = rows[lane * kAssignStride + i];
      const float high = rows[(lane + 32) * kAssignStride + i];
      exists[0] |= low != 0.0f;
      exists[1] |= high != 0.0f;
      for (int t = 0; t < kKeysPerWarp; ++t) {
        const float key = keys[(warp * kKeysPerWarp + t) * kAssignStride + i];
        sums[t][0] += key * low;
        sums[t][1] += key * high;
      }
    }
    __syncthreads();
  }
}

// Writes the cluster of a slot and adds its value to the cluster. Slots without a token
// get the number after the last cluster.
template <typename Element>
__device__ inline void join_cluster(const AssignCall<Element>& call, std::int64_t head,
                                    std::int64_t slot, int nearest, int exponent,
                                    Word* sums, Word* sizes) {
  const std::int64_t at = head * call.slots + slot;
  const bool token = call.valid == nullptr || call.valid[at];
  call.clusters[at] = token ? nearest : call.prototypes;
  if (!token) return;
  // Exact, because the unit is a power of two; rounding ties go to even.
  const double whole = ldexp(static_cast<double>(call.values[at]), -exponent);
  const std::int64_t entry = head * call.table() + nearest;
  atomicAdd(sums + entry, static_cast<Word>(llrint(whole)));
  atomicAdd(sizes + entry, Word{1});
}

template <typename Element>
__global__ void assign_keys(AssignCall<Element> call, const Word* peaks, Word* sums,
                            Word* sizes) {
  const std::int64_t tiles = (call.slots + kAssignKeys - 1) / kAssignKeys;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (std::int64_t work = blockIdx.x; work < call.heads * tiles; work += gridDim.x) {
    const std::int64_t head = work / tiles;
    const std::int64_t first_slot = work % tiles * kAssignKeys;
    Nearest nearest[kKeysPerWarp];
    for (Nearest& of : nearest) of = {-INFINITY, 0};
    for (std::int64_t first = 0; first < call.prototypes; first += kAssignPrototypes) {
      float products[kKeysPerWarp][2] = {};
      bool exists[2] = {false, false};
      multiply_tile(call, head, first_slot, first, products, exists);
      for (int p = 0; p < 2; ++p) {
        const int number = static_cast<int>(first) + lane + 32 * p;
        for (int t = 0; exists[p] && t < kKeysPerWarp; ++t) {
          nearest[t].take(products[t][p], number);
        }
      }
    }
    const int exponent = unit_exponent(peaks[head], call.slots);
    for (int t = 0; t < kKeysPerWarp; ++t) {
      for (int step = 16; step > 0; step /= 2) {
        const float cosine = __shfl_xor_sync(0xffffffffu, nearest[t].cosine, step);
        const int number = __shfl_xor_sync(0xffffffffu, nearest[t].number, step);
        nearest[t].take(cosine, number);
      }
      const std::int64_t slot = first_slot + warp * kKeysPerWarp + t;
      if (lane == 0 && slot < call.slots) {
        join_cluster(call, head, slot, nearest[t].number, exponent, sums, sizes);
      }
    }
  }
}

template <typename Element>
__global__ void look_up(AssignCall<Element> call, const Word* peaks, const Word* sums,
                        const Word* sizes) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = call.heads * call.slots;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total;
       i += step) {
    const std::int64_t head = i / call.slots;
    const std::int64_t entry = head * call.table() + call.clusters[i];
    const double unit = ldexp(1.0, unit_exponent(peaks[head], call.slots));
    const auto sum = static_cast<double>(static_cast<std::int64_t>(sums[entry]));
    const auto size = static_cast<double>(sizes[entry]);
    call.means[i] = size > 0.0 ? static_cast<float>(sum / size * unit) : 0.0f;
  }
}

// Writes clusters and means. `scratch` has room for assign_scratch(call) words.
template <typename Element>
void assign_and_average(const AssignCall<Element>& call, Word* scratch,
                        cudaStream_t stream) {
  const std::int64_t total = call.heads * call.slots;
  if (total == 0) return;
  Word* sums = scratch + call.heads;
  Word* sizes = sums + call.heads * call.table();
  const auto words = static_cast<std::size_t>(assign_scratch(call));
  (void)cudaMemsetAsync(scratch, 0, words * sizeof(Word), stream);
  launch(find_peaks<Element>, blocks_for(total), kThreads, stream, call, scratch);
  const std::int64_t tiles = (call.slots + kAssignKeys - 1) / kAssignKeys;
  launch(assign_keys<Element>, at_most_blocks(call.heads * tiles), kThreads, stream,
         call, scratch, sums, sizes);
  launch(look_up<Element>, blocks_for(total), kThreads, stream, call, scratch, sums,
         sizes);
}

}  // namespace kvp::cuda
