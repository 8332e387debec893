// Votes and hot slots against plain loops.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "kvp/bucket_sort.hpp"
#include "kvp/hot_set.hpp"
#include "kvp/votes.hpp"

namespace {

using kvp::index::Scored;
using kvp::index::Votes;

std::size_t u(std::int64_t index) { return static_cast<std::size_t>(index); }

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

void test_sorting(std::mt19937& random) {
  std::vector<std::uint64_t> room;
  for (const std::size_t n : {0u, 1u, 31u, 32u, 300u, 5000u}) {
    // Of all sizes; near each other but for one; the bits of votes, whose lower half is a slot.
    for (const int kind : {0, 1, 2}) {
      std::vector<std::uint64_t> values(n);
      for (std::size_t i = 0; i < n; ++i) {
        const std::uint64_t low = random(), high = random();
        const auto vote = static_cast<float>(low % 1000) / 1000.0f;
        values[i] = kind == 0   ? high << 32 | low
                    : kind == 1 ? low % 64
                                : std::uint64_t{kvp::index::bits_of(vote)} << 32 | i;
      }
      if (kind == 1 && n > 0) values[n / 2] = ~std::uint64_t{0};
      std::vector<std::uint64_t> expected = values;
      std::sort(expected.begin(), expected.end(), std::greater<>());
      kvp::index::sort_largest_first(values, room);
      require(values == expected, "numbers are sorted, largest first");
    }
  }
}

void test_exponential() {
  double worst = 0.0;
  for (double x = -60.0; x <= 0.0; x += 1e-4) {
    const auto f = static_cast<float>(x);
    const double right = std::exp(static_cast<double>(f));
    worst = std::max(worst, std::abs(kvp::index::exp_of_logit(f) / right - 1.0));
  }
  require(worst < 5e-6, "exp_of_logit is within 5e-6");
  require(kvp::index::exp_of_logit(0.0f) == 1.0f, "exp(0) is 1");
  require(kvp::index::exp_of_logit(-1e30f) > 0.0f, "no vote is zero");
}

void test_kernels(const kvp::index::VoteKernels& kernels, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, 20.0f);
  for (const std::int64_t n : {1, 3, 4, 7, 8, 9, 16, 31, 250}) {
    std::vector<float> logits(u(n));
    for (float& x : logits) x = normal(random);
    const float peak = *std::max_element(logits.begin(), logits.end());
    std::vector<float> values = logits;
    const float sum = kernels.exponentials(values.data(), n, 0.5f, peak);
    double expected = 0.0;
    for (std::int64_t i = 0; i < n; ++i) {
      const double right =
          std::exp(std::max(0.5 * (static_cast<double>(logits[u(i)]) - peak), -60.0));
      expected += right;
      require(std::abs(values[u(i)] - right) <= 1e-5 * right, "exponentials are right");
    }
    require(std::abs(sum - expected) <= 1e-5 * expected, "their sum is right");
  }
}

// Votes of random queries over random keys; the best in a stable order.
void test_votes(std::mt19937& random) {
  Votes votes;
  for (int round = 0; round < 200; ++round) {
    const int n = 1 + static_cast<int>(random() % 700);
    const int group = 1 + static_cast<int>(random() % 4);
    std::vector<double> worth(u(n), 0.0);
    std::vector<bool> seen(u(n), false);
    votes.begin(n);
    std::normal_distribution<float> normal(0.0f, 6.0f);
    for (int g = 0; g < group; ++g) {
      std::vector<int> slots(u(n));
      std::iota(slots.begin(), slots.end(), 0);
      std::shuffle(slots.begin(), slots.end(), random);
      const bool all = round % 3 == 0;
      slots.resize(all ? slots.size() : 1 + random() % slots.size());
      std::vector<Scored> scored;
      for (const int slot : slots) scored.push_back({normal(random), slot});
      double peak = -1e30, sum = 0.0;
      for (const Scored& s : scored) peak = std::max<double>(peak, s.score);
      for (const Scored& s : scored) sum += std::exp(0.5 * (s.score - peak));
      for (const Scored& s : scored) {
        const auto at = u(s.slot);
        worth[at] += std::exp(std::max(0.5 * (s.score - peak), -60.0)) / sum;
        seen[at] = true;
      }
      if (all) {
        std::vector<float> dense(u(n));
        for (const Scored& s : scored) dense[u(s.slot)] = s.score;
        votes.add_all(dense.data(), n, 0.5f);
      } else {
        votes.add(scored, 0.5f);
      }
    }
    const auto with_votes = std::count(seen.begin(), seen.end(), true);
    const int count = 1 + static_cast<int>(random() % (n + 20));
    std::vector<std::int64_t> best(u(count));
    const std::int64_t found = votes.best(count, best.data());
    require(found == std::min<std::int64_t>(count, with_votes), "as many as there are");
    std::vector<double> right;
    for (int i = 0; i < n; ++i) {
      if (seen[u(i)]) right.push_back(worth[u(i)]);
    }
    std::sort(right.rbegin(), right.rend());
    std::set<std::int64_t> distinct;
    for (std::int64_t i = 0; i < found; ++i) {
      const auto at = u(best[static_cast<std::size_t>(i)]);
      require(seen[at], "only keys with a vote");
      distinct.insert(best[u(i)]);
      const double ours = worth[at], theirs = right[u(i)];
      require(std::abs(ours - theirs) <= 1e-5 * theirs, "best first");
    }
    require(static_cast<std::int64_t>(distinct.size()) == found, "each once");
    for (std::int64_t i = found; i < count; ++i) {
      require(best[u(i)] == -1, "-1 behind the last");
    }
  }
  votes.begin(9);
  float same[9] = {};
  votes.add_all(same, 9, 1.0f);
  std::int64_t first[4];
  votes.best(4, first);
  for (int i = 0; i < 4; ++i) require(first[i] == i, "ties to the lower slot");
}

// One head: wanted tokens are hot afterwards, and every slot holds its token.
void test_hot_slots(std::mt19937& random) {
  constexpr std::int64_t kDim = 4, kBlock = 8, kPages = 6, kHostPage = 4, kTokens = 60;
  std::vector<std::int32_t> k(kBlock * kDim), v(kBlock * kDim);
  for (std::int64_t s = 0; s < kBlock; ++s) {
    for (std::int64_t d = 0; d < kDim; ++d) {
      const std::int64_t natural = s * kDim + d, transposed = d * kBlock + s;
      k[u(natural)] = static_cast<std::int32_t>(transposed);
      v[u(natural)] = static_cast<std::int32_t>(kBlock * kDim + natural);
    }
  }
  const kvp::PageLayout layout = kvp::make_layout(k.data(), v.data(), kBlock, kDim);
  std::vector<std::int64_t> table(kTokens / kHostPage);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  std::vector<std::uint32_t> host(kTokens * 2 * kDim);
  const kvp::HostTokens<std::uint32_t> tokens{host.data(), table.data(), kHostPage,
                                              kDim};
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t d = 0; d < kDim; ++d) {
      host[u(tokens.key(t) - host.data() + d)] =
          static_cast<std::uint32_t>(100 * t + d);
      host[u(tokens.value(t) - host.data() + d)] =
          static_cast<std::uint32_t>(100 * t + 50 + d);
    }
  }
  std::vector<std::uint32_t> heap(kPages * 2 * kBlock * kDim);
  const kvp::PagedKV<std::uint32_t> kv{heap.data(), kPages, 2 * kBlock * kDim, layout};
  std::vector<std::uint8_t> mark(kTokens);
  std::vector<std::int64_t> hot, page, slot;
  for (std::int64_t i = 0; i < 20; ++i) {
    hot.push_back(i);
    page.push_back(i / kBlock * 2);
    slot.push_back(i % kBlock);
  }
  const kvp::HotSlots slots{hot.data(), page.data(), slot.data(), 20};
  const auto at = [&](std::int64_t i, std::int32_t offset) {
    return heap[u(page[static_cast<std::size_t>(i)] * 2 * kBlock * kDim + offset)];
  };
  for (int round = 0; round < 300; ++round) {
    std::vector<std::int64_t> wanted(kTokens);
    std::iota(wanted.begin(), wanted.end(), 0);
    std::shuffle(wanted.begin(), wanted.end(), random);
    wanted.resize(round == 0 ? 20 : random() % 40);
    if (round == 0) std::iota(wanted.begin(), wanted.end(), 40);  // all are copied
    for (std::int64_t& token : wanted) {
      if (round && random() % 10 == 0) token = -1;
    }
    const std::vector<std::int64_t> before = hot;
    const std::int64_t copied =
        kvp::fill_hot_slots(tokens, kTokens, wanted.data(),
                            static_cast<std::int64_t>(wanted.size()), slots, kv, mark);
    std::set<std::int64_t> now(hot.begin(), hot.end());
    std::set<std::int64_t> old(before.begin(), before.end());
    require(now.size() == 20, "each hot token once");
    std::int64_t missing = 0;
    for (std::size_t i = 0; i < wanted.size() && i < 20; ++i) {
      if (wanted[i] < 0) continue;
      require(now.count(wanted[i]) == 1, "what is wanted is hot");
      missing += old.count(wanted[i]) == 0;
    }
    require(copied == missing, "only what was missing is copied");
    for (std::int64_t i = 0; i < 20; ++i) {
      const std::int64_t token = hot[u(i)];
      for (std::int64_t d = 0; d < kDim; ++d) {
        const auto entry = u(slot[static_cast<std::size_t>(i)] * kDim + d);
        const auto key = static_cast<std::uint32_t>(100 * token + d);
        require(at(i, k[entry]) == key, "its key");
        require(at(i, v[entry]) == key + 50, "its value");
      }
    }
    for (const std::uint8_t left : mark) require(left == 0, "marks are taken back");
  }
  std::int64_t beyond[] = {kTokens};
  require(kvp::fill_hot_slots(tokens, kTokens, beyond, 1, slots, kv, mark) == -1,
          "a token beyond the table is refused");
}

// Whole host pages, in heap slots that lie anywhere. Two of the slots hold no page first.
void test_hot_pages(std::mt19937& random) {
  constexpr std::int64_t kDim = 2, kBlock = 16, kUnit = 8, kHot = 5, kHostPages = 12;
  std::vector<std::int32_t> k(kBlock * kDim), v(kBlock * kDim);
  for (std::int64_t i = 0; i < kBlock * kDim; ++i) {
    k[u(i)] = static_cast<std::int32_t>(i);
    v[u(i)] = static_cast<std::int32_t>(kBlock * kDim + i);
  }
  const kvp::PageLayout layout = kvp::make_layout(k.data(), v.data(), kBlock, kDim);
  std::vector<std::int64_t> table(kHostPages);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  std::vector<std::uint32_t> host(kHostPages * 2 * kUnit * kDim);
  const kvp::HostTokens<std::uint32_t> tokens{host.data(), table.data(), kUnit, kDim};
  for (std::int64_t t = 0; t < kHostPages * kUnit; ++t) {
    for (std::int64_t d = 0; d < kDim; ++d) {
      host[u(tokens.key(t) - host.data() + d)] =
          static_cast<std::uint32_t>(100 * t + d);
      host[u(tokens.value(t) - host.data() + d)] =
          static_cast<std::uint32_t>(100 * t + 50 + d);
    }
  }
  constexpr std::int64_t kPages = 3, kPageElems = 2 * kBlock * kDim;
  std::vector<std::uint32_t> heap(kPages * kPageElems);
  const kvp::PagedKV<std::uint32_t> kv{heap.data(), kPages, kPageElems, layout};
  std::vector<std::int64_t> places(kPages * kBlock), page, slot;
  std::iota(places.begin(), places.end(), 0);
  std::shuffle(places.begin(), places.end(), random);
  for (std::int64_t i = 0; i < kHot * kUnit; ++i) {
    page.push_back(places[u(i)] / kBlock);
    slot.push_back(places[u(i)] % kBlock);
  }
  std::vector<std::int64_t> hot{-1, 3, -1, 7, 0};
  const kvp::HotSlots slots{hot.data(), page.data(), slot.data(), kHot, kUnit};
  std::vector<std::uint8_t> mark(kHostPages);
  std::vector<std::int64_t> wanted{7, 9, 11, 2, 3};
  require(kvp::fill_hot_slots(tokens, kHostPages, wanted.data(), kHot, slots, kv,
                              mark) == 3,
          "two of five are hot");
  require(hot == std::vector<std::int64_t>({9, 3, 11, 7, 2}), "others are replaced");
  for (const std::int64_t i : {0, 2, 4}) {  // those that were copied
    for (std::int64_t j = 0; j < kUnit; ++j) {
      const std::int64_t at = i * kUnit + j, token = hot[u(i)] * kUnit + j;
      const std::uint32_t* own = heap.data() + page[u(at)] * kPageElems;
      for (std::int64_t d = 0; d < kDim; ++d) {
        const auto key = static_cast<std::uint32_t>(100 * token + d);
        require(own[slot[u(at)] * kDim + d] == key, "its key");
        require(own[(kBlock + slot[u(at)]) * kDim + d] == key + 50, "its value");
      }
    }
  }
  hot[1] = -2;
  require(kvp::fill_hot_slots(tokens, kHostPages, wanted.data(), kHot, slots, kv,
                              mark) == -1 - kHot - 1,
          "only -1 stands for other tokens");
}

}  // namespace

int main() {
  constexpr unsigned kSeed = 20261121;
  std::printf("seed %u\n", kSeed);
  std::mt19937 random(kSeed);
  test_exponential();
  test_sorting(random);
  for (const auto* kernels : kvp::runnable_kernels<kvp::index::VoteKernels>()) {
    test_kernels(*kernels, random);
  }
  test_votes(random);
  test_hot_slots(random);
  test_hot_pages(random);
  std::puts("0 failure(s)");  // require() ends the program at the first failure
  return 0;
}
