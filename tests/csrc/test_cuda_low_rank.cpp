// Tests of the CUDA reconstruction of low-rank factors, under the emulator: against
// their definition in double precision and against low_rank.hpp.
#include <array>
#include <cmath>
#include <cstring>
#include <random>

#include "cuda_fixtures.hpp"
#include "kvp/low_rank.cuh"
#include "kvp/svd.hpp"
#include "page_fixtures.hpp"

namespace {

using namespace cuda_test;
using namespace page_test;
using kvp::BFloat16;
using kvp::cuda::RowTile;
using kvp::svd::Record;

// Records of some matrices, one after the other, with random numbers.
template <typename Factor>
struct Factors {
  Index head_dim;
  std::vector<Record<Factor>> shapes;
  Indices begins;
  std::vector<Factor> elements;
  Index rows = 0;

  Factors(Index dims, std::vector<std::array<Index, 2>> tokens_and_ranks,
          std::mt19937& random)
      : head_dim(dims) {
    std::normal_distribution<float> normal;
    Factor* tag = nullptr;
    for (const auto& [tokens, rank] : tokens_and_ranks) {
      const Record<Factor> shape{tokens, dims, rank};
      const std::size_t at = elements.size();
      begins.push_back(static_cast<Index>(at));
      shapes.push_back(shape);
      rows += tokens;
      for (Index i = 0; i < shape.elements(); ++i) {
        elements.push_back(kvp::svd::narrow(normal(random), tag));
      }
      for (Index k = 0; k < rank; ++k) {
        const float sigma = 10.0f / static_cast<float>(k + 1);
        std::memcpy(elements.data() + at + k * Record<Factor>::kPerFloat, &sigma, 4);
      }
    }
  }

  std::vector<RowTile> work() const {
    std::vector<RowTile> list;
    Index row = 0;
    for (std::size_t m = 0; m < shapes.size(); ++m) {
      kvp::cuda::list_rows(shapes[m], begins[m], row, list);
      row += shapes[m].tokens;
    }
    return list;
  }

  template <typename Element>
  std::vector<Element> on_the_host() const {
    std::vector<Element> out(static_cast<std::size_t>(rows * head_dim));
    kvp::svd::Workspace work;
    Element* at = out.data();
    for (std::size_t m = 0; m < shapes.size(); ++m) {
      kvp::svd::reconstruct_rows(kvp::select_kernels<kvp::svd::Kernels>(), shapes[m],
                                 elements.data() + begins[m], at, work);
      at += shapes[m].tokens * head_dim;
    }
    return out;
  }

  std::vector<double> exact() const {
    std::vector<double> out;
    for (std::size_t m = 0; m < shapes.size(); ++m) {
      const Factor* record = elements.data() + begins[m];
      const Record<Factor>& s = shapes[m];
      for (Index i = 0; i < s.tokens * head_dim; ++i) {
        const Index t = i / head_dim, d = i % head_dim;
        if (s.holds_rows()) {
          out.push_back(double(kvp::to_float(record[i])));
          continue;
        }
        double sum = 0.0;
        for (Index k = 0; k < s.rank; ++k) {
          sum += double(kvp::to_float(record[s.left() + t * s.rank + k])) * 10.0 /
                 double(k + 1) *
                 double(kvp::to_float(record[s.right() + k * head_dim + d]));
        }
        out.push_back(sum);
      }
    }
    return out;
  }
};

// Whether rows are as exact as their dtype allows, and close to those of the host.
template <typename Element>
bool close(const std::vector<Element>& made, const std::vector<Element>& host,
           const std::vector<double>& exact) {
  const double step = sizeof(Element) == 2 ? 0x1p-8 : 2e-6;
  bool good = made.size() == exact.size();
  for (std::size_t i = 0; good && i < made.size(); ++i) {
    const double ours = kvp::to_float(made[i]), theirs = kvp::to_float(host[i]);
    good = std::fabs(ours - exact[i]) <= step * std::fabs(exact[i]) + 5e-5 &&
           std::fabs(ours - theirs) <= 2 * step * std::fabs(exact[i]) + 5e-5;
  }
  return good;
}

template <typename Element>
std::vector<std::uint8_t> bytes_of(const std::vector<Element>& elements) {
  std::vector<std::uint8_t> bytes(elements.size() * sizeof(Element));
  if (!bytes.empty()) std::memcpy(bytes.data(), elements.data(), bytes.size());
  return bytes;
}

template <typename Element, typename Factor>
void test_rows(const Factors<Factor>& factors) {
  const std::vector<RowTile> list = factors.work();
  const auto n = static_cast<Index>(list.size());
  const auto make = [&] {
    std::vector<Element> rows(
        static_cast<std::size_t>(factors.rows * factors.head_dim));
    kvp::cuda::reconstruct(factors.elements.data(), list.data(), n, factors.head_dim,
                           rows.data(), nullptr);
    return rows;
  };
  const std::vector<Element> rows = make();
  CHECK(close(rows, factors.template on_the_host<Element>(), factors.exact()));
  check_all_turns(bytes_of(rows), [&] { return bytes_of(make()); });
}

template <typename Factor>
void test_factors(Index dims, std::mt19937& random) {
  const Factors<Factor> factors(dims,
                                {{33, 16},
                                 {1, 1},
                                 {0, 0},
                                 {41, kvp::svd::kRows},
                                 {64, 40},
                                 {7, 0},
                                 {5, 3},
                                 {3, kvp::svd::kRows}},
                                random);
  test_rows<float>(factors);
  test_rows<BFloat16>(factors);
}

}  // namespace

int main() {
  const unsigned seed = 20255;
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  if (kFewThreads) {
    const Factors<BFloat16> factors(70, {{33, 40}}, random);
    test_rows<BFloat16>(factors);
    return report();
  }
  for (const Index dims : {1, 64, 80}) {
    current_case = "float32 factors";
    test_factors<float>(dims, random);
    current_case = "bfloat16 factors";
    test_factors<BFloat16>(dims, random);
  }
  return report();
}
