// Tests of the DCI-tree and the exact scan (kvp/index_forest.hpp and below), for
// every set of kernels that this CPU runs.
#include "index_fixtures.hpp"

namespace kvp::index {

// Damages a tree in one place at a time.
struct TreeBreaker {
  DciTree& tree;
  Level& nodes() { return tree.levels_.front(); }
  Chunks& pages() { return tree.levels_.front().chunks; }
  std::int32_t& place(std::int64_t slot) { return tree.place_[slot]; }
  float& norm() { return tree.c2_; }
};

}  // namespace kvp::index

namespace {

using namespace index_test;

void test_exact(const Kernels& kernels, std::mt19937& random) {
  current_case = "exact without a limit";
  for (Index n : {0, 1, 2, 31, 33, 700}) {
    for (Index dims : {5, 64}) {
      for (Index page_size : {1, 16, 33}) {
        std::vector<float> keys = clustered(n, dims, random);
        // Duplicates cause ties; half of them are far apart.
        for (Index i = n / 2; i + 3 < n; i += 7) {
          std::copy_n(keys.data() + (i % 11) * dims, dims, keys.data() + i * dims);
        }
        const KeyView view = dense(keys, dims);
        const Settings settings = settings_for(dims, page_size);
        Forest<DciTree> tree(settings, 1, kernels);
        Forest<BruteForce> scan(settings, 1, kernels);
        CHECK(tree.append({view}, n).head == -1);
        CHECK(scan.append({view}, n).head == -1);
        CHECK(tree.integrity({view}, false) == "");
        for (Index k : {1, 10, 1000}) {
          const std::vector<float> query = clustered(1, dims, random);
          CHECK(same(search(tree.tree(0), view, false, query.data(), k),
                     search(scan.tree(0), view, false, query.data(), k)));
        }
        const std::vector<float> zeros(dims);
        const auto ties = search(tree.tree(0), view, false, zeros.data(), 5);
        for (std::size_t i = 0; i < ties.size(); ++i) {
          CHECK(ties[i].slot == static_cast<std::int32_t>(i));
        }
      }
    }
  }
}

void test_layouts(const Kernels& kernels, std::mt19937& random) {
  const Index n = 300, dims = 40;
  const std::vector<float> keys = clustered(n, dims, random);
  const std::vector<float> query = clustered(1, dims, random);
  for (bool bf16 : {false, true}) {
    const std::vector<float> rounded = bf16 ? round_all(keys) : keys;
    Forest<DciTree> plain(settings_for(dims, 16), 1, kernels);
    const KeyView view = dense(rounded, dims);
    plain.append({view}, n);
    const auto expected = search(plain.tree(0), view, false, query.data(), 20);
    for (bool transposed : {false, true}) {
      current_case = transposed ? "transposed pages" : "pages";
      const Paged paged(keys, dims, transposed, bf16, random);
      Forest<DciTree> tree(settings_for(dims, 16), 1, kernels);
      Forest<BruteForce> scan(settings_for(dims, 16), 1, kernels);
      CHECK(tree.append({paged.view}, n).head == -1);
      scan.append({paged.view}, n);
      CHECK(tree.integrity({paged.view}, false) == "");
      CHECK(same(search(tree.tree(0), paged.view, false, query.data(), 20), expected));
      CHECK(same(search(scan.tree(0), paged.view, false, query.data(), 20), expected));
    }
    current_case = "keys in the places that the tree gave them";
    const DciTree& tree = plain.tree(0);
    std::vector<float> placed(tree.num_pages() * 16 * dims, 1e30f);
    for (Index slot = 0; slot < n; ++slot) {
      std::copy_n(rounded.data() + slot * dims, dims,
                  placed.data() + tree.place(slot) * dims);
    }
    const KeyView by_page = dense(placed, dims);
    CHECK(plain.integrity({by_page}, true) == "");
    CHECK(same(search(tree, by_page, true, query.data(), 20), expected));
    const auto few = search(tree, view, false, query.data(), 20, {90, 0.7});
    CHECK(same(search(tree, by_page, true, query.data(), 20, {90, 0.7}), few));
  }
}

// Inserts with norms that keep growing: lifts, parents and order must hold.
void test_inserts(const Kernels& kernels, std::mt19937& random) {
  current_case = "inserts";
  const Index dims = 24, n = 1200;
  std::vector<float> keys = clustered(n, dims, random);
  for (Index i = 0; i < n; ++i) {
    const float scale = 1.0f + 2.0f * float(i) / float(n);
    for (Index d = 0; d < dims; ++d) keys[i * dims + d] *= scale;
  }
  const KeyView view = dense(keys, dims);
  Forest<DciTree> tree(settings_for(dims, 8, 0.2), 1, kernels);
  Forest<BruteForce> scan(settings_for(dims, 8), 1, kernels);
  std::vector<Index> placed;
  for (Index done = 0; done < n;) {
    const Index count = std::min<Index>(1 + random() % 40, n - done);
    CHECK(tree.append({after(view, done)}, count).head == -1);
    scan.append({after(view, done)}, count);
    done += count;
    CHECK(tree.num_keys() == done);
    if (random() % 8 == 0 || done == n) CHECK(tree.integrity({view}, false) == "");
    for (std::size_t i = 0; i < placed.size(); ++i) {
      CHECK(tree.tree(0).place(i) == placed[i]);  // keys never move
    }
    while (static_cast<Index>(placed.size()) < done) {
      placed.push_back(tree.tree(0).place(placed.size()));
    }
    const std::vector<float> query = clustered(1, dims, random);
    CHECK(same(search(tree.tree(0), view, false, query.data(), 9),
               search(scan.tree(0), view, false, query.data(), 9)));
  }
}

void test_limits(const Kernels& kernels, std::mt19937& random) {
  current_case = "limited visits";
  const Index dims = 32, n = 4000;
  const std::vector<float> keys = clustered(n, dims, random);
  const KeyView view = dense(keys, dims);
  // A high ratio and few visits: the search descends through the upper levels.
  Forest<DciTree> tree(settings_for(dims, 16, 0.25), 1, kernels);
  Forest<BruteForce> scan(settings_for(dims, 16), 1, kernels);
  tree.append({view}, n);
  scan.append({view}, n);
  CHECK(tree.tree(0).num_levels() > 4);
  double found = 0, found_by_bound = 0;
  for (int round = 0; round < 50; ++round) {
    const float* query = keys.data() + (random() % n) * dims;
    const auto best = search(scan.tree(0), view, false, query, 10);
    const auto hits = [&](QueryOptions options) {
      double count = 0;
      for (const Scored& a : search(tree.tree(0), view, false, query, 10, options)) {
        for (const Scored& b : best) count += a.slot == b.slot;
      }
      return count;
    };
    found += hits({400, 1.0});
    found_by_bound += hits({400, 0.8});
  }
  CHECK(found >= 0.9 * 500);
  CHECK(found_by_bound >= 0.6 * 500);
}

void test_refusals(const Kernels& kernels, std::mt19937& random) {
  current_case = "keys that cannot be indexed";
  const Index dims = 12, n = 50;
  std::vector<float> keys = clustered(n, dims, random);
  const KeyView view = dense(keys, dims);
  Forest<DciTree> tree(settings_for(dims, 16), 2, kernels);
  tree.append({view, view}, 20);
  const Index bytes = tree.memory_bytes();
  for (float bad : {NAN, INFINITY, -INFINITY, 1e19f}) {
    std::vector<float> spoiled = keys;
    spoiled[27 * dims + 3] = bad;
    const KeyView spoiled_view = dense(spoiled, dims);
    const BadKey found = tree.append({after(view, 20), after(spoiled_view, 20)}, 30);
    CHECK(found.head == 1 && found.slot == 7);
    CHECK(tree.num_keys() == 20 && tree.memory_bytes() == bytes);
    CHECK(tree.integrity({view, view}, false) == "");
  }
  CHECK(tree.append({after(view, 20), after(view, 20)}, 30).head == -1);
  CHECK(tree.integrity({view, view}, false) == "");
}

void test_the_check_sees_damage(const Kernels& kernels, std::mt19937& random) {
  const Index dims = 16, n = 600;
  std::vector<float> keys = clustered(n, dims, random);
  const KeyView view = dense(keys, dims);
  Arena arena;
  DciTree tree(arena, settings_for(dims, 16), kernels, 0);
  std::int64_t bad = 0;
  CHECK(tree.append(view, n, &bad));
  TreeBreaker breaker{tree};
  const auto sees = [&](const char* what, auto& value, auto wrong) {
    current_case = what;
    const auto right = value;
    CHECK(tree.integrity(view, false) == "");
    value = wrong;
    CHECK(tree.integrity(view, false) != "");
    value = right;
  };
  Chunks& pages = breaker.pages();
  Level& nodes = breaker.nodes();
  sees("a key twice", pages.child[1], pages.child[0]);
  sees("a key lost", pages.count[0], pages.count[0] - 1);
  sees("a page too full", pages.count[0], 17);
  sees("a stale place", breaker.place(5), breaker.place(6));
  sees("a strange owner", pages.owner[0], pages.owner[0] + 1);
  sees("a cut chain", nodes.first[nodes.size() - 1], -1);
  sees("a miscounted node", nodes.num_children[0], nodes.num_children[0] + 1);
  sees("another key promoted", nodes.key[1], nodes.key[1] + 1);
  sees("a wrong copy", nodes.rows[0], nodes.rows[0] + 1.0f);
  sees("a wrong norm", breaker.norm(), breaker.norm() * 2.0f);
  sees("a wrong projection", pages.raw[0], pages.raw[0] + 0.01f);
  sees("a stale lift", pages.lift[0], pages.lift[0] + 0.01f);
  sees("a wrong mean", nodes.mean[0], nodes.mean[0] + 0.1f);
  sees("another key", keys[7], keys[7] + 0.5f);
  // Exchanges two keys of different nodes: all counts still hold.
  current_case = "a parent that is not the nearest";
  std::int32_t page = 1;
  while (pages.owner[page] == pages.owner[0]) ++page;
  const auto exchange = [&] {
    std::int32_t &a = pages.child[0], &b = pages.child[page * 16];
    std::swap(breaker.place(a), breaker.place(b));
    std::swap(a, b);
  };
  exchange();
  // Norms are checked before parents, so they must be consistent.
  CHECK(tree.integrity(view, false).find("parent") != std::string::npos);
  exchange();
  CHECK(tree.integrity(view, false) == "");
}

void test_determinism(const Kernels& kernels, std::mt19937& random) {
  current_case = "determinism";
  const Index dims = 16, n = 500;
  const std::vector<float> keys = clustered(n, dims, random);
  const KeyView view = dense(keys, dims);
  Settings settings = settings_for(dims, 16);
  Forest<DciTree> one(settings, 1, kernels), two(settings, 1, kernels);
  settings.seed += 1;
  Forest<DciTree> other(settings, 1, kernels);
  for (Forest<DciTree>* tree : {&one, &two, &other}) tree->append({view}, n);
  Index equal = 0, equal_other = 0;
  for (Index slot = 0; slot < n; ++slot) {
    equal += one.tree(0).place(slot) == two.tree(0).place(slot);
    equal_other += one.tree(0).place(slot) == other.tree(0).place(slot);
  }
  CHECK(equal == n);
  CHECK(equal_other < n / 2);
}

void test_pages(const Kernels& kernels, std::mt19937& random) {
  current_case = "pages";
  const Index dims = 8, n = 200;
  const std::vector<float> keys = clustered(n, dims, random);
  Forest<DciTree> forest(settings_for(dims, 8), 1, kernels);
  forest.append({dense(keys, dims)}, n);
  const DciTree& tree = forest.tree(0);
  const std::vector<std::vector<Scored>> best{{{3, 5}, {2, 90}, {1, 6}}, {{9, 90}}};
  std::vector<Index> expected;
  for (Index slot : {5, 90, 90, 6}) {
    const Index page = tree.place(slot) / 8;
    if (std::find(expected.begin(), expected.end(), page) == expected.end()) {
      expected.push_back(page);
    }
  }
  std::vector<Index> pages(4, -1);
  const Index count = pages_of(tree, Index{8}, best, Index{4}, pages.data());
  pages.resize(static_cast<std::size_t>(count));
  CHECK(pages == expected);
  CHECK(pages_of(tree, Index{8}, best, Index{1}, pages.data()) == 1);
}

}  // namespace

int main() {
  std::mt19937 random(kSeed);
  for (const Kernels* kernels : kvp::runnable_kernels<Kernels>()) {
    std::printf("%s\n", kvp::name_of(kernels->simd));
    test_exact(*kernels, random);
    test_layouts(*kernels, random);
    test_inserts(*kernels, random);
    test_limits(*kernels, random);
    test_refusals(*kernels, random);
    test_the_check_sees_damage(*kernels, random);
    test_determinism(*kernels, random);
    test_pages(*kernels, random);
  }
  return report();
}
