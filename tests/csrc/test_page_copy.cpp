// Tests of the header-only core against loops written from its definition.
// No framework: CHECK counts, main returns non-zero if anything failed.
#include <cstdio>

#include "kvp/page_check.hpp"
#include "page_fixtures.hpp"

namespace {

int failures = 0;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::printf("%s:%d: %s (case %s)\n", __FILE__, __LINE__, #condition, \
                  current_case);                                           \
      ++failures;                                                          \
    }                                                                      \
  } while (0)

const char* current_case = "";

using namespace page_test;

template <typename Element>
void test_gather_scatter(Fixture<Element> f, std::mt19937& random) {
  std::vector<Element> keys(f.n * f.head_dim), values(f.n * f.head_dim);
  kvp::gather_tokens(f.source(f.heap.data()), f.tokens(), keys.data(), values.data());
  for (Index i = 0; i < f.n; ++i) {
    for (Index d = 0; d < f.head_dim; ++d) {
      CHECK(keys[i * f.head_dim + d] == f.at(f.heap, f.tables.keys, i, d));
      CHECK(values[i * f.head_dim + d] == f.at(f.heap, f.tables.values, i, d));
    }
  }
  keys = random_elements<Element>(f.n * f.head_dim, random);
  values = random_elements<Element>(f.n * f.head_dim, random);
  std::vector<Element> expected = f.heap;
  for (Index i = 0; i < f.n; ++i) {
    for (Index d = 0; d < f.head_dim; ++d) {
      f.at(expected, f.tables.keys, i, d) = keys[i * f.head_dim + d];
      f.at(expected, f.tables.values, i, d) = values[i * f.head_dim + d];
    }
  }
  kvp::scatter_tokens(f.paged(f.heap.data()), f.tokens(), keys.data(), values.data());
  CHECK(f.heap == expected);  // the gaps between pages too
}

template <typename Element>
void test_move(Fixture<Element> f) {
  std::vector<Element> expected = f.heap;
  for (Index i = 0; i < f.n; ++i) {
    for (Index d = 0; d < f.head_dim; ++d) {
      f.at(expected, f.tables.keys, f.n + i, d) = f.at(f.heap, f.tables.keys, i, d);
      f.at(expected, f.tables.values, f.n + i, d) = f.at(f.heap, f.tables.values, i, d);
    }
  }
  kvp::move_tokens(f.paged(f.heap.data()), f.tokens(), f.others());
  CHECK(f.heap == expected);
}

template <typename Element>
void test_gather_pages(Fixture<Element> f) {
  const Indices table = {3, 3, 0, 6, 5, 1};  // [2, 3]; a page occurs twice
  const Index half = f.layout.plane_elems();
  std::vector<Element> keys(6 * half), values(6 * half);
  const kvp::PageTable<Index> list{table.data(), 2, 3};
  const auto kv = f.source(f.heap.data());
  kvp::gather_plane(kv, f.layout.keys, list, keys.data());
  kvp::gather_plane(kv, f.layout.values, list, values.data());
  for (Index i = 0; i < 6 * half; ++i) {
    const Element* page = f.heap.data() + table[i / half] * f.stride;
    CHECK(keys[i] == page[f.tables.keys[i % half]]);
    CHECK(values[i] == page[f.tables.values[i % half]]);
  }
}

template <typename Element>
void test_copies(std::mt19937& random) {
  const Index shapes[][2] = {{1, 1}, {5, 3}, {16, 64}, {16, 80}, {32, 128}, {128, 64}};
  for (const auto& shape : shapes) {
    for (const Order order : kOrders) {
      // n = 0, and enough tokens to cross the threshold of the parallel loops.
      for (Index n : {Index{0}, Index{1}, shape[0] * 3}) {
        Fixture<Element> fixture(order, shape[0], shape[1], n, random);
        test_gather_scatter(fixture, random);
        test_move(fixture);
      }
      test_gather_pages(Fixture<Element>(order, shape[0], shape[1], 0, random));
    }
  }
}

void test_kinds(std::mt19937& random) {
  const auto keys = [&](Order order) {
    const Tables t = make_tables(order, 16, 64, random);
    return kvp::make_plane(t.keys.data(), 16, 64);
  };
  CHECK(keys(Order::kNatural).kind == kvp::PlaneKind::kRows);
  CHECK(keys(Order::kNatural).is_matrix(64));
  CHECK(keys(Order::kInterleaved).kind == kvp::PlaneKind::kRows);
  CHECK(keys(Order::kInterleaved).slot_stride == 128);
  CHECK(!keys(Order::kInterleaved).is_matrix(64));
  CHECK(keys(Order::kTransposedKeys).kind == kvp::PlaneKind::kTransposed);
  CHECK(keys(Order::kShuffled).kind == kvp::PlaneKind::kPermuted);
  const Tables one = make_tables(Order::kInterleaved, 1, 64, random);
  CHECK(kvp::make_plane(one.values.data(), 1, 64).is_matrix(64));
}

void test_checks() {
  using kvp::Fault;
  const Indices pages = {2, 0, 5, 2}, slots = {1, 3, 0, 0};
  CHECK(kvp::check_pages(pages.data(), 4, 6).ok());
  CHECK(kvp::check_pages(pages.data(), 0, 0).ok());
  kvp::Status status = kvp::check_pages(pages.data(), 4, 5);
  CHECK(status.fault == Fault::kPageOutOfRange && status.index == 2 &&
        status.value == 5);
  const Indices negative = {0, -1};
  CHECK(kvp::check_slots(negative.data(), 2, 4).index == 1);
  CHECK(kvp::check_slots(slots.data(), 4, 3).fault == Fault::kSlotOutOfRange);
  const Offsets offsets = {0, 8};
  CHECK(kvp::check_offsets(offsets.data(), 2, 8).fault == Fault::kOffsetOutOfRange);

  const auto clashes = [](const Indices& from_page, const Indices& from_slot,
                          const Indices& to_page, const Indices& to_slot) {
    const Index n = static_cast<Index>(to_page.size());
    const kvp::PageSpan span = kvp::span_of(to_page.data(), n);
    std::vector<std::uint64_t> bits(static_cast<std::size_t>(span.bitmap_words(4)));
    const kvp::Status distinct =
        kvp::check_distinct(to_page.data(), to_slot.data(), n, 4, span, bits.data());
    if (!distinct.ok()) return distinct;
    return kvp::check_disjoint(from_page.data(), from_slot.data(), n, 4, span,
                               bits.data());
  };
  CHECK(clashes({9, 0}, {0, 0}, {2, 3}, {1, 1}).ok());
  CHECK(clashes({}, {}, {}, {}).ok());
  status = clashes({9, 0, 0}, {0, 0, 1}, {2, 3, 2}, {1, 1, 1});
  CHECK(status.fault == Fault::kDuplicateDestination && status.index == 2 &&
        status.value == 9);
  status = clashes({9, 3}, {0, 1}, {2, 3}, {1, 1});
  CHECK(status.fault == Fault::kSourceIsDestination && status.index == 1 &&
        status.value == 13);
}

}  // namespace

int main() {
  const unsigned seed = 20240;
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  current_case = "32-bit elements";
  test_copies<std::uint32_t>(random);
  current_case = "16-bit elements";
  test_copies<std::uint16_t>(random);
  current_case = "8-bit elements (no vector tile)";
  test_copies<std::uint8_t>(random);
  current_case = "plane kinds";
  test_kinds(random);
  current_case = "checks";
  test_checks();
  std::printf("%d failure(s)\n", failures);
  return failures != 0;
}
