// Tests of the CUDA assignment to prototypes, under the emulator: clusters by their
// definition in double precision, means bit for bit against assign.hpp.
#include <cmath>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda_fixtures.hpp"
#include "kvp/assign.cuh"
#include "kvp/assign.hpp"

namespace {

using namespace cuda_test;
using Index = std::int64_t;
using kvp::BFloat16;
using kvp::Float16;

struct Shape {
  Index heads, slots, dims, prototypes;
  bool holes;
};

// Gaps between keys and between heads; slots without a token hold NaN. Prototypes: unit
// rows; every fourth is zero, the last equals the second.
template <typename Element>
struct Problem {
  Shape shape;
  Index slot_stride, head_stride;
  std::vector<Element> keys;
  std::vector<float> rows, values;
  std::vector<std::uint8_t> valid;

  Problem(const Shape& s, std::mt19937& random)
      : shape(s), slot_stride(s.dims + 3), head_stride(s.slots * (s.dims + 3) + 5) {
    std::normal_distribution<float> normal;
    keys.resize(static_cast<std::size_t>(s.heads * head_stride));
    for (Element& x : keys) x = narrow(normal(random));
    for (Index i = 0; i < s.heads * s.slots; ++i) {
      values.push_back(normal(random) * (i % 5 == 0 ? 1e-6f : 100.0f));
      valid.push_back(!s.holes || random() % 4 != 0);
      const Index at = i / s.slots * head_stride + i % s.slots * slot_stride;
      for (Index d = 0; d < s.dims && !valid.back(); ++d) {
        keys[at + d] = narrow(std::numeric_limits<float>::quiet_NaN());
      }
    }
    for (Index p = 0; p < s.heads * s.prototypes; ++p) {
      double norm = 0.0;
      const std::size_t first = rows.size();
      for (Index d = 0; d < s.dims; ++d) {
        rows.push_back(normal(random));
        norm += double(rows.back()) * rows.back();
      }
      const Index number = p % s.prototypes;
      const bool absent = number % 4 == 0 && s.prototypes > 1;
      for (Index d = 0; d < s.dims; ++d) {
        float& x = rows[first + d];
        x = absent ? 0.0f : float(x / std::sqrt(norm));
        if (number + 1 == s.prototypes && number > 1) {
          x = rows[first + d - (number - 1) * s.dims];
        }
      }
    }
  }

  static Element narrow(float value) {
    if constexpr (std::is_same_v<Element, float>) return value;
    if constexpr (std::is_same_v<Element, BFloat16>) {
      return {static_cast<std::uint16_t>(kvp::round_to_bfloat16(value))};
    } else if constexpr (std::is_same_v<Element, Float16>) {
      // Tolerance: five bits of the fraction.
      int exponent = 0;
      const float part = std::frexp(std::fabs(value), &exponent);
      const int fraction = static_cast<int>((2.0f * part - 1.0f) * 32.0f);
      const int bits = exponent < -10 || value != value
                           ? (value != value ? 0x7e00 : 0)
                           : (exponent + 14) << 10 | fraction << 5;
      return {static_cast<std::uint16_t>(bits | (value < 0 ? 0x8000 : 0))};
    }
  }

  double similarity(Index head, Index slot, Index p) const {
    double sum = 0.0;
    for (Index d = 0; d < shape.dims; ++d) {
      sum += double(kvp::to_float(keys[head * head_stride + slot * slot_stride + d])) *
             rows[(head * shape.prototypes + p) * shape.dims + d];
    }
    return sum;
  }

  bool exists(Index head, Index p) const {
    bool some = false;
    for (Index d = 0; d < shape.dims; ++d) {
      some |= rows[(head * shape.prototypes + p) * shape.dims + d] != 0.0f;
    }
    return some;
  }
};

struct Assigned {
  std::vector<Index> clusters;
  std::vector<float> means;
  bool operator==(const Assigned& other) const {
    return clusters == other.clusters && means == other.means;
  }
};

template <typename Element>
Assigned run(const Problem<Element>& problem) {
  const Shape& s = problem.shape;
  Assigned out;
  out.clusters.resize(problem.values.size(), -7);
  out.means.resize(problem.values.size(), -7.0f);
  static_assert(sizeof(bool) == 1, "as torch has it");
  const kvp::cuda::AssignCall<Element> call{
      problem.keys.data(),
      problem.head_stride,
      problem.slot_stride,
      s.heads,
      s.slots,
      s.dims,
      s.prototypes,
      problem.rows.data(),
      problem.values.data(),
      s.holes ? reinterpret_cast<const bool*>(problem.valid.data()) : nullptr,
      out.clusters.data(),
      out.means.data()};
  std::vector<kvp::cuda::Word> scratch(
      static_cast<std::size_t>(kvp::cuda::assign_scratch(call)), 99);
  kvp::cuda::assign_and_average(call, scratch.data(), nullptr);
  return out;
}

template <typename Element>
void check_nearest(const Problem<Element>& problem, const Assigned& found) {
  const Shape& s = problem.shape;
  for (Index i = 0; i < s.heads * s.slots; ++i) {
    const Index head = i / s.slots, slot = i % s.slots, chosen = found.clusters[i];
    if (!problem.valid[i]) {
      CHECK(chosen == s.prototypes && found.means[i] == 0.0f);
      continue;
    }
    CHECK(chosen >= 0 && chosen < s.prototypes && problem.exists(head, chosen));
    CHECK(s.prototypes < 3 || chosen + 1 != s.prototypes ||
          !problem.exists(head, 1));  // the second equals it and is lower
    for (Index p = 0; p < s.prototypes; ++p) {
      if (!problem.exists(head, p)) continue;
      CHECK(problem.similarity(head, slot, p) <=
            problem.similarity(head, slot, chosen) + 1e-5);
    }
  }
}

// The host's means over the clusters.
template <typename Element>
void check_means(const Problem<Element>& problem, const Assigned& found) {
  const Shape& s = problem.shape;
  std::vector<Index> sums(s.prototypes + 1), sizes(s.prototypes + 1);
  std::vector<float> of_cluster(s.prototypes + 1), means(s.slots);
  for (Index head = 0; head < s.heads && s.slots > 0; ++head) {
    for (Index t = 0; t < s.slots; ++t) {
      const Index at = head * s.slots + t;
      means[t] = problem.valid[at] ? problem.values[at] : 0.0f;
    }
    kvp::cluster_mean(means.data(), found.clusters.data() + head * s.slots, s.slots,
                      s.prototypes + 1, sums.data(), sizes.data(), of_cluster.data(),
                      means.data());
    for (Index t = 0; t < s.slots; ++t) {
      CHECK(found.means[head * s.slots + t] == means[t]);
    }
  }
}

template <typename Element>
void test_assignment(const Shape& shape, std::mt19937& random) {
  const Problem<Element> problem(shape, random);
  const Assigned found = run(problem);
  check_nearest(problem, found);
  check_means(problem, found);
  if (!kFewThreads) check_all_turns(found, [&] { return run(problem); });
}

// If all prototypes are zero, the first gets all keys; if all values are zero, so are the
// means.
void test_nothing(std::mt19937& random) {
  Problem<float> problem({1, 40, 8, 5, false}, random);
  problem.rows.assign(problem.rows.size(), 0.0f);
  problem.values.assign(problem.values.size(), 0.0f);
  const Assigned found = run(problem);
  CHECK(found.clusters == std::vector<Index>(40, 0));
  CHECK(found.means == std::vector<float>(40, 0.0f));
}

}  // namespace

int main() {
  const unsigned seed = 20256;
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  if (kFewThreads) {
    test_assignment<BFloat16>({1, 70, 40, 70, true}, random);
    return report();
  }
  const Shape shapes[] = {{2, 97, 64, 17, false}, {1, 33, 7, 1, true},
                          {1, 64, 80, 143, true}, {2, 1, 1, 2, false},
                          {1, 40, 512, 5, true},  {3, 0, 16, 3, false},
                          {7, 200, 4, 3, false}};  // more than a launch has threads
  for (const Shape& shape : shapes) {
    current_case = "float32";
    test_assignment<float>(shape, random);
    current_case = "bfloat16";
    test_assignment<BFloat16>(shape, random);
    current_case = "float16";
    test_assignment<Float16>(shape, random);
  }
  current_case = "nothing";
  test_nothing(random);
  return report();
}
