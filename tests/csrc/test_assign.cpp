// Tests of kvp/assign.hpp against loops written from its definition.
// No framework: CHECK counts, main returns non-zero if anything failed.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kvp/assign.hpp"

namespace {

using Index = std::int64_t;

constexpr unsigned kSeed = 20261121;
int failures = 0;
const char* current_case = "";

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::printf("%s:%d: %s (case %s, seed %u)\n", __FILE__, __LINE__, #condition, \
                  current_case, kSeed);                                             \
      ++failures;                                                                   \
    }                                                                               \
  } while (0)

struct Problem {
  Index slots, stride, dims, count;
  std::vector<float> keys, prototypes;
};

Problem make_problem(Index slots, Index dims, Index count, Index gap,
                     std::mt19937& random) {
  std::normal_distribution<float> normal;
  Problem made{slots, dims + gap, dims, count, {}, {}};
  made.keys.resize(static_cast<std::size_t>(slots * made.stride));
  made.prototypes.resize(static_cast<std::size_t>(count * dims));
  for (float& x : made.keys) x = normal(random);
  for (float& x : made.prototypes) x = normal(random);
  for (Index p = 0; p < count; ++p) {
    float* row = made.prototypes.data() + p * dims;
    double norm = 0.0;
    for (Index d = 0; d < dims; ++d) norm += double(row[d]) * row[d];
    // Every third prototype is zero, unless there is only one.
    const bool absent = count > 1 && p % 3 == 0;
    for (Index d = 0; d < dims; ++d) {
      row[d] = absent ? 0.0f : float(row[d] / std::sqrt(norm));
    }
  }
  return made;
}

// The vectors that tests run with; main tries all that this CPU has.
kvp::Simd simd = kvp::Simd::kBaseline;

template <typename Element>
std::vector<Index> assign(const Problem& problem, const Element* keys) {
  // Exactly the promised size, so that a sanitizer sees an access past it.
  std::vector<float> panels(
      static_cast<std::size_t>(kvp::packed_size(simd, problem.count, problem.dims)));
  std::vector<Index> order(static_cast<std::size_t>(problem.count));
  const Index packed =
      kvp::pack_prototypes(simd, problem.prototypes.data(), problem.count, problem.dims,
                           panels.data(), order.data());
  std::vector<Index> clusters(static_cast<std::size_t>(problem.slots), -1);
  const kvp::Assignment<Element> work{keys,         problem.slots, problem.stride,
                                      problem.dims, panels.data(), order.data(),
                                      packed};
#pragma omp parallel if (problem.slots > 1000)
  kvp::assign_to_prototypes(simd, work, clusters.data());
  return clusters;
}

double similarity(const Problem& problem, const float* key, Index p) {
  const float* row = problem.prototypes.data() + p * problem.dims;
  double sum = 0.0;
  for (Index d = 0; d < problem.dims; ++d) sum += double(key[d]) * row[d];
  return sum;
}

bool absent(const Problem& problem, Index p) {
  const float* row = problem.prototypes.data() + p * problem.dims;
  return std::all_of(row, row + problem.dims, [](float x) { return x == 0.0f; });
}

void check_nearest(const Problem& problem, const std::vector<float>& keys,
                   const std::vector<Index>& clusters) {
  for (Index t = 0; t < problem.slots; ++t) {
    const float* key = keys.data() + t * problem.stride;
    const Index chosen = clusters[static_cast<std::size_t>(t)];
    CHECK(chosen >= 0 && chosen < problem.count);
    CHECK(!absent(problem, chosen));
    for (Index p = 0; p < problem.count; ++p) {
      if (absent(problem, p)) continue;
      const double better =
          similarity(problem, key, p) - similarity(problem, key, chosen);
      CHECK(better < 1e-4);
      // Ties go to the lower row; these rows have none.
      CHECK(better < -1e-4 || p == chosen || std::fabs(better) < 1e-4);
    }
  }
}

void test_nearest(std::mt19937& random) {
  for (Index slots : {0, 1, 8, 12, 25, 97}) {
    for (Index dims : {1, 7, 54, 64, 512}) {
      for (Index count : {1, 2, 17, 50}) {
        current_case = "nearest";
        const Problem problem = make_problem(slots, dims, count, 3, random);
        check_nearest(problem, problem.keys, assign(problem, problem.keys.data()));
      }
    }
  }
}

std::vector<kvp::BFloat16> narrow(const std::vector<float>& values) {
  std::vector<kvp::BFloat16> made;
  for (float x : values) {
    made.push_back({static_cast<std::uint16_t>(kvp::round_to_bfloat16(x))});
    CHECK(std::fabs(kvp::to_float(made.back()) - x) <= std::fabs(x) / 256);
  }
  return made;
}

std::vector<float> wide(const std::vector<kvp::BFloat16>& values) {
  std::vector<float> made;
  for (kvp::BFloat16 x : values) made.push_back(kvp::to_float(x));
  return made;
}

void test_bfloat16(std::mt19937& random) {
  for (Index slots : {0, 1, 8, 12, 25, 97}) {
    for (Index dims : {1, 7, 54, 64, 512}) {
      for (Index count : {1, 2, 17, 50, 143}) {
        current_case = "bfloat16";
        Problem problem = make_problem(slots, dims, count, 3, random);
        const std::vector<kvp::BFloat16> keys = narrow(problem.keys);
        const std::vector<Index> clusters = assign(problem, keys.data());
        // The assignment is as good for rounded prototypes as for others.
        if (simd == kvp::Simd::kAvx512Bf16) {
          problem.prototypes = wide(narrow(problem.prototypes));
        }
        check_nearest(problem, wide(keys), clusters);
      }
    }
  }
}

// To the nearest, ties to even; NaN stays NaN.
void test_rounding() {
  current_case = "rounding";
  const auto rounded = [](float x) { return kvp::round_to_bfloat16(x); };
  CHECK(rounded(1.0f) == 0x3f80 && rounded(-2.0f) == 0xc000);
  CHECK(rounded(0x1.01p0f) == 0x3f80 && rounded(0x1.03p0f) == 0x3f82);
  CHECK(rounded(0x1.010002p0f) == 0x3f81 && rounded(0x1.00fffep0f) == 0x3f80);
  CHECK(rounded(INFINITY) == 0x7f80 && rounded(NAN) == 0x7fc0);
}

void test_float16() {
  current_case = "float16";
  const auto wide = [](std::uint16_t bits) {
    return kvp::to_float(kvp::Float16{bits});
  };
  CHECK(wide(0x3c00) == 1.0f && wide(0xc000) == -2.0f && wide(0x3555) == 0x1.554p-2f);
  CHECK(wide(0x7bff) == 65504.0f && wide(0x0001) == 0x1p-24f);
  CHECK(wide(0x8000) == 0.0f && std::signbit(wide(0x8000)));
  CHECK(std::isinf(wide(0x7c00)) && wide(0xfc00) < 0 && std::isnan(wide(0x7e01)));
}

// Enough work for a parallel region; the result must not depend on it.
void test_large(std::mt19937& random) {
  current_case = "large";
  Problem problem = make_problem(1500, 64, 90, 0, random);
  const std::vector<kvp::BFloat16> keys = narrow(problem.keys);
  problem.keys = wide(keys);
  problem.prototypes = wide(narrow(problem.prototypes));
  const std::vector<Index> clusters = assign(problem, keys.data());
  check_nearest(problem, problem.keys, clusters);
  CHECK(clusters == assign(problem, keys.data()));
}

// The second half repeats the first: of 24 rows 16 exist, so that equal rows are
// in the same lane of another panel.
void test_ties_between_panels(std::mt19937& random) {
  current_case = "ties between panels";
  Problem problem = make_problem(60, 24, 48, 0, random);
  std::vector<float>& rows = problem.prototypes;
  std::copy_n(rows.begin(), rows.size() / 2, rows.begin() + 24 * 24);
  for (Index chosen : assign(problem, narrow(problem.keys).data())) {
    CHECK(chosen < 24);
  }
}

void test_ties_and_nothing() {
  current_case = "ties";
  Problem problem{3, 2, 2, 4, {1, 0, 0, 0, -1, 0}, {0, 0, 1, 0, 1, 0, 0, 1}};
  // Key 0 ties rows 1 and 2; key 1 is zero and ties all; key 2 is far from 1, 2.
  CHECK((assign(problem, narrow(problem.keys).data()) == std::vector<Index>{1, 1, 3}));
  current_case = "no prototype";
  problem.prototypes.assign(8, 0.0f);
  CHECK((assign(problem, narrow(problem.keys).data()) == std::vector<Index>{0, 0, 0}));
}

std::vector<float> mean(const std::vector<float>& values,
                        const std::vector<Index>& clusters, Index count) {
  std::vector<Index> sums(static_cast<std::size_t>(count)), sizes(sums);
  std::vector<float> of_cluster(static_cast<std::size_t>(count));
  std::vector<float> means(values.size());
  kvp::cluster_mean(values.data(), clusters.data(), static_cast<Index>(values.size()),
                    count, sums.data(), sizes.data(), of_cluster.data(), means.data());
  return means;
}

void test_means(std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (float peak : {1.0f, 1e-38f, 3e38f, 0.0f}) {
    current_case = "means";
    const Index count = 13;
    std::vector<float> values(1000);
    std::vector<Index> clusters(1000);
    std::vector<double> sums(count), sizes(count);
    for (std::size_t t = 0; t < values.size(); ++t) {
      values[t] = uniform(random) * peak;
      clusters[t] = static_cast<Index>(random() % 12);  // the last stays empty
      sums[static_cast<std::size_t>(clusters[t])] += values[t];
      sizes[static_cast<std::size_t>(clusters[t])] += 1;
    }
    const std::vector<float> means = mean(values, clusters, count);
    for (std::size_t t = 0; t < values.size(); ++t) {
      const auto c = static_cast<std::size_t>(clusters[t]);
      const double expected = sums[c] / sizes[c];
      CHECK(std::fabs(means[t] - expected) <=
            1e-7 * std::fabs(expected) + 1e-13 * peak + 1e-45);
    }
    current_case = "order of additions";
    std::vector<float> backwards(values.rbegin(), values.rend());
    std::vector<Index> other(clusters.rbegin(), clusters.rend());
    std::vector<float> again = mean(backwards, other, count);
    std::reverse(again.begin(), again.end());
    CHECK(again == means);
  }
  current_case = "largest sum";
  const std::vector<float> full(1023, 0.9999f);
  CHECK(mean(full, std::vector<Index>(1023, 0), 1) == full);
  current_case = "empty";
  CHECK(mean({}, {}, 3).empty());
}

}  // namespace

int main() {
  std::mt19937 random(kSeed);
  for (kvp::Simd each : {kvp::Simd::kBaseline, kvp::Simd::kAvx2, kvp::Simd::kAvx512,
                         kvp::Simd::kAvx512Bf16}) {
    if (!kvp::supported(each)) continue;
    simd = each;
    std::printf("vectors of %d floats\n", int(kvp::lanes_of(simd)));
    if (simd != kvp::Simd::kAvx512Bf16) test_nearest(random);
    test_bfloat16(random);
    test_large(random);
    test_ties_between_panels(random);
    test_ties_and_nothing();
  }
  test_float16();
  test_rounding();
  test_means(random);
  std::printf("%d failure(s)\n", failures);
  return failures != 0;
}
