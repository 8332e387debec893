// Launches of the kernels of these headers. Plain C++, so that the tests' emulator
// (tests/csrc/cuda_emulation) can run them without a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

// Shared memory of a block. A macro, because the emulator gives every block its own.
#ifndef KVP_SHARED
#define KVP_SHARED(TYPE, NAME, COUNT) __shared__ TYPE NAME[COUNT]
#endif

// The emulator uses fewer blocks, so that every test has blocks that loop.
#ifndef KVP_MAX_BLOCKS
#define KVP_MAX_BLOCKS 4096
#endif

namespace kvp::cuda {

constexpr int kThreads = 256;
// Enough blocks to fill the largest GPUs several times; grid-stride loops process the
// rest.
constexpr std::int64_t kMaxBlocks = KVP_MAX_BLOCKS;

// Bytes that one thread copies at a time; 16 where sizes and addresses allow.
using Chunk = uint4;

// One comparison covers negative values too.
__device__ inline void require_below(std::int64_t value, std::int64_t limit) {
  if (static_cast<std::uint64_t>(value) >= static_cast<std::uint64_t>(limit)) {
    __trap();
  }
}

// Number of blocks for this many independent pieces of work, one per block.
inline int at_most_blocks(std::int64_t pieces) {
  return static_cast<int>(pieces < kMaxBlocks ? pieces : kMaxBlocks);
}

// The same for one piece per thread.
inline int blocks_for(std::int64_t work) {
  return at_most_blocks((work + kThreads - 1) / kThreads);
}

// Queues kernel(args...). If the launch fails, CUDA's last error is set.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), int blocks, int threads, cudaStream_t stream,
            const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  (void)cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace kvp::cuda
