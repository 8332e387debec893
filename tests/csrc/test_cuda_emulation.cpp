// Tests of the CUDA emulator itself: it computes the results of a GPU, and detects wrong
// kernels.
//
// With an argument it runs a kernel that races in a block's shared memory ("shared") or
// between blocks ("blocks"), for ThreadSanitizer to find (scripts/check_sanitizers.sh).
#include <cstring>
#include <numeric>
#include <vector>

#include "cuda_fixtures.hpp"
#include "kvp/launch.cuh"

namespace {

using namespace cuda_test;
using kvp::cuda::launch;
using Ints = std::vector<int>;

// out[b] = sum of a block's values, by halves; one barrier too few if !kWaits.
template <bool kWaits>
__global__ void sum_block(const int* values, int* out) {
  KVP_SHARED(int, sums, 64);
  sums[threadIdx.x] = values[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    if (kWaits) __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
}

template <bool kWaits>
Ints sums_of(const Ints& values, int blocks) {
  Ints out(static_cast<std::size_t>(blocks));
  launch(sum_block<kWaits>, blocks, 64, nullptr, values.data(), out.data());
  return out;
}

void test_barriers() {
  current_case = "barriers";
  Ints values(192);
  std::iota(values.begin(), values.end(), 1);
  check_all_turns(Ints{2080, 6176, 10272}, [&] { return sums_of<true>(values, 3); });
  if (!kFewThreads) CHECK((sums_of<false>(values, 3) != Ints{2080, 6176, 10272}));
}

// Halves of a warp on different branches, then a value from the previous lane.
__global__ void shuffle(const int* values, int* sums, int* before) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int sum = values[threadIdx.x];
  for (int step = 8; step > 0; step /= 2) {
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    sum += __shfl_xor_sync(half, sum, step);
  }
  sums[threadIdx.x] = sum;
  before[threadIdx.x] = __shfl_sync(0xffffffffu, values[threadIdx.x], lane + 31);
}

void test_shuffles() {
  current_case = "shuffles";
  Ints values(64), expected(128);
  std::iota(values.begin(), values.end(), 0);
  for (int i = 0; i < 64; ++i) {
    expected[i] = 16 * (i / 16 * 16) + 120;
    expected[64 + i] = i % 32 == 0 ? i + 31 : i - 1;
  }
  check_all_turns(expected, [&] {
    Ints out(128);
    launch(shuffle, 1, 64, nullptr, values.data(), out.data(), out.data() + 64);
    return out;
  });
}

__global__ void count(unsigned long long* sum, unsigned* most, int* lowest) {
  atomicAdd(sum, 1ull);
  atomicMax(most, blockIdx.x * 100 + threadIdx.x);
  if (gridDim.x == 7) atomicAdd(lowest, -static_cast<int>(blockDim.x));
}

void test_atomics() {
  current_case = "atomics";
  unsigned long long sum = 0;
  unsigned most = 0;
  int lowest = 0;
  launch(count, 7, 33, nullptr, &sum, &most, &lowest);
  CHECK(sum == 7 * 33 && most == 632 && lowest == -7 * 33 * 33);
}

// Threads of a block that wait in different places.
__global__ void wait_apart(int how) {
  if (how == 0 && threadIdx.x == 0) return;  // ended threads are not waited for
  if (how == 1 && threadIdx.x == 5) __syncwarp();
  if (how == 2 && threadIdx.x >= 3) __trap();
  __syncthreads();
}

void test_errors() {
  current_case = "errors";
  launch(wait_apart, 2, 40, nullptr, 0);
  bool stuck = false;
  try {
    launch(wait_apart, 2, 40, nullptr, 1);
  } catch (const kvp::emulation::Deadlock&) {
    stuck = true;
  }
  CHECK(stuck);
  CHECK(traps([] { launch(wait_apart, 2, 40, nullptr, 2); }));
  CHECK(!traps([] { launch(wait_apart, 2, 40, nullptr, 3); }));
}

__global__ void write_all(int* out) {
  if (threadIdx.x == 0) *out = static_cast<int>(blockIdx.x);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    int out = 0;
    const bool shared = std::strcmp(argv[1], "shared") == 0;
    if (shared) out = sums_of<false>(Ints(64, 1), 1)[0];
    if (!shared) launch(write_all, 2, 64, nullptr, &out);
    std::printf("raced to %d\n", out);
    return 0;
  }
  test_barriers();
  test_shuffles();
  test_atomics();
  test_errors();
  return report();
}
