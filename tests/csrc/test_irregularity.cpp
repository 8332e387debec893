// Tests of kvp/irregularity.hpp against equation 10 in double precision.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "kvp/irregularity.hpp"

namespace {

using Index = std::int64_t;

constexpr unsigned kSeed = 20261121;
int failures = 0;

void check(bool condition, const char* what, Index length, Index dims) {
  if (condition) return;
  std::printf("%s (length %ld, dims %ld, seed %u)\n", what, long(length), long(dims),
              kSeed);
  ++failures;
}

std::vector<float> deltas(kvp::Simd simd, const std::vector<float>& keys, Index count,
                          Index length, Index dims, Index stride) {
  // Entries that the function does not write stay -7.
  std::vector<float> delta(static_cast<std::size_t>(count * length), -7.0f);
  const kvp::Chunks<float> chunks{keys.data(), count, length, stride, dims};
  std::vector<float> sums(static_cast<std::size_t>(count * dims), -7.0f);
#pragma omp parallel
  kvp::irregularity(simd, chunks, delta.data(), sums.data());
  for (Index c = 0; c < count; ++c) {
    for (Index d = 0; d < dims; ++d) {
      float sum = 0;
      for (Index t = c * length; t < (c + 1) * length; ++t) {
        sum += keys[static_cast<std::size_t>(t * stride + d)];
      }
      check(sums[static_cast<std::size_t>(c * dims + d)] == sum, "sums", length, dims);
    }
  }
  return delta;
}

// Equation 10 for one chunk.
std::vector<double> expected(const float* keys, Index length, Index dims,
                             Index stride) {
  std::vector<double> mean(static_cast<std::size_t>(dims)), out;
  for (Index t = 0; t < length; ++t) {
    for (Index d = 0; d < dims; ++d) mean[d] += double(keys[t * stride + d]) / length;
  }
  double variance = 0, mean_square = 0;
  for (Index d = 0; d < dims; ++d) mean_square += mean[d] * mean[d];
  for (Index t = 0; t < length; ++t) {
    double dot = 0, square = 0;
    for (Index d = 0; d < dims; ++d) {
      const double x = keys[t * stride + d];
      dot += x * mean[d];
      square += x * x;
      variance += (x - mean[d]) * (x - mean[d]) / length;
    }
    out.push_back(square > 0 ? 1 - dot / std::sqrt(square * mean_square) : 1.0);
  }
  for (double& x : out) x /= std::sqrt(variance);
  return out;
}

void test_random(kvp::Simd simd, std::mt19937& random) {
  std::normal_distribution<float> normal(0.5f, 1.0f);
  for (Index length : {2, 7, 32}) {
    for (Index dims : {1, 3, 16, 54, 64, 128, 512}) {
      const Index count = 5, stride = dims + 3;
      std::vector<float> keys(static_cast<std::size_t>(count * length * stride));
      for (float& x : keys) x = normal(random);
      for (Index d = 0; d < dims; ++d) keys[d] = 0.0f;  // a key without direction
      const auto found = deltas(simd, keys, count, length, dims, stride);
      for (Index c = 0; c < count; ++c) {
        const auto right =
            expected(keys.data() + c * length * stride, length, dims, stride);
        for (Index t = 0; t < length; ++t) {
          const double error = std::fabs(found[c * length + t] - right[t]);
          check(error <= 2e-6 * (1 + right[t]), "equation 10", length, dims);
        }
      }
    }
  }
}

void test_nothing_to_tell_apart(kvp::Simd simd) {
  for (float value : {0.0f, 1.5f}) {
    for (float x : deltas(simd, std::vector<float>(4 * 16, value), 1, 4, 16, 16)) {
      check(x == 0.0f, "equal keys", 4, 16);
    }
  }
}

void test_nearly_parallel(kvp::Simd simd) {
  // 1 - cos is below the precision of float for all of these.
  std::vector<float> keys(8 * 16);
  for (Index t = 0; t < 8; ++t) keys[t * 16] = 1.0f;
  keys[1 * 16 + 1] = 1e-4f;
  keys[5 * 16 + 1] = 3e-4f;
  const auto found = deltas(simd, keys, 1, 8, 16, 16);
  for (Index t = 0; t < 8; ++t) {
    check(t == 5 || found[t] < found[5], "nearly parallel", 8, 16);
  }
}

void test_find() {
  const float delta[] = {1, 5, 5, -INFINITY, 5, 2};
  Index order[6], slots[6];
  bool irregular[6];
  kvp::find_irregular(delta, 6, 2, order, irregular, slots);
  check(slots[0] == 1 && slots[1] == 2, "ties go to the lower", 6, 1);
  check(irregular[1] && irregular[2] && !irregular[4], "marks", 6, 1);
  kvp::find_irregular(delta, 6, 4, order, irregular, slots);
  check(slots[2] == 4 && slots[3] == 5 && !irregular[0], "ascending", 6, 1);
  kvp::find_irregular(delta, 6, 6, order, irregular, slots);
  check(irregular[3] && slots[5] == 5, "all", 6, 1);
  kvp::find_irregular(delta, 6, 0, order, irregular, slots);
  check(!irregular[1], "none", 6, 1);
}

void test_sums() {
  const std::vector<float> keys{1, 2, -9, 3, 4, -9, 5, 6, -9, 7, 8, -9};
  const bool irregular[] = {false, true, true, true, false, false};
  // The third chunk has no irregular keys and is not read.
  float sums[] = {-7, -7, -7, -7, -7, -7};
  kvp::sum_regular(kvp::Chunks<float>{keys.data(), 3, 2, 3, 2}, irregular, sums);
  check(sums[0] == 1 && sums[1] == 2, "sum of the regular", 2, 2);
  check(sums[2] == 0 && sums[3] == 0, "sum of none", 2, 2);
  check(sums[4] == -7 && sums[5] == -7, "sum of all", 2, 2);
}

}  // namespace

int main() {
  std::mt19937 random(kSeed);
  test_find();
  test_sums();
  for (kvp::Simd simd : {kvp::Simd::kBaseline, kvp::Simd::kAvx2, kvp::Simd::kAvx512}) {
    if (!kvp::supported(simd)) continue;
    test_random(simd, random);
    test_nothing_to_tell_apart(simd);
    test_nearly_parallel(simd);
  }
  std::printf("%d failure(s)\n", failures);
  return failures != 0;
}
