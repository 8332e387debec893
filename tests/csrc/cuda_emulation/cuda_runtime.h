// The parts of CUDA that our kernels use, for g++ without CUDA: kernels are functions of
// the host, and a launch runs them block by block before it returns (fibers.hpp).
//
// Replaces the header of the same name for tests that have this folder first in their
// include path. The extension never includes it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "fibers.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// See launch.cuh.
#define KVP_MAX_BLOCKS 5

// Instead of `__shared__ TYPE NAME[COUNT]`, see launch.cuh.
#define KVP_SHARED(TYPE, NAME, COUNT)                                             \
  static const char NAME##_site = 0;                                              \
  TYPE* const NAME = static_cast<TYPE*>(kvp::emulation::Block::instance().shared( \
      &NAME##_site, static_cast<std::size_t>(COUNT) * sizeof(TYPE)))

using dim3_base = kvp::emulation::Dim;
struct dim3 : dim3_base {
  dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : dim3_base{nx, ny, nz} {}
};

namespace kvp::emulation {

// threadIdx and similar: read from the running thread. Not macros, because members
// elsewhere have the same names.
template <Dim (Block::*kGet)() const, unsigned Dim::* kPart>
struct Part {
  operator unsigned() const { return (Block::instance().*kGet)().*kPart; }
};

template <Dim (Block::*kGet)() const>
struct Index {
  Part<kGet, &Dim::x> x;
  Part<kGet, &Dim::y> y;
  Part<kGet, &Dim::z> z;
};

}  // namespace kvp::emulation

inline constexpr kvp::emulation::Index<&kvp::emulation::Block::thread_index>
    threadIdx{};
inline constexpr kvp::emulation::Index<&kvp::emulation::Block::block_index> blockIdx{};
inline constexpr kvp::emulation::Index<&kvp::emulation::Block::block_dim> blockDim{};
inline constexpr kvp::emulation::Index<&kvp::emulation::Block::grid_dim> gridDim{};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream = nullptr;
};

inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes,
                                   cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(Params...), Args&&... args) {
  struct Call {
    void (*kernel)(Params...);
    std::tuple<std::decay_t<Params>...> arguments;
  };
  const Call call{kernel, {static_cast<Args&&>(args)...}};
  kvp::emulation::Block::instance().run_grid(
      config->gridDim, config->blockDim,
      [](const void* data) {
        const auto& of = *static_cast<const Call*>(data);
        std::apply(of.kernel, of.arguments);
      },
      &call);
  return cudaSuccess;
}

[[noreturn]] inline void __trap() { throw kvp::emulation::Trap(); }

inline void __syncthreads() { kvp::emulation::Block::instance().wait_for_block(); }

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  kvp::emulation::Block::instance().wait_for_warp(mask, 0, true);
}

namespace kvp::emulation {

// The `value` of a lane of the warp.
template <typename T>
T shuffle(unsigned mask, T value, unsigned lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "as shuffles are");
  Block& block = Block::instance();
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  block.wait_for_warp(mask, bits, false);
  bits = block.shown_by(lane);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace kvp::emulation

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return kvp::emulation::shuffle(mask, value, static_cast<unsigned>(lane) % 32);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  const unsigned own = kvp::emulation::Block::instance().lane();
  return kvp::emulation::shuffle(mask, value,
                                 (own ^ static_cast<unsigned>(lanes)) % 32);
}

// Relaxed, as on the device: they order only accesses to their own address.
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
inline int atomicAdd(int* at, int value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}

template <typename Number>
Number atomicMax(Number* at, Number value) {
  Number before = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (before < value &&
         !__atomic_compare_exchange_n(at, &before, value, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return before;
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
