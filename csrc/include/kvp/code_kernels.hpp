// Scores of key codes: integer dot products of a few bits, for many keys and all queries
// of a KV head at a time.
//
// Codes are stored in blocks of sixteen keys, four dimensions (a quad) at a time, so that
// one cache line holds a quad of all sixteen keys. The last line holds their scales, and
// labels that say which keys they are:
//
//     quad q, key j, dimension 4 q + d   at   (q * 16 + j) * 4 + d
//     scale of key j, bfloat16           at   quads * 64 + 2 * j
//     label of key j, 16 bits            at   quads * 64 + 32 + 2 * j
//
// A code is an unsigned byte of at most 127, and a query code a signed byte of at most 127
// in magnitude. The sum of two products then fits into 16 bits, which AVX2 and AVX-512
// without VNNI need. All versions return the same scores, bit for bit.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "kvp/simd.hpp"

#if defined(KVP_X86)
#include <immintrin.h>
#define KVP_TARGET_AVX512_VNNI \
  __attribute__((              \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,avx512bf16,avx512vnni")))
#endif

namespace kvp::index {

constexpr std::int64_t kCodeBlock = 16;  // keys
constexpr std::int64_t kQuad = 4;  // dimensions
constexpr std::int64_t kQuadBytes = kCodeBlock * kQuad;
constexpr int kQueriesAtOnce = 4;
constexpr std::int64_t kNearBlocks = 2, kFarBlocks = 6;  // to prefetch

constexpr std::int64_t block_bytes(std::int64_t quads) {
  return (quads + 1) * kQuadBytes;
}

// Arguments of CodeKernels::score.
struct CodeRun {
  const std::uint8_t* const* blocks;  // [count]
  std::int64_t count, quads;
  const std::int8_t* queries;  // [group][quads * 4]
  const std::int32_t* biases;  // [group], added to each sum
  std::int64_t group;
  float* scores;  // [group][stride], of which the first count * 16 are written
  std::int64_t stride;

  KVP_INLINE const std::uint16_t* scales(const std::uint8_t* block) const {
    return reinterpret_cast<const std::uint16_t*>(block + quads * kQuadBytes);
  }

  // Asks for the blocks after block b. The first line comes earlier than the others,
  // because finding its page of memory takes longest.
  KVP_INLINE void prefetch(std::int64_t b) const {
    if (b + kFarBlocks < count) __builtin_prefetch(blocks[b + kFarBlocks]);
    if (b + kNearBlocks >= count) return;
    const std::uint8_t* ahead = blocks[b + kNearBlocks];
    for (std::int64_t line = 0; line <= quads; ++line) {
      __builtin_prefetch(ahead + line * kQuadBytes);
    }
  }

  std::int32_t query_quad(int g, std::int64_t quad) const {
    std::int32_t word;
    std::memcpy(&word, queries + (g * quads + quad) * kQuad, sizeof word);
    return word;
  }

  // The same keys with `count` queries from g on.
  CodeRun of(std::int64_t g, std::int64_t count) const {
    CodeRun part = *this;
    part.queries += g * quads * kQuad;
    part.biases += g;
    part.group = count;
    part.scores += g * stride;
    return part;
  }
};

// scores[g][i] = scales[i] * (biases[g] + sum of code * query code).
template <int G>
inline void score_codes_baseline(const CodeRun& run) {
  for (std::int64_t b = 0; b < run.count; ++b) {
    const std::uint8_t* block = run.blocks[b];
    std::int32_t sums[G][kCodeBlock];
    for (int g = 0; g < G; ++g) {
      for (int j = 0; j < kCodeBlock; ++j) sums[g][j] = run.biases[g];
    }
    for (std::int64_t quad = 0; quad < run.quads; ++quad) {
      const std::uint8_t* line = block + quad * kQuadBytes;
      for (int g = 0; g < G; ++g) {
        const std::int8_t* query = run.queries + (g * run.quads + quad) * kQuad;
        for (int j = 0; j < kCodeBlock; ++j) {
          std::int32_t sum = 0;
          for (int d = 0; d < kQuad; ++d) sum += line[j * kQuad + d] * query[d];
          sums[g][j] += sum;
        }
      }
    }
    const std::uint16_t* scales = run.scales(block);
    for (int g = 0; g < G; ++g) {
      float* out = run.scores + g * run.stride + b * kCodeBlock;
      for (int j = 0; j < kCodeBlock; ++j) {
        out[j] = widen(scales[j]) * static_cast<float>(sums[g][j]);
      }
    }
  }
}

#if defined(KVP_X86)

// Eight bfloat16 numbers as float32.
KVP_TARGET_AVX2 inline __m256 widen_eight(const std::uint16_t* bits) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bits));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

template <int G>
KVP_TARGET_AVX2 inline void score_codes_avx2(const CodeRun& run) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (std::int64_t b = 0; b < run.count; ++b) {
    const std::uint8_t* block = run.blocks[b];
    run.prefetch(b);
    __m256i low[G], high[G];
    for (int g = 0; g < G; ++g) low[g] = high[g] = _mm256_set1_epi32(run.biases[g]);
    for (std::int64_t quad = 0; quad < run.quads; ++quad) {
      const auto* line = reinterpret_cast<const __m256i*>(block + quad * kQuadBytes);
      const __m256i a = _mm256_loadu_si256(line), c = _mm256_loadu_si256(line + 1);
      for (int g = 0; g < G; ++g) {
        const __m256i query = _mm256_set1_epi32(run.query_quad(g, quad));
        low[g] = _mm256_add_epi32(
            low[g], _mm256_madd_epi16(_mm256_maddubs_epi16(a, query), ones));
        high[g] = _mm256_add_epi32(
            high[g], _mm256_madd_epi16(_mm256_maddubs_epi16(c, query), ones));
      }
    }
    const __m256 first = widen_eight(run.scales(block)),
                 second = widen_eight(run.scales(block) + 8);
    for (int g = 0; g < G; ++g) {
      float* out = run.scores + g * run.stride + b * kCodeBlock;
      _mm256_storeu_ps(out, _mm256_mul_ps(first, _mm256_cvtepi32_ps(low[g])));
      _mm256_storeu_ps(out + 8, _mm256_mul_ps(second, _mm256_cvtepi32_ps(high[g])));
    }
  }
}

// Instead of _mm512_cvtepi32_ps, for which g++ 12 warns of an uninitialized value.
KVP_TARGET_AVX512 inline __m512 to_float(const __m512i& sums) {
  typedef std::int32_t Words __attribute__((vector_size(64)));
  return __builtin_convertvector(reinterpret_cast<const Words&>(sums), __m512);
}

KVP_TARGET_AVX512 inline __m512 widen_sixteen(const std::uint16_t* bits) {
  Vec<16>::F wide;
  load<16>(bits, wide);
  return wide;
}

template <int G>
KVP_TARGET_AVX512 inline void score_codes_avx512(const CodeRun& run) {
  const __m512i ones = _mm512_set1_epi16(1);
  for (std::int64_t b = 0; b < run.count; ++b) {
    const std::uint8_t* block = run.blocks[b];
    run.prefetch(b);
    __m512i sums[G];
    for (int g = 0; g < G; ++g) sums[g] = _mm512_set1_epi32(run.biases[g]);
    for (std::int64_t quad = 0; quad < run.quads; ++quad) {
      const __m512i line = _mm512_loadu_si512(block + quad * kQuadBytes);
      for (int g = 0; g < G; ++g) {
        const __m512i query = _mm512_set1_epi32(run.query_quad(g, quad));
        sums[g] = _mm512_add_epi32(
            sums[g], _mm512_madd_epi16(_mm512_maddubs_epi16(line, query), ones));
      }
    }
    const __m512 scales = widen_sixteen(run.scales(block));
    for (int g = 0; g < G; ++g) {
      _mm512_storeu_ps(run.scores + g * run.stride + b * kCodeBlock,
                       scales * to_float(sums[g]));
    }
  }
}

template <int G>
KVP_TARGET_AVX512_VNNI inline void score_codes_vnni(const CodeRun& run) {
  for (std::int64_t b = 0; b < run.count; ++b) {
    const std::uint8_t* block = run.blocks[b];
    run.prefetch(b);
    __m512i sums[G];
    for (int g = 0; g < G; ++g) sums[g] = _mm512_set1_epi32(run.biases[g]);
    for (std::int64_t quad = 0; quad < run.quads; ++quad) {
      const __m512i line = _mm512_loadu_si512(block + quad * kQuadBytes);
      for (int g = 0; g < G; ++g) {
        const __m512i query = _mm512_set1_epi32(run.query_quad(g, quad));
        sums[g] = _mm512_dpbusd_epi32(sums[g], line, query);
      }
    }
    const __m512 scales = widen_sixteen(run.scales(block));
    for (int g = 0; g < G; ++g) {
      _mm512_storeu_ps(run.scores + g * run.stride + b * kCodeBlock,
                       scales * to_float(sums[g]));
    }
  }
}

#endif  // KVP_X86

// Calls the version for the number of queries, at most four at a time.
#define KVP_SCORE_CODES(NAME, BODY, TARGET)                                          \
  TARGET inline void NAME(const CodeRun& run) {                                      \
    for (std::int64_t g = 0; g < run.group; g += kQueriesAtOnce) {                   \
      const std::int64_t left = run.group - g;                                       \
      const CodeRun part = run.of(g, left < kQueriesAtOnce ? left : kQueriesAtOnce); \
      switch (part.group) {                                                          \
        case 1:                                                                      \
          BODY<1>(part);                                                             \
          break;                                                                     \
        case 2:                                                                      \
          BODY<2>(part);                                                             \
          break;                                                                     \
        case 3:                                                                      \
          BODY<3>(part);                                                             \
          break;                                                                     \
        default:                                                                     \
          BODY<4>(part);                                                             \
      }                                                                              \
    }                                                                                \
  }

struct CodeKernels {
  Simd simd;
  void (*score)(const CodeRun&);
  static constexpr auto tables();
};

namespace codes {

KVP_SCORE_CODES(score_baseline, score_codes_baseline, KVP_TARGET_BASELINE)
inline constexpr CodeKernels baseline{Simd::kBaseline, score_baseline};
#if defined(KVP_X86)
KVP_SCORE_CODES(score_avx2, score_codes_avx2, KVP_TARGET_AVX2)
KVP_SCORE_CODES(score_avx512, score_codes_avx512, KVP_TARGET_AVX512)
KVP_SCORE_CODES(score_vnni, score_codes_vnni, KVP_TARGET_AVX512_VNNI)
inline constexpr CodeKernels avx2{Simd::kAvx2, score_avx2};
inline constexpr CodeKernels avx512{Simd::kAvx512, score_avx512};
// Every CPU with AVX512-BF16 has VNNI, too.
inline constexpr CodeKernels vnni{Simd::kAvx512Bf16, score_vnni};
#endif

}  // namespace codes

#undef KVP_SCORE_CODES

inline constexpr auto CodeKernels::tables() {
#if defined(KVP_X86)
  return std::array{&codes::baseline, &codes::avx2, &codes::avx512, &codes::vnni};
#else
  return std::array{&codes::baseline};
#endif
}

}  // namespace kvp::index
