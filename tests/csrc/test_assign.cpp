// Tests of kvp/assign.hpp against loops written from its definition.
// No framework: CHECK counts, main returns non-zero if anything failed.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "kvp/assign.hpp"

namespace {

using Index = std::int64_t;

constexpr unsigned kSeed = 20261121;
int failures = 0;
const char* current_case = "";

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) {                                               \
      std::printf("%s:%d: %s (case %s, seed %u)\n", __FILE__, __LINE__, \
                  #condition, current_case, kSeed);                   \
      ++failures;                                                     \
    }                                                                 \
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
    // Every third does not exist, but for a single one.
    const bool absent = count > 1 && p % 3 == 0;
    for (Index d = 0; d < dims; ++d) {
      row[d] = absent ? 0.0f : float(row[d] / std::sqrt(norm));
    }
  }
  return made;
}

template <typename Element>
std::vector<Index> assign(const Problem& problem, const Element* keys) {
  auto exists = std::make_unique<bool[]>(static_cast<std::size_t>(problem.count));
  kvp::find_prototypes(problem.prototypes.data(), problem.count, problem.dims,
                       exists.get());
  std::vector<Index> clusters(static_cast<std::size_t>(problem.slots), -1);
  kvp::assign_to_prototypes(keys, problem.slots, problem.stride,
                            problem.prototypes.data(), exists.get(),
                            problem.count, problem.dims, clusters.data());
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
      // Of equal rows the lower must be taken; here none are equal.
      CHECK(better < -1e-4 || p == chosen || std::fabs(better) < 1e-4);
    }
  }
}

void test_nearest(std::mt19937& random) {
  for (Index slots : {0, 1, 7, 8, 9, 97}) {
    for (Index dims : {1, 7, 8, 54, 64, 128}) {
      for (Index count : {1, 2, 17}) {
        current_case = "nearest";
        const Problem problem = make_problem(slots, dims, count, 3, random);
        check_nearest(problem, problem.keys, assign(problem, problem.keys.data()));
      }
    }
  }
}

void test_bfloat16(std::mt19937& random) {
  current_case = "bfloat16";
  const Problem problem = make_problem(33, 64, 9, 0, random);
  std::vector<kvp::BFloat16> narrow;
  std::vector<float> rounded;
  for (float x : problem.keys) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    narrow.push_back({static_cast<std::uint16_t>(bits >> 16)});
    rounded.push_back(kvp::to_float(narrow.back()));
    CHECK(std::fabs(rounded.back() - x) <= std::fabs(x) / 128);
  }
  check_nearest(problem, rounded, assign(problem, narrow.data()));
}

void test_ties_and_nothing() {
  current_case = "ties";
  Problem problem{3, 2, 2, 4, {1, 0, 0, 0, -1, 0}, {0, 0, 1, 0, 1, 0, 0, 1}};
  // Key 0 ties rows 1 and 2; key 1 is zero and ties all; key 2 is far from 1, 2.
  CHECK((assign(problem, problem.keys.data()) == std::vector<Index>{1, 1, 3}));
  current_case = "no prototype";
  problem.prototypes.assign(8, 0.0f);
  CHECK((assign(problem, problem.keys.data()) == std::vector<Index>{0, 0, 0}));
}

std::vector<float> mean(const std::vector<float>& values,
                        const std::vector<Index>& clusters, Index count) {
  std::vector<Index> sums(static_cast<std::size_t>(count)), sizes(sums);
  std::vector<float> means(values.size());
  kvp::cluster_mean(values.data(), clusters.data(),
                    static_cast<Index>(values.size()), count, sums.data(),
                    sizes.data(), means.data());
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
  test_nearest(random);
  test_bfloat16(random);
  test_ties_and_nothing();
  test_means(random);
  std::printf(failures ? "%d checks failed\n" : "ok\n", failures);
  return failures != 0;
}
