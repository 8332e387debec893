// What one core reaches in multiply-adds of float32 that wait for nothing: the yardstick
// beside torch's product in docs/measurements-sekv.md, which may not use all of a CPU.
//
//     g++ -O3 -march=native benchmarks/fma_peak.cpp -o fma_peak && ./fma_peak
#include <cstdio>
#include <ctime>

#ifdef __AVX512F__
constexpr int kBytes = 64;
#else
constexpr int kBytes = 32;
#endif
typedef float Vector __attribute__((vector_size(kBytes)));

int main() {
  constexpr int kSums = 16;  // more than the latency of two units asks for
  constexpr long kTurns = 20'000'000;
  for (int round = 0; round < 5; ++round) {
    Vector sums[kSums];
    for (int i = 0; i < kSums; ++i) sums[i] = Vector{} + static_cast<float>(i);
    const Vector factor = Vector{} + 0.999f, term = Vector{} + 0.001f;
    const std::clock_t before = std::clock();
    for (long turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 16
      for (int i = 0; i < kSums; ++i) sums[i] = sums[i] * factor + term;
    }
    const double seconds = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
    Vector all = sums[0];
    for (int i = 1; i < kSums; ++i) all += sums[i];
    const double lanes = kBytes / sizeof(float);
    std::printf("%.0f GFLOP/s of processor time (%g)\n",
                2.0 * kTurns * kSums * lanes / seconds / 1e9,
                static_cast<double>(all[0]));
  }
}
