// Tests of kvp/low_rank.hpp against loops written from the definition.
#include "svd_fixtures.hpp"

namespace {

// Equation 18, and what bfloat16 adds to it.
void test_size() {
  current_case = "size";
  for (Index tokens : {1, 16, 33}) {
    for (Index rank : {0, 1, 7, 32}) {
      const Index values = rank * (tokens + 65 + 1);
      const Record<float> wide{tokens, 65, rank};
      const Record<BFloat16> narrow{tokens, 65, rank};
      CHECK(wide.elements() == values);
      CHECK(narrow.elements() >= values + rank);
      CHECK(narrow.elements() <= values + rank + 1 && narrow.elements() % 2 == 0);
    }
  }
}

// Rows against the definition.
template <typename Element, typename Factor>
void check_reconstruction(Index tokens, Index dim, double tolerance,
                          std::mt19937& random) {
  const auto problem = make_problem<float>(tokens, dim, Spectrum::kDecaying, random);
  const auto made = decompose<Factor>(problem, 8);
  static Workspace work;
  std::vector<Element> rows(u(tokens * dim));
  kvp::svd::reconstruct_rows(*kernels, made.shape, made.record.data(), rows.data(),
                             work);
  for (Index t = 0; t < tokens; ++t) {
    for (Index d = 0; d < dim; ++d) {
      const double right = made.row(t, d);
      const double ours = double(kvp::to_float(rows[u(t * dim + d)]));
      CHECK(std::fabs(ours - right) <= tolerance * std::fabs(right) + 1e-5);
    }
  }
}

void test_reconstruction(std::mt19937& random) {
  for (Index tokens : {0, 1, 15, 64, 150}) {
    for (Index dim : {1, 64, 80}) {
      current_case = "reconstruction";
      check_reconstruction<float, float>(tokens, dim, 1e-5, random);
      check_reconstruction<float, BFloat16>(tokens, dim, 1e-5, random);
      check_reconstruction<BFloat16, float>(tokens, dim, 0x1p-8, random);
      check_reconstruction<BFloat16, BFloat16>(tokens, dim, 0x1p-8, random);
    }
  }
}

// Rows are stored as they are, and come back as they are.
template <typename Element, typename Factor>
void check_rows(Index tokens, Index dim, std::mt19937& random) {
  const auto problem = make_problem<Factor>(tokens, dim, Spectrum::kFlat, random);
  const kvp::svd::Record<Factor> shape{tokens, dim, kvp::svd::kRows};
  CHECK(shape.elements() - tokens * dim == (tokens * dim) % shape.kPerFloat);
  // exact size: a sanitizer sees a write past the end
  std::vector<Factor> record(u(shape.elements()),
                             kvp::svd::narrow(NAN, (Factor*)nullptr));
  Fault fault = Fault::kNoEigenvalue;
  kvp::svd::store_rows(problem.matrix(), record.data(), fault);
  CHECK(fault == Fault::kNone);
  std::vector<Factor> kept(record.size());
  kvp::svd::keep_components(shape, record.data(), nullptr, 0.5f, kept.data());
  std::vector<Element> rows(u(tokens * dim));
  static Workspace work;
  kvp::svd::reconstruct_rows(*kernels, shape, kept.data(), rows.data(), work);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const float value = kvp::to_float(record[i]);
    CHECK(kvp::to_float(rows[i]) ==
          kvp::to_float(kvp::svd::narrow(value, (Element*)nullptr)));
  }
  if (shape.elements() > tokens * dim) CHECK(kvp::to_float(record.back()) == 0.0f);
}

void test_rows(std::mt19937& random) {
  current_case = "rows";
  for (Index tokens : {0, 1, 33}) {
    for (Index dim : {1, 64, 65}) {
      check_rows<float, float>(tokens, dim, random);
      check_rows<float, BFloat16>(tokens, dim, random);
      check_rows<BFloat16, float>(tokens, dim, random);
      check_rows<BFloat16, BFloat16>(tokens, dim, random);
    }
  }
}

// The smallest record has factors only where they are smaller.
template <typename Factor>
void check_smallest() {
  for (Index tokens = 0; tokens < 150; ++tokens) {
    for (Index rank : {1, 8, 32, 64}) {
      const auto made = kvp::svd::smallest_record<Factor>(tokens, 64, rank);
      const Index full = std::min(std::min<Index>(tokens, 64), rank);
      const Record<Factor> factors{tokens, 64, full}, rows{tokens, 64, kvp::svd::kRows};
      CHECK(made.rank == full || made.holds_rows());
      CHECK(made.elements() == std::min(factors.elements(), rows.elements()));
    }
  }
}

// Any components may be dropped. The others are copied, and odd records are padded.
template <typename Factor>
void check_components(Index tokens, Index dim, float min_gate, std::mt19937& random) {
  const auto problem = make_problem<float>(tokens, dim, Spectrum::kDecaying, random);
  const auto made = decompose<Factor>(problem, 7);
  std::vector<float> gates(u(made.shape.rank));
  std::vector<Index> stay;
  for (std::size_t k = 0; k < gates.size(); ++k) {
    gates[k] = std::uniform_real_distribution<float>(0.0f, 1.0f)(random);
    if (gates[k] >= min_gate) stay.push_back(Index(k));
  }
  Decomposed<Factor> kept{{tokens, dim, Index(stay.size())}, {}, Fault::kNone};
  // exact size: a sanitizer sees a write past the end
  kept.record.resize(u(kept.shape.elements()), kvp::svd::narrow(NAN, (Factor*)nullptr));
  kvp::svd::keep_components(made.shape, made.record.data(), gates.data(), min_gate,
                            kept.record.data());
  for (Index j = 0; j < kept.shape.rank; ++j) {
    const Index k = stay[u(j)];
    CHECK(kept.sigma(j) == double(float(made.sigma(k)) * gates[u(k)]));
    for (Index t = 0; t < tokens; ++t) CHECK(kept.left(t, j) == made.left(t, k));
    for (Index d = 0; d < dim; ++d) CHECK(kept.right(j, d) == made.right(k, d));
  }
  if (kept.shape.elements() > kept.shape.right() + kept.shape.rank * dim) {
    CHECK(kvp::to_float(kept.record.back()) == 0.0f);
  }
}

void test_components(std::mt19937& random) {
  current_case = "components";
  for (Index tokens : {0, 1, 6, 33}) {
    for (Index dim : {1, 64, 65}) {
      for (float min_gate : {0.0f, 0.5f, 1.0f}) {
        check_components<float>(tokens, dim, min_gate, random);
        check_components<BFloat16>(tokens, dim, min_gate, random);
      }
    }
  }
}

// Single vectors, pairs of vectors and the remainder round like single values.
void test_conversion() {
  current_case = "conversion";
  const std::uint32_t special[] = {0x7fffffffu, 0xffffffffu, 0x7f800001u,
                                   0x7f800000u, 0x7f7fffffu, 0x3f808000u,
                                   0x3f818000u, 0x80000001u, 0x007f0000u};
  const Index count = 69, lanes = kernels->lanes();
  std::vector<float> values;
  for (Index i = 0; i < count; ++i) values.push_back(kvp::from_bits(special[i % 9]));
  std::vector<kvp::svd::Strip> strips;
  for (Index i = 0; i < count; i += lanes) {
    strips.push_back({i, i, std::min(lanes, count - i)});
  }
  std::vector<float> padded = values;
  padded.resize(u(count + lanes));
  std::vector<BFloat16> narrow(u(count));
  const float one = 1.0f;
  const Index to = 0;
  kernels->multiply(kvp::svd::StripProduct<BFloat16>{
      &one, 1, 1, padded.data(), count, 1, 1, &to, strips.data(), Index(strips.size()),
      narrow.data()});
  std::vector<float> wide(u(count));
  const float two = 2.0f;
  kernels->widen(narrow.data(), 1, count, &two, wide.data());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool to_zero = kernels->simd == kvp::Simd::kAvx512Bf16 && i % 9 == 8;
    CHECK(narrow[i].bits == (to_zero ? 0 : kvp::round_to_bfloat16(values[i])));
    const float twice = 2.0f * kvp::to_float(narrow[i]);
    CHECK(wide[i] == twice || (std::isnan(wide[i]) && std::isnan(twice)));
  }
}

}  // namespace

int main() {
  std::mt19937 random(kSeed);
  with_all_kernels([&] {
    test_conversion();
    test_reconstruction(random);
    test_components(random);
    test_rows(random);
  });
  test_size();
  check_smallest<float>();
  check_smallest<BFloat16>();
  std::printf("%d failure(s)\n", failures);
  return failures != 0;
}
