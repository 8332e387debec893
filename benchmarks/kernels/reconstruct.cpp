// What share of a core's peak reconstruction reaches (csrc/include/kvp/low_rank.hpp).
//
//     g++ -std=c++17 -O3 -fopenmp -Icsrc/include benchmarks/kernels/reconstruct.cpp -o reconstruct
//     OMP_NUM_THREADS=1 ./reconstruct 16 32 64 40,42,18,32
//
// Each argument is a list of lengths of spans, taken again and again until there are
// 6144 tokens (one layer of 2048 tokens and 3 KV heads), of 64 dimensions, at most rank
// 32 and bfloat16. They are written into pages that hold rows, as the entries of a zoom
// do, and into pages that hold columns, as vLLM's keys on a CPU.
//
// In turns with it, in processor time: multiply-adds that wait for nothing, and a copy.
// What the operations take at the peak, or the bytes at the rate of the copy, whichever
// is longer, is the least that a call may take; its share of what it took is printed.
// "cold": before each call 64 MiB of other memory are written, the copy's call, too.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

#include "kvp/low_rank.hpp"

namespace {

using kvp::BFloat16;
using kvp::svd::Index;

constexpr Index kTokens = 6144, kDim = 64, kMostRank = 32, kBlock = 32;
constexpr int kRounds = 41;
constexpr std::size_t kCopied = 1 << 20;

double now() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Operations per second; 16 sums are more than the latency of two units asks for.
template <int kBytes>
KVP_ALWAYS_INLINE double multiply_adds() {
  using Vector = typename kvp::svd::Lanes<float, kBytes>::Type;
  constexpr int kSums = 16;
  constexpr long kTurns = 100'000;
  Vector sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = Vector{} + static_cast<float>(i);
  const Vector factor = Vector{} + 0.999f, term = Vector{} + 0.001f;
  const double before = now();
  for (long turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = sums[i] * factor + term;
  }
  const double seconds = now() - before;
  for (const Vector& sum : sums) {
    if (sum[0] == 1234.5f) std::puts("");  // so that sums are made
  }
  return 2.0 * kTurns * kSums * (kBytes / 4.0) / seconds;
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) double peak_avx512() { return multiply_adds<64>(); }
__attribute__((target("avx2,fma"))) double peak_avx2() { return multiply_adds<32>(); }
#endif
double peak() {
#if defined(__x86_64__)
  if (kvp::supported(kvp::Simd::kAvx512)) return peak_avx512();
  if (kvp::supported(kvp::Simd::kAvx2)) return peak_avx2();
#endif
  return multiply_adds<16>();
}

struct Spans {
  std::vector<kvp::svd::Record<BFloat16>> shapes;
  std::vector<Index> at{0}, first{0};  // of each record, and its first token
  std::vector<BFloat16> factors;
  std::vector<Index> pages, slots;
  double operations = 0.0, bytes = 0.0;

  explicit Spans(const std::vector<Index>& lengths) {
    for (std::size_t i = 0; first.back() < kTokens; ++i) {
      const Index tokens = lengths[i % lengths.size()];
      const Index rank = std::min({tokens, kDim, kMostRank});
      shapes.push_back({tokens, kDim, rank});
      at.push_back(at.back() + shapes.back().elements());
      first.push_back(first.back() + tokens);
      operations += 2.0 * static_cast<double>(tokens * rank * kDim);
    }
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    factors.resize(static_cast<std::size_t>(at.back()));
    for (auto& number : factors) number = kvp::svd::narrow(normal(random), &number);
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      for (Index k = 0; k < shapes[i].rank; ++k) {
        const float sigma = 1.0f / static_cast<float>(1 + k);
        std::memcpy(&factors[static_cast<std::size_t>(at[i] + 2 * k)], &sigma, 4);
      }
    }
    for (Index token = 0; token < first.back(); ++token) {
      pages.push_back(token / kBlock);
      slots.push_back(token % kBlock);
    }
    bytes = 2.0 * static_cast<double>(at.back() + first.back() * kDim);
  }
};

struct Target {
  const char* name;
  kvp::Plane plane;
};

void reconstruct(const Spans& spans, const Target& target,
                 std::vector<BFloat16>& heap) {
  static kvp::svd::Workspace work;
  for (std::size_t i = 0; i < spans.shapes.size(); ++i) {
    const kvp::svd::PageTarget<BFloat16> to{heap.data(),
                                            2 * kBlock * kDim,
                                            target.plane,
                                            kBlock,
                                            &spans.pages[spans.first[i]],
                                            &spans.slots[spans.first[i]]};
    kvp::svd::reconstruct_pages(kvp::svd::select_kernels(), spans.shapes[i],
                                &spans.factors[spans.at[i]], to, work);
  }
}

template <typename Body>
double seconds_of(bool cold, const Body& body) {
  static std::vector<float> other(16 << 20);
  if (cold) {
    for (float& number : other) number += 1.0f;
  }
  const double before = now();
  body();
  return now() - before;
}

struct Figures {
  std::vector<double> all;
  double median() {
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
  }
};

void measure(const char* name, const Spans& spans, const Target& target, bool cold) {
  const auto pages = static_cast<std::size_t>(spans.pages.back() + 1);
  std::vector<BFloat16> heap(pages * 2 * kBlock * kDim);
  std::vector<char> from(kCopied), to(kCopied);
  Figures took, flops, rates;
  for (int round = 0; round <= kRounds; ++round) {
    const double peak_now = peak();
    const double copied = seconds_of(cold, [&] {
      for (std::size_t i = 0; i < kCopied; i += 64) std::memcpy(&to[i], &from[i], 64);
    });
    const double ours = seconds_of(cold, [&] { reconstruct(spans, target, heap); });
    if (round == 0) continue;
    flops.all.push_back(peak_now);
    rates.all.push_back(2.0 * kCopied / copied);
    took.all.push_back(ours);
  }
  const double computed = spans.operations / flops.median();
  const double moved = spans.bytes / rates.median();
  const double median = took.median();
  const double thousands = static_cast<double>(spans.first.back()) / 3.0 / 1000.0;
  std::printf(
      "%-12.12s %-7s %-4s %.3f ms (%.3f-%.3f) %4.0f GFLOP/s of %.0f: %.2f  "
      "%5.1f GB/s of %.1f: %.2f  %s binds\n",
      name, target.name, cold ? "cold" : "hot", 1e3 * median / thousands,
      1e3 * took.all[kRounds / 10] / thousands,
      1e3 * took.all[kRounds - 1 - kRounds / 10] / thousands,
      spans.operations / median / 1e9, flops.median() / 1e9, computed / median,
      spans.bytes / median / 1e9, rates.median() / 1e9, moved / median,
      computed > moved ? "arithmetic" : "memory");
}

std::vector<Index> lengths_of(const char* argument) {
  std::vector<Index> lengths;
  for (const char* at = argument; at != nullptr && *at != '\0';) {
    lengths.push_back(std::atol(at));
    if (lengths.back() < 1 || lengths.back() > kTokens) {
      std::fprintf(stderr, "lengths must be 1 to %ld, got %s\n", kTokens, argument);
      std::exit(2);
    }
    at = std::strchr(at, ',');
    if (at != nullptr) ++at;
  }
  return lengths;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::fprintf(stderr, "give lengths of spans: 16 32 64 40,42,18,32\n");
    return 2;
  }
  std::printf("ms per 1000 tokens: keys or values of one layer's 3 KV heads\n");
  const Target targets[] = {
      {"rows", {nullptr, kvp::PlaneKind::kRows, kBlock * kDim, kDim}},
      {"columns", {nullptr, kvp::PlaneKind::kTransposed, 0, 0}}};
  for (int i = 1; i < count; ++i) {
    const Spans spans(lengths_of(arguments[i]));
    for (const Target& target : targets) {
      for (const bool cold : {false, true}) measure(arguments[i], spans, target, cold);
    }
  }
}
