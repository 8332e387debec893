// Which vector instructions kernels use, and the vector types they are written in.
//
// Kernels are written once, in the compiler's vector extension, and compiled for
// several widths. Each family of kernels is a struct of function pointers whose
// first member is `Simd simd`, with one constant table per width:
//
//     struct Kernels {
//       Simd simd;
//       void (*work)(...);
//       static constexpr auto tables();  // array of pointers, narrowest first
//     };
//
// select_kernels<Kernels>() returns the widest table that this CPU can run. It is the
// only place that chooses. The environment variable KVP_SIMD (baseline, avx2, avx512
// or avx512_bf16) lowers the choice; it cannot raise it above what the CPU supports.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#define KVP_INLINE inline __attribute__((always_inline))

#define KVP_TARGET_BASELINE
#if defined(__x86_64__) && defined(__GNUC__)
#define KVP_X86 1
#define KVP_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define KVP_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define KVP_TARGET_AVX512_BF16 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,avx512bf16")))
#endif

namespace kvp {

// Ordered from narrow to wide. kAvx512Bf16 has the vectors of kAvx512 and
// instructions that convert and multiply bfloat16.
enum class Simd { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

inline constexpr Simd kAllSimd[] = {Simd::kBaseline, Simd::kAvx2, Simd::kAvx512,
                                    Simd::kAvx512Bf16};

// The names that KVP_SIMD takes.
constexpr const char* name_of(Simd simd) {
  switch (simd) {
    case Simd::kAvx2:
      return "avx2";
    case Simd::kAvx512:
      return "avx512";
    case Simd::kAvx512Bf16:
      return "avx512_bf16";
    default:
      return "baseline";
  }
}

// Floats per vector. Every 64-bit target has at least 4 (SSE2, NEON).
constexpr std::int64_t lanes_of(Simd simd) {
  return simd >= Simd::kAvx512 ? 16 : simd == Simd::kAvx2 ? 8 : 4;
}

// Whether this CPU and its operating system can run code for `simd`.
inline bool supported(Simd simd) {
#if defined(KVP_X86)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  switch (simd) {
    case Simd::kBaseline:
      return true;
    case Simd::kAvx2:
      return avx2;
    case Simd::kAvx512:
      return avx512;
    case Simd::kAvx512Bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16");
  }
#endif
  return simd == Simd::kBaseline;
}

// The widest level that the CPU supports and KVP_SIMD allows. An unknown value of
// KVP_SIMD is ignored here; ops/extension.py reports it when it loads the library.
// Read once per process.
inline Simd selected_simd() {
  static const Simd selected = [] {
    const char* limit = std::getenv("KVP_SIMD");
    Simd widest = Simd::kBaseline;
    for (const Simd simd : kAllSimd) {
      if (supported(simd)) widest = simd;
      if (limit != nullptr && std::strcmp(limit, name_of(simd)) == 0) break;
    }
    return widest;
  }();
  return selected;
}

// For kernels that have no version wider than `limit`.
inline Simd selected_simd(Simd limit) {
  return selected_simd() < limit ? selected_simd() : limit;
}

// The widest table of a family, see the head of this file.
template <typename Kernels>
const Kernels& select_kernels() {
  static const Kernels& selected = *[] {
    const Kernels* widest = nullptr;
    for (const Kernels* table : Kernels::tables()) {
      if (widest == nullptr || table->simd <= selected_simd()) widest = table;
    }
    return widest;
  }();
  return selected;
}

// All tables that this CPU can run, for tests.
template <typename Kernels>
std::vector<const Kernels*> runnable_kernels() {
  std::vector<const Kernels*> runnable;
  for (const Kernels* table : Kernels::tables()) {
    if (supported(table->simd)) runnable.push_back(table);
  }
  return runnable;
}

// Vectors of W floats, and of integers with as many lanes.
template <int W>
struct Vec {
  typedef float F __attribute__((vector_size(4 * W)));
  typedef std::int32_t I __attribute__((vector_size(4 * W)));
  typedef std::uint32_t U __attribute__((vector_size(4 * W)));
  typedef std::uint16_t H __attribute__((vector_size(2 * W)));
};

// Elements as float32; bfloat16 elements are passed as their bits, std::uint16_t.
KVP_INLINE float widen(float value) { return value; }

KVP_INLINE float widen(std::uint16_t bits) {
  const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

template <int W>
KVP_INLINE void load(const float* from, typename Vec<W>::F& to) {
  std::memcpy(&to, from, sizeof to);
}

template <int W>
KVP_INLINE void load(const std::uint16_t* from, typename Vec<W>::F& to) {
  typename Vec<W>::H half;
  std::memcpy(&half, from, sizeof half);
  const typename Vec<W>::U word = __builtin_convertvector(half, typename Vec<W>::U)
                                  << 16;
  std::memcpy(&to, &word, sizeof to);
}

// Adds the upper half of the lanes to the lower half until four are left.
KVP_INLINE Vec<4>::F fold(const Vec<4>::F& v) { return v; }

KVP_INLINE Vec<4>::F fold(const Vec<8>::F& v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) +
         __builtin_shufflevector(v, v, 4, 5, 6, 7);
}

KVP_INLINE Vec<4>::F fold(const Vec<16>::F& v) {
  const Vec<8>::F half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                         __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return fold(half);
}

// out[j] = sum of the lanes of rows[j], for four rows.
template <int W>
KVP_INLINE void sum_lanes(const typename Vec<W>::F* rows, float* out) {
  const Vec<4>::F a = fold(rows[0]), b = fold(rows[1]);
  const Vec<4>::F c = fold(rows[2]), d = fold(rows[3]);
  const Vec<4>::F ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) +
                       __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Vec<4>::F cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) +
                       __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const Vec<4>::F sums = __builtin_shufflevector(ab, cd, 0, 1, 4, 5) +
                         __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
  std::memcpy(out, &sums, sizeof sums);
}

}  // namespace kvp
