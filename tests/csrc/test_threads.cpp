// Tests of the key index with several threads: building trees of different heads in one
// arena, querying one tree, querying during an append. Results must equal those of one
// thread.
//
// Uses std::thread so that it runs under ThreadSanitizer (scripts/check_sanitizers.sh):
// TSan does not see the locks and barriers of the OpenMP runtime.
#include <atomic>
#include <deque>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "index_fixtures.hpp"

namespace {

using namespace index_test;

constexpr Index kDims = 24, kPageSize = 16, kBest = 10;
const QueryOptions kAll{}, kLimited{150, 1.0}, kByBound{150, 0.7};

// Runs body(0), ..., body(n - 1), each in its own thread; all begin together.
// Bodies do not CHECK, which counts failures without a lock.
template <typename Body>
void in_threads(Index n, const Body& body) {
  std::atomic<Index> missing{n};
  std::vector<std::thread> threads;
  for (Index i = 0; i < n; ++i) {
    threads.emplace_back([&, i] {
      --missing;
      while (missing.load() > 0) std::this_thread::yield();
      body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

using Answers = std::vector<std::vector<Scored>>;

// The results of a tree for every query, with every kind of limit.
Answers ask(const DciTree& tree, const KeyView& keys,
            const std::vector<float>& queries) {
  Answers answers;
  for (std::size_t at = 0; at < queries.size(); at += kDims) {
    for (const QueryOptions& options : {kAll, kLimited, kByBound}) {
      answers.push_back(search(tree, keys, false, queries.data() + at, kBest, options));
    }
  }
  return answers;
}

bool same_answers(const Answers& a, const Answers& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

// The trees of some heads in one arena, as in a Forest.
struct Heads {
  Arena arena;
  std::deque<DciTree> trees;

  Heads(Index n, const Kernels& kernels) {
    const Settings settings = settings_for(kDims, kPageSize);
    for (Index head = 0; head < n; ++head) {
      trees.emplace_back(arena, settings, kernels, head);
    }
  }

  // Adds keys in batches of odd sizes; false if one was refused.
  bool build(Index head, const KeyView& keys) {
    bool good = true;
    std::int64_t bad = 0;
    for (Index done = 0; done < keys.num_places;) {
      const Index count = std::min<Index>(37, keys.num_places - done);
      good = trees[head].append(after(keys, done), count, &bad) && good;
      done += count;
    }
    return good;
  }
};

void test_building_heads(const Kernels& kernels, std::mt19937& random) {
  current_case = "heads built at once";
  const Index heads = 6, n = 400;
  std::vector<std::vector<float>> keys;
  for (Index head = 0; head < heads; ++head) {
    keys.push_back(clustered(n, kDims, random));
  }
  const std::vector<float> queries = clustered(4, kDims, random);
  Heads alone(heads, kernels), together(heads, kernels);
  for (Index head = 0; head < heads; ++head) {
    CHECK(alone.build(head, dense(keys[head], kDims)));
  }
  // Another thread reads the memory size, as a metric does.
  std::vector<char> built(heads + 1);
  in_threads(heads + 1, [&](Index i) {
    if (i < heads) {
      built[i] = together.build(i, dense(keys[i], kDims));
      return;
    }
    Index last = 0;
    built[i] = true;
    for (int look = 0; look < 200; ++look) {
      const Index bytes = together.arena.bytes();
      built[i] = built[i] && bytes >= last;
      last = bytes;
      std::this_thread::yield();
    }
  });
  for (Index head = 0; head <= heads; ++head) CHECK(built[head]);
  for (Index head = 0; head < heads; ++head) {
    const KeyView view = dense(keys[head], kDims);
    const DciTree &a = alone.trees[head], &b = together.trees[head];
    CHECK(b.integrity(view, false) == "");
    CHECK(b.num_keys() == n && b.num_pages() == a.num_pages());
    Index equal = 0;
    for (Index slot = 0; slot < n; ++slot) equal += a.place(slot) == b.place(slot);
    CHECK(equal == n);
    CHECK(same_answers(ask(a, view, queries), ask(b, view, queries)));
  }
}

void test_querying_one_tree(const Kernels& kernels, std::mt19937& random) {
  current_case = "queries at once";
  const Index threads = 8, n = 800;
  const std::vector<float> keys = clustered(n, kDims, random);
  const std::vector<float> queries = clustered(6, kDims, random);
  const KeyView view = dense(keys, kDims);
  Heads index(1, kernels);
  CHECK(index.build(0, view));
  const DciTree& tree = index.trees.front();
  const Answers expected = ask(tree, view, queries);
  std::vector<char> right(threads);
  in_threads(threads, [&](Index i) {
    right[i] = same_answers(ask(tree, view, queries), expected);
  });
  for (Index i = 0; i < threads; ++i) CHECK(right[i]);
}

// The lock of csrc/index_registry.hpp: shared for queries, unique for additions.
void test_querying_beside_additions(const Kernels& kernels, std::mt19937& random) {
  current_case = "queries beside additions";
  const Index readers = 3, steps = 16, step = 25;
  const std::vector<float> keys = clustered(steps * step, kDims, random);
  const std::vector<float> queries = clustered(2, kDims, random);
  const KeyView view = dense(keys, kDims);
  std::int64_t bad = 0;
  // The results of one thread after each append.
  Heads alone(1, kernels), shared(1, kernels);
  std::vector<Answers> expected;
  for (Index s = 0; s < steps; ++s) {
    CHECK(alone.trees.front().append(after(view, s * step), step, &bad));
    expected.push_back(ask(alone.trees.front(), view, queries));
  }

  DciTree& tree = shared.trees.front();
  CHECK(tree.append(view, step, &bad));
  std::shared_mutex mutex;
  // Relaxed: only the mutex may order memory accesses. Readers pause while the writer
  // waits for the lock, because they could starve it. The writer waits for a result, so
  // that every size is queried.
  std::atomic<bool> wanted{false}, finished{false};
  std::atomic<Index> answered{0};
  constexpr auto kRelaxed = std::memory_order_relaxed;
  std::vector<char> right(readers + 1, 1);
  in_threads(readers + 1, [&](Index i) {
    if (i == readers) {
      for (Index s = 1; s < steps; ++s) {
        const Index before = answered.load(kRelaxed);
        while (answered.load(kRelaxed) == before) std::this_thread::yield();
        wanted.store(true, kRelaxed);
        const std::unique_lock<std::shared_mutex> lock(mutex);
        wanted.store(false, kRelaxed);
        std::int64_t unused = 0;
        right[i] &= tree.append(after(view, s * step), step, &unused);
      }
      finished.store(true, kRelaxed);
      return;
    }
    for (bool last = false; !last;) {
      last = finished.load(kRelaxed);
      while (wanted.load(kRelaxed)) std::this_thread::yield();
      const std::shared_lock<std::shared_mutex> lock(mutex);
      const auto s = static_cast<std::size_t>(tree.num_keys() / step - 1);
      right[i] &= same_answers(ask(tree, view, queries), expected[s]);
      answered.fetch_add(1, kRelaxed);
    }
  });
  for (Index i = 0; i <= readers; ++i) CHECK(right[i]);
  CHECK(tree.integrity(view, false) == "");
  CHECK(same_answers(ask(tree, view, queries), expected.back()));
}

}  // namespace

int main() {
  std::mt19937 random(kSeed);
  for (const Kernels* kernels : kvp::runnable_kernels<Kernels>()) {
    std::printf("%s\n", kvp::name_of(kernels->simd));
    test_building_heads(*kernels, random);
    test_querying_one_tree(*kernels, random);
    test_querying_beside_additions(*kernels, random);
  }
  return report();
}
