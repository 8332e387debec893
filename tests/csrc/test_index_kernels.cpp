// Tests of the parts of the key index (dot_products.hpp, top_k.hpp, arena.hpp) against
// loops written from the definitions, for every set of kernels that this CPU runs.
#include "index_fixtures.hpp"

namespace {

using namespace index_test;

void test_scores(const Kernels& kernels, std::mt19937& random) {
  current_case = "scores";
  for (Index dims : {1, 3, 4, 8, 15, 16, 17, 33, 54, 64, 100, 128}) {
    for (Index n : {1, 3, 4, 5, 37}) {
      const std::vector<float> rows = clustered(n, dims, random);
      const std::vector<float> query = clustered(1, dims, random);
      std::vector<std::uint16_t> half;
      for (float x : rows) half.push_back(narrow(x));
      std::vector<Index> offsets;
      for (Index i = 0; i < n; ++i) offsets.push_back((n - 1 - i) * dims);
      std::vector<float> out(n), backwards(n), narrow_out(n);
      kernels.score(query.data(), dims, rows.data(), nullptr, dims, n, out.data());
      kernels.score(query.data(), dims, rows.data(), offsets.data(), 0, n,
                    backwards.data());
      kernels.score(query.data(), dims, half.data(), nullptr, dims, n,
                    narrow_out.data());
      for (Index i = 0; i < n; ++i) {
        double exact = 0.0, exact_narrow = 0.0;
        for (Index d = 0; d < dims; ++d) {
          exact += double(query[d]) * rows[i * dims + d];
          exact_narrow += double(query[d]) * kvp::widen(half[i * dims + d]);
        }
        CHECK(std::fabs(out[i] - exact) < 1e-4);
        CHECK(std::fabs(narrow_out[i] - exact_narrow) < 1e-4);
        // The sum does not depend on the position of the row among the others.
        CHECK(out[i] == backwards[n - 1 - i]);
      }
    }
  }
}

void test_lower_bounds(const Kernels& kernels, std::mt19937& random) {
  current_case = "lower bounds";
  const Index composite = 3, simple = 2, n = 21, stride = 32;
  const std::vector<float> raw = clustered(composite * simple, stride, random);
  const std::vector<float> lift = clustered(1, stride, random);
  const std::vector<float> last = clustered(1, composite * simple, random);
  const std::vector<float> target = clustered(1, composite * simple, random);
  std::vector<float> bounds(stride);
  kernels.lower_bounds(raw.data(), stride, lift.data(), last.data(), target.data(),
                       composite, simple, n, bounds.data());
  for (Index i = 0; i < n; ++i) {
    float least = 1e30f;
    for (Index c = 0; c < composite; ++c) {
      float largest = 0.0f;
      for (Index p = c * simple; p < (c + 1) * simple; ++p) {
        largest = std::max(
            largest, std::fabs(raw[p * stride + i] + last[p] * lift[i] - target[p]));
      }
      least = std::min(least, largest);
    }
    CHECK(std::fabs(bounds[i] - least) < 1e-5);
  }
}

void test_top_k(std::mt19937& random) {
  current_case = "top k";
  for (Index k : {1, 2, 7, 64}) {
    for (Index n : {0, 1, 6, 7, 13, 14, 15, 500}) {
      std::vector<Scored> all;
      for (Index i = 0; i < n; ++i) {
        all.push_back({float(random() % 20), static_cast<std::int32_t>(i)});
      }
      std::shuffle(all.begin(), all.end(), random);
      TopK top(k);
      for (const Scored& one : all) top.push(one);
      std::sort(all.begin(), all.end(), better);
      all.resize(std::min<std::size_t>(all.size(), k));
      CHECK(same(top.sorted(), all));
      CHECK(same(top.sorted(), all));  // sorted() changes nothing
    }
  }
}

void test_arena() {
  current_case = "arena";
  Arena arena;
  Array<std::int32_t> grown(arena);
  for (std::int32_t i = 0; i < 100000; ++i) grown.push(i);
  for (std::int32_t i = 0; i < 100000; ++i) CHECK(grown[i] == i);
  const std::int64_t bytes = arena.bytes();
  CHECK(bytes >= 400000 && bytes < 1400000);
  {
    Array<std::int32_t> reused(arena);
    reused.resize(60000);
  }
  CHECK(arena.bytes() == bytes);  // reuses a block that an array has outgrown
}

}  // namespace

int main() {
  std::mt19937 random(kSeed);
  test_top_k(random);
  test_arena();
  for (const Kernels* kernels : kvp::runnable_kernels<Kernels>()) {
    std::printf("%s\n", kvp::name_of(kernels->simd));
    test_scores(*kernels, random);
    test_lower_bounds(*kernels, random);
  }
  return report();
}
