// Fixtures of the tests of svd.hpp and low_rank.hpp: matrices, and their parts as double.
// No framework: CHECK counts, main returns non-zero if anything failed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kvp/svd.hpp"

namespace {

using kvp::BFloat16;
using kvp::svd::Fault;
using kvp::svd::Index;
using kvp::svd::Kernels;
using kvp::svd::Matrix;
using kvp::svd::Options;
using kvp::svd::Record;
using kvp::svd::Workspace;

constexpr unsigned kSeed = 20261122;
int failures = 0;
const char* current_case = "";
Index tokens_now = 0, head_dim_now = 0, rank_now = 0;

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      std::printf("%s:%d: %s (case %s [%d, %d] rank %d, seed %u)\n", __FILE__, \
                  __LINE__, #condition, current_case, int(tokens_now),         \
                  int(head_dim_now), int(rank_now), kSeed);                    \
      ++failures;                                                              \
    }                                                                          \
  } while (0)

std::size_t u(Index i) { return static_cast<std::size_t>(i); }

// The vectors that tests run with; main tries all that this CPU has.
const Kernels* kernels = nullptr;

enum class Spectrum { kFlat, kDecaying, kLowRank, kConstant, kDuplicate };

// Rows with gaps of `gap` elements; gaps hold NaN and must not be read.
template <typename Element>
struct Problem {
  Index tokens, head_dim, stride;
  std::vector<Element> elements;

  Matrix<Element> matrix() const { return {elements.data(), tokens, head_dim, stride}; }
  double at(Index t, Index d) const {
    return double(kvp::to_float(elements[u(t * stride + d)]));
  }
};

template <typename Element>
Problem<Element> make_problem(Index tokens, Index head_dim, Spectrum kind,
                              std::mt19937& random) {
  std::normal_distribution<float> normal;
  const Index gap = 3, stride = head_dim + gap;
  Element* tag = nullptr;
  Problem<Element> made{tokens, head_dim, stride, {}};
  // Without the last gap, so that a sanitizer sees a read after the last row.
  made.elements.assign(u(tokens > 0 ? tokens * stride - gap : 0),
                       kvp::svd::narrow(NAN, tag));
  std::vector<float> left(u(tokens * 3)), right(u(head_dim * 3));
  for (float& x : left) x = normal(random);
  for (float& x : right) x = normal(random);
  for (Index t = 0; t < tokens; ++t) {
    for (Index d = 0; d < head_dim; ++d) {
      float value = normal(random);
      if (kind == Spectrum::kDecaying) value *= std::exp(-0.2f * float(d));
      if (kind == Spectrum::kConstant) value = 0.25f * float(d + 1);
      if (kind == Spectrum::kLowRank) {
        value = 0.0f;
        for (Index k = 0; k < 3; ++k) value += left[u(t * 3 + k)] * right[u(d * 3 + k)];
      }
      made.elements[u(t * stride + d)] = kind == Spectrum::kDuplicate && t % 2 == 1
                                             ? made.elements[u((t - 1) * stride + d)]
                                             : kvp::svd::narrow(value, tag);
    }
  }
  return made;
}

template <typename Factor>
struct Decomposed {
  Record<Factor> shape;
  std::vector<Factor> record;
  Fault fault;

  double sigma(Index k) const {
    float value;
    std::memcpy(&value, reinterpret_cast<const char*>(record.data()) + 4 * k, 4);
    return double(value);
  }
  double left(Index t, Index k) const {
    return double(kvp::to_float(record[u(shape.left() + t * shape.rank + k)]));
  }
  double right(Index k, Index d) const {
    return double(kvp::to_float(record[u(shape.right() + k * shape.head_dim + d)]));
  }
  double row(Index t, Index d) const {
    double sum = 0;
    for (Index k = 0; k < shape.rank; ++k) sum += left(t, k) * sigma(k) * right(k, d);
    return sum;
  }
};

template <typename Factor, typename Element>
Decomposed<Factor> decompose(const Problem<Element>& problem, Index max_rank,
                             double energy = 1.0) {
  static Workspace work;  // reused: holds the previous problem
  const Index most = std::min({problem.tokens, problem.head_dim, max_rank});
  Decomposed<Factor> made{{problem.tokens, problem.head_dim, most}, {}, Fault::kNone};
  made.record.resize(u(made.shape.elements()));
  made.shape.rank =
      kvp::svd::decompose(*kernels, problem.matrix(), Options{max_rank, energy},
                          made.record.data(), work, made.fault);
  tokens_now = problem.tokens;
  head_dim_now = problem.head_dim;
  rank_now = made.shape.rank;
  CHECK(made.shape.rank >= 0 && made.shape.rank <= most);
  made.record.resize(u(made.shape.elements()));
  return made;
}

// Runs body with every set of vectors that this CPU has.
template <typename Body>
void with_all_kernels(const Body& body) {
  for (const Kernels* each : kvp::runnable_kernels<Kernels>()) {
    kernels = each;
    std::printf("%s\n", kvp::name_of(each->simd));
    body();
  }
}

}  // namespace
