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

struct Layout {
  kvp::PageLayout layout;
  std::vector<std::int32_t> keys, values;
};

// Natural, transposed or shuffled planes.
void make_layout(int kind, Index block, Index dim, std::mt19937& random, Layout& made) {
  made.keys.resize(u(block * dim));
  made.values.resize(u(block * dim));
  std::vector<std::int32_t> order(u(2 * block * dim));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = std::int32_t(i);
  if (kind == 2) std::shuffle(order.begin(), order.end(), random);
  for (Index s = 0; s < block; ++s) {
    for (Index d = 0; d < dim; ++d) {
      const Index natural = s * dim + d, turned = d * block + s;
      made.keys[u(natural)] = order[u(kind == 1 ? turned : natural)];
      made.values[u(natural)] = order[u(block * dim + natural)];
    }
  }
  made.layout = kvp::make_layout(made.keys.data(), made.values.data(), block, dim);
}

// Rows against the definition; pages of every layout hold the same bits as the rows,
// and nothing else of them changes.
template <typename Element, typename Factor>
void check_reconstruction(Index tokens, Index dim, Index block, double tolerance,
                          bool in_order, std::mt19937& random) {
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
  const Index all_pages = 208 / block;
  const Index page_elems = 2 * block * dim;
  std::vector<Index> places(u(block * all_pages)), pages, slots;
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = Index(i) + 5;
  if (!in_order) std::shuffle(places.begin(), places.end() - 5, random);
  for (Index t = 0; t < tokens; ++t) {
    pages.push_back(places[u(t)] / block);
    slots.push_back(places[u(t)] % block);
  }
  for (int kind = 0; kind < 3; ++kind) {
    Layout layout;
    make_layout(kind, block, dim, random, layout);
    for (const kvp::Plane& plane : {layout.layout.keys, layout.layout.values}) {
      std::vector<Element> heap(u((all_pages + 1) * page_elems)), expected;
      std::memset(heap.data(), 0x5a, heap.size() * sizeof(Element));
      expected = heap;
      for (Index t = 0; t < tokens; ++t) {
        for (Index d = 0; d < dim; ++d) {
          const std::int32_t offset = plane.offsets[slots[u(t)] * dim + d];
          expected[u(pages[u(t)] * page_elems + offset)] = rows[u(t * dim + d)];
        }
      }
      kvp::svd::reconstruct_pages(
          *kernels, made.shape, made.record.data(),
          kvp::svd::PageTarget<Element>{heap.data(), page_elems, plane, block,
                                        pages.data(), slots.data()},
          work);
      CHECK(std::memcmp(heap.data(), expected.data(), heap.size() * sizeof(Element)) ==
            0);
    }
  }
}

// In pages of 32 slots and more, strips of a column lie side by side.
void test_reconstruction(Index block, std::mt19937& random) {
  for (Index tokens : {0, 1, 15, 64, 150}) {
    for (Index dim : {1, 64, 80}) {
      current_case = "reconstruction";
      check_reconstruction<float, float>(tokens, dim, block, 1e-5, true, random);
      check_reconstruction<float, BFloat16>(tokens, dim, block, 1e-5, false, random);
      check_reconstruction<BFloat16, float>(tokens, dim, block, 0x1p-8, false, random);
      check_reconstruction<BFloat16, BFloat16>(tokens, dim, block, 0x1p-8, true,
                                               random);
    }
  }
}

// Any components may go; what stays is copied, and one element fills odd records up.
template <typename Factor>
void check_components(Index tokens, Index dim, float least, std::mt19937& random) {
  const auto problem = make_problem<float>(tokens, dim, Spectrum::kDecaying, random);
  const auto made = decompose<Factor>(problem, 7);
  std::vector<float> gates(u(made.shape.rank));
  std::vector<Index> stay;
  for (std::size_t k = 0; k < gates.size(); ++k) {
    gates[k] = std::uniform_real_distribution<float>(0.0f, 1.0f)(random);
    if (gates[k] >= least) stay.push_back(Index(k));
  }
  Decomposed<Factor> kept{{tokens, dim, Index(stay.size())}, {}, Fault::kNone};
  // exactly as long: a sanitizer sees a write behind it
  kept.record.resize(u(kept.shape.elements()), kvp::svd::narrow(NAN, (Factor*)nullptr));
  kvp::svd::keep_components(made.shape, made.record.data(), gates.data(), least,
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
      for (float least : {0.0f, 0.5f, 1.0f}) {
        check_components<float>(tokens, dim, least, random);
        check_components<BFloat16>(tokens, dim, least, random);
      }
    }
  }
}

// Vectors, two side by side among them, and what is left behind them round as single
// values do.
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
    for (Index block : {16, 52}) test_reconstruction(block, random);
    test_components(random);
  });
  test_size();
  std::printf("%d failure(s)\n", failures);
  return failures != 0;
}
