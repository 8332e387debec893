// Tests of for_all: short loops have one thread and long ones several, with equal results.
// The test runs with OMP_NUM_THREADS=2 or more (tests/unit/test_csrc.py); without OpenMP
// all loops are serial.
#include "kvp/for_all.hpp"

#include <atomic>
#include <memory>
#include <stdexcept>

#include "index_fixtures.hpp"
#include "kvp/code_index.hpp"
#include "kvp/index_forest.hpp"
#include "kvp/votes.hpp"
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

using namespace index_test;
using kvp::for_all;
using kvp::FreeCores;
using kvp::Work;
using kvp::index::BruteForce;
using kvp::index::CodeIndex;
using kvp::index::VoteScratch;

int team() {
#if defined(_OPENMP)
  return omp_get_num_threads();
#else
  return 1;
#endif
}
int largest_team() {
#if defined(_OPENMP)
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// The threads of the region that a loop's bodies ran in.
int team_of(Index n, const Work& work) {
  std::atomic<int> threads{0};
  for_all(n, work, [&](Index) { threads = team(); });
  return threads;
}

void test_threads_follow_the_work() {
  current_case = "threads";
  const Index many = 8;
  CHECK(team_of(many, Work{0, 1}) == 1);
  CHECK(team_of(many, Work{1, 1}) == largest_team());
  for (const auto& kind : {&Work::products, &Work::bytes, &Work::nanoseconds}) {
    const Index limit = kind(0).shared_from;
    CHECK(limit > 0);
    CHECK(team_of(many, kind(limit - 1)) == 1);
    CHECK(team_of(many, kind(limit)) == largest_team());
    CHECK(team_of(1, kind(limit)) == 1);  // one body needs no second thread
    CHECK(team_of(0, kind(limit)) == 0);  // runs nothing
  }
}

// The threads of a loop of `work_ns` that observes the cores.
int team_of(Index n, std::int64_t work_ns, FreeCores& cores) {
  std::atomic<int> threads{0};
  for_all(n, work_ns, cores, [&](Index) { threads = team(); });
  return threads;
}

void test_short_loops_have_threads_while_cores_are_free() {
  current_case = "free cores";
  const std::int64_t now = FreeCores::now_ns(), wait = FreeCores::kWaitNs;
  FreeCores cores;
  CHECK(team_of(8, kvp::kParallelNsIfFree - 1, cores) == 1);
  CHECK(team_of(8, kvp::kParallelNsIfFree, cores) == largest_team());
  CHECK(team_of(1, kvp::kParallelNsIfFree, cores) == 1);
  cores.observe(1000, now, now + 1000 + wait + 1);
  CHECK(team_of(8, kvp::kParallelNs - 1, cores) == 1);
  CHECK(team_of(8, kvp::kParallelNs, cores) == largest_team());
}

void test_pauses_grow_while_a_core_is_busy() {
  current_case = "pauses";
  const std::int64_t first = FreeCores::kFirstPauseNs;
  const std::int64_t longest = FreeCores::kLongestPauseNs,
                     slow = FreeCores::kWaitNs + 1;
  FreeCores cores;
  std::int64_t now = 1'000'000'000, pause = first;
  cores.observe(500, now, now + 500 + FreeCores::kWaitNs);  // within the tolerance
  CHECK(cores.expected(now));
  for (int round = 0; round < 8; ++round) {
    cores.observe(0, now, now + slow);
    now += slow;
    CHECK(!cores.expected(now + pause - 1));
    CHECK(cores.expected(now + pause));
    now += pause;
    pause = std::min(2 * pause, longest);
  }
  CHECK(pause == longest);
  // A loop that did not wait shortens the next pause once the cores were free for long.
  cores.observe(0, now + 1, now + 2);
  cores.observe(0, now + 2, now + 2 + slow);
  CHECK(!cores.expected(now + 2 + slow + longest - 1));
  now += 2 + slow + longest;
  cores.observe(0, now + longest, now + longest + 1);
  now += longest + 1;
  cores.observe(0, now, now + slow);
  CHECK(cores.expected(now + slow + first));
}

void test_exceptions() {
  current_case = "exceptions";
  for (const Work work : {Work{0, 1}, Work{1, 1}}) {
    bool caught = false;
    try {
      for_all(100, work, [](Index i) {
        if (i % 7 == 3) throw std::runtime_error("odd");
      });
    } catch (const std::runtime_error& error) {
      caught = std::string(error.what()) == "odd";
    }
    CHECK(caught);
  }
}

// What each head's queries vote for.
template <typename Tree>
std::vector<Index> votes_of(const std::vector<std::unique_ptr<Tree>>& trees,
                            const std::vector<KeyView>& views,
                            const std::vector<std::vector<float>>& queries, Index dims,
                            Index group, const QueryOptions& options,
                            const Work& work) {
  std::vector<Index> chosen(trees.size() * static_cast<std::size_t>(options.count));
  for_all(static_cast<Index>(trees.size()), work, [&](Index head) {
    const auto at = static_cast<std::size_t>(head);
    static thread_local VoteScratch scratch;
    vote(*trees[at], views[at], false, queries[at].data(), group, dims, 0.2f, options,
         scratch);
    scratch.votes.best(options.count, chosen.data() + head * options.count);
  });
  return chosen;
}

// Index::query_ns grows with the work, so that few keys are searched by one thread and many
// by all; both find the same keys.
template <typename Tree>
void test_search(const char* name, Index keys_below, Index keys_above, Index heads,
                 std::mt19937& random) {
  current_case = name;
  const Index dims = 32, group = 3;
  const QueryOptions options{512, 1.0, 64};
  for (const Index n : {keys_below, keys_above}) {
    Arena arena;
    Settings settings = settings_for(dims, 16);
    std::vector<std::vector<float>> keys, queries;
    std::vector<KeyView> views;
    std::vector<std::unique_ptr<Tree>> trees;
    for (Index head = 0; head < heads; ++head) {
      keys.push_back(clustered(n, dims, random));
      queries.push_back(clustered(group, dims, random));
    }
    for (Index head = 0; head < heads; ++head) {
      const auto at = static_cast<std::size_t>(head);
      views.push_back(dense(keys[at], dims));
      trees.push_back(std::make_unique<Tree>(arena, settings,
                                             kvp::select_kernels<Kernels>(), head));
      std::int64_t bad = 0;
      CHECK(trees.back()->append(views.back(), n, &bad));
    }
    const Work work =
        Work::nanoseconds(heads * group * trees.front()->query_ns(options));
    CHECK(work.parallel() == (n == keys_above));
    const auto votes = [&](const Work& as) {
      return votes_of(trees, views, queries, dims, group, options, as);
    };
    const std::vector<Index> alone = votes({0, 1});
    CHECK(votes(work) == alone);
    for (int round = 0; round < 3; ++round) CHECK(votes({1, 1}) == alone);
  }
}

}  // namespace

int main() {
  std::mt19937 random(kSeed);
  test_threads_follow_the_work();
  test_short_loops_have_threads_while_cores_are_free();
  test_pauses_grow_while_a_core_is_busy();
  test_exceptions();
  test_search<CodeIndex>("codes", 300, 3000, 17, random);
  test_search<BruteForce>("scan", 300, 3000, 17, random);
  test_search<DciTree>("tree", 100, 1000, 10, random);

  return report();
}
