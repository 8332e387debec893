// Tests of the CUDA page copies, under the emulator, against the loops of
// page_copy.hpp: threads in every order, all paths, bytes around each page included.
#include "cuda_fixtures.hpp"
#include "kvp/page_copy.cuh"
#include "page_fixtures.hpp"

namespace {

using namespace cuda_test;
using namespace page_test;

// The plane as a caller of the CUDA ops describes it: as rows only if `named`.
kvp::Plane device_plane(const kvp::Plane& plane, bool named) {
  const bool rows = named && plane.kind == kvp::PlaneKind::kRows;
  return kvp::device_plane(plane.offsets, plane.base, rows ? plane.slot_stride : 0);
}

// The same pages at another address.
template <typename Element>
kvp::PagedKV<Element> device_pages(const Fixture<Element>& f, Element* pages,
                                   bool named) {
  return {pages,
          f.num_pages,
          f.stride,
          {f.block_size, f.head_dim, device_plane(f.layout.keys, named),
           device_plane(f.layout.values, named)}};
}

template <typename Element>
kvp::PagedKV<const Element> device_source(const Fixture<Element>& f,
                                          const Element* pages, bool named) {
  return device_pages(f, const_cast<Element*>(pages), named)
      .template as<const Element>();
}

// Copies the contents of a vector to `shift` elements after a 16-byte boundary.
template <typename Element>
struct Shifted {
  std::vector<Element> room;
  Element* data;
  std::size_t size;

  Shifted(const std::vector<Element>& from, Index shift)
      : room(from.size() + 32 / sizeof(Element)), size(from.size()) {
    data = room.data();
    while (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) ++data;
    data += shift;
    std::copy(from.begin(), from.end(), data);
  }
  std::vector<Element> back() const { return {data, data + size}; }
};

template <typename Element>
void test_tokens(const Fixture<Element>& f, bool rows, Index shift,
                 std::mt19937& random) {
  const Index elems = f.n * f.head_dim;
  const kvp::TokenSlots tokens = f.tokens();
  std::vector<Element> keys(elems), values(elems);
  kvp::gather_tokens(f.source(f.heap.data()), tokens, keys.data(), values.data());
  check_all_turns(std::vector{keys, values}, [&] {
    const Shifted<Element> heap(f.heap, shift);
    const Shifted<Element> k(std::vector<Element>(elems), shift);
    const Shifted<Element> v(std::vector<Element>(elems), shift);
    kvp::cuda::gather_tokens(device_source(f, heap.data, rows), tokens, k.data, v.data,
                             nullptr);
    return std::vector{k.back(), v.back()};
  });
  keys = random_elements<Element>(elems, random);
  values = random_elements<Element>(elems, random);
  std::vector<Element> expected = f.heap;
  kvp::scatter_tokens(f.paged(expected.data()), tokens, keys.data(), values.data());
  check_all_turns(expected, [&] {
    const Shifted<Element> heap(f.heap, shift), k(keys, shift), v(values, shift);
    kvp::cuda::scatter_tokens(device_pages(f, heap.data, rows), tokens, k.data, v.data,
                              nullptr);
    return heap.back();
  });
  expected = f.heap;
  kvp::move_tokens(f.paged(expected.data()), tokens, f.others());
  check_all_turns(expected, [&] {
    const Shifted<Element> heap(f.heap, shift);
    kvp::cuda::move_tokens(device_pages(f, heap.data, rows), tokens, f.others(),
                           nullptr);
    return heap.back();
  });
}

constexpr Index kRows = 50;

// Host rows `shift` elements after a 16-byte boundary, and the wanted rows.
template <typename Element>
struct Host {
  std::vector<Element> room;
  Element* data;
  Indices keys, values;

  Host(Index n, Index head_dim, Index shift, std::mt19937& random)
      : room(random_elements<Element>(kRows * head_dim + 32, random)) {
    data = room.data();
    while (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) ++data;
    data += shift;
    for (Index i = 0; i < n; ++i) {
      keys.push_back(static_cast<Index>(random() % kRows));
      values.push_back(static_cast<Index>(random() % kRows));
    }
  }
  kvp::TokenRows<Element> rows() const {
    return {data, kRows, keys.data(), values.data()};
  }
};

template <typename Element>
void test_fetch(Fixture<Element>& f, Index shift, std::mt19937& random) {
  const Host<Element> host(f.n, f.head_dim, shift, random);
  std::vector<Element> expected = f.heap;
  for (Index i = 0; i < f.n; ++i) {
    for (Index d = 0; d < f.head_dim; ++d) {
      f.at(expected, f.tables.keys, i, d) = host.data[host.keys[i] * f.head_dim + d];
      f.at(expected, f.tables.values, i, d) =
          host.data[host.values[i] * f.head_dim + d];
    }
  }
  std::vector<Element> ours = f.heap;
  kvp::fetch_tokens(f.paged(ours.data()), f.tokens(), host.rows());
  CHECK(ours == expected);
  for (const bool named : {false, true}) {
    check_all_turns(expected, [&] {
      // a vector's memory is 16-byte aligned
      std::vector<Element> heap = f.heap;
      kvp::cuda::fetch_tokens(device_pages(f, heap.data(), named), f.tokens(),
                              host.rows(), nullptr);
      return heap;
    });
  }
}

template <typename Element>
void test_planes(const Fixture<Element>& f, bool rows, Index shift) {
  const Indices table = {3, 3, 0, 6, 5, 1};  // a page occurs twice
  const auto n = static_cast<Index>(table.size());
  const Index half = f.layout.plane_elems();
  for (const kvp::Plane& plane : {f.layout.keys, f.layout.values}) {
    std::vector<Element> expected(n * half);
    const kvp::PageTable<Index> list{table.data(), 1, n};
    kvp::gather_plane(f.source(f.heap.data()), plane, list, expected.data());
    check_all_turns(expected, [&] {
      const Shifted<Element> heap(f.heap, shift);
      const Shifted<Element> out(std::vector<Element>(n * half), shift);
      kvp::cuda::gather_plane(device_source(f, heap.data, rows),
                              device_plane(plane, rows), list, out.data, nullptr);
      return out.back();
    });
  }
}

template <typename Element>
void test_copies(std::mt19937& random) {
  const Index shapes[][2] = {{1, 1}, {5, 3}, {16, 64}, {16, 80}, {4, 8}};
  for (const auto& shape : shapes) {
    for (const Order order : kOrders) {
      // Sizes that allow 16-byte copies; then a stride, then an address that does not.
      for (const Index gap : {Index{16}, Index{3}}) {
        for (const Index shift : {Index{0}, Index{1}}) {
          for (const Index n : {Index{0}, Index{1}, shape[0] * 3}) {
            if (kFewThreads && (shape[0] != 4 || n < 2 || gap + shift != 16)) continue;
            Fixture<Element> f(order, shape[0], shape[1], n, random, gap);
            test_fetch(f, shift, random);
            for (const bool rows : {false, true}) {
              test_tokens(f, rows, shift, random);
              test_planes(f, rows, shift);
            }
          }
        }
      }
    }
  }
}

// Work for more blocks than a launch may have.
void test_many_blocks(std::mt19937& random) {
  using Element = std::uint16_t;
  const Index limit = kvp::cuda::kMaxBlocks * kvp::cuda::kThreads;
  Fixture<Element> f(Order::kShuffled, 16, 64, 0, random);
  f.n = limit / 64 + 5;
  for (Index i = 0; i < f.n; ++i) {
    f.pages.push_back(random() % static_cast<unsigned>(f.num_pages));
    f.slots.push_back(random() % static_cast<unsigned>(f.block_size));
  }
  std::vector<Element> keys(f.n * 64), values(f.n * 64), k = keys, v = values;
  kvp::gather_tokens(f.source(f.heap.data()), f.tokens(), keys.data(), values.data());
  kvp::cuda::gather_tokens(device_source(f, f.heap.data(), false), f.tokens(), k.data(),
                           v.data(), nullptr);
  CHECK(k == keys && v == values);
}

// Every index of every kernel out of range, below and above.
void test_traps(std::mt19937& random) {
  using Element = std::uint32_t;
  for (const bool rows : {false, true}) {
    const Fixture<Element> f(Order::kNatural, 4, 8, 3, random, 0);
    std::vector<Element> data(f.n * f.head_dim);
    for (const Index wrong : {Index{-1}, f.num_pages, f.block_size}) {
      for (int which = 0; which < 2; ++which) {
        if (which == 0 && wrong == f.block_size) continue;  // a page that exists
        if (which == 1 && wrong == f.num_pages) continue;
        Indices pages = f.pages, slots = f.slots;
        (which == 0 ? pages : slots)[f.n + 1] = wrong;
        const auto tokens = [&](Index first) {
          return kvp::TokenSlots{pages.data() + first, slots.data() + first, f.n};
        };
        const auto move = [&](Index from, Index to) {
          Fixture<Element> g = f;
          kvp::cuda::move_tokens(device_pages(g, g.heap.data(), rows), tokens(from),
                                 tokens(to), nullptr);
        };
        const auto gather = [&](Index from) {
          kvp::cuda::gather_tokens(device_source(f, f.heap.data(), rows), tokens(from),
                                   data.data(), data.data(), nullptr);
        };
        const auto scatter = [&](Index to) {
          Fixture<Element> g = f;
          kvp::cuda::scatter_tokens(device_pages(g, g.heap.data(), rows), tokens(to),
                                    data.data(), data.data(), nullptr);
        };
        CHECK(traps([&] { move(0, f.n); }));
        CHECK(traps([&] { move(f.n, 0); }));
        CHECK(traps([&] { gather(f.n); }));
        CHECK(traps([&] { scatter(f.n); }));
      }
    }
    const Indices table = {0, f.num_pages};
    std::vector<Element> out(2 * f.layout.plane_elems());
    CHECK(traps([&] {
      kvp::cuda::gather_plane(device_source(f, f.heap.data(), rows),
                              device_plane(f.layout.keys, rows), {table.data(), 1, 2},
                              out.data(), nullptr);
    }));
  }
}

// Work for more blocks than a launch may have, on both paths.
void test_many_fetched(std::mt19937& random) {
  const Index limit = kvp::cuda::kMaxBlocks * kvp::cuda::kThreads;
  Fixture<std::uint16_t> f(Order::kInterleaved, 16, 8, 0, random, 16);
  f.num_pages = 2 * limit / 16;
  f.heap = random_elements<std::uint16_t>(f.num_pages * f.stride, random);
  f.n = limit + 5;  // tokens of one 16-byte chunk
  for (Index i = 0; i < f.n; ++i) {
    f.pages.push_back(i / 16);
    f.slots.push_back(i % 16);
  }
  test_fetch(f, 0, random);
}

// Every index out of range, below and above.
void test_fetch_traps(std::mt19937& random) {
  using Element = std::uint32_t;
  for (const bool named : {false, true}) {
    const Fixture<Element> f(Order::kNatural, 4, 8, 3, random, 0);
    const Host<Element> host(f.n, f.head_dim, 0, random);
    const Indices lists[] = {f.pages, f.slots, host.keys, host.values};
    const Index limits[] = {f.num_pages, f.block_size, kRows, kRows};
    const auto fetch = [&](const Indices(&ids)[4]) {
      std::vector<Element> heap = f.heap;
      kvp::cuda::fetch_tokens(
          device_pages(f, heap.data(), named), {ids[0].data(), ids[1].data(), f.n},
          {host.data, kRows, ids[2].data(), ids[3].data()}, nullptr);
    };
    CHECK(!traps([&] { fetch(lists); }));
    for (int which = 0; which < 4; ++which) {
      for (const Index wrong : {Index{-1}, limits[which]}) {
        Indices ids[4] = {lists[0], lists[1], lists[2], lists[3]};
        ids[which][1] = wrong;
        CHECK(traps([&] { fetch(ids); }));
      }
    }
  }
}

}  // namespace

int main() {
  const unsigned seed = 20251;
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  current_case = "32-bit elements";
  test_copies<std::uint32_t>(random);
  current_case = "16-bit elements";
  if (!kFewThreads) test_copies<std::uint16_t>(random);
  current_case = "many blocks";
  if (!kFewThreads) test_many_blocks(random);
  if (!kFewThreads) test_many_fetched(random);
  current_case = "traps";
  if (!kFewThreads) test_traps(random);
  if (!kFewThreads) test_fetch_traps(random);
  return report();
}
