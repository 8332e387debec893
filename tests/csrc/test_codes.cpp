// Tests of the index of codes (kvp/code_index.hpp and below), for every set of kernels
// that this CPU runs.
#include "index_fixtures.hpp"
#include "kvp/votes.hpp"

namespace kvp::index {

// Damages an index in one place at a time.
struct CodeBreaker {
  CodeIndex& index;
  using Index = std::int64_t;
  Index label(Index row) const { return index.codes_.codes_.label(row); }
  Index slot_of(Index row) const { return index.codes_.slot_of(row); }
  void set_label(Index row, Index label) { index.codes_.codes_.set_label(row, label); }
  std::uint16_t scale(Index row) const { return index.codes_.codes_.scale_bits(row); }
  void set_scale(Index row, std::uint16_t bits) {
    index.codes_.codes_.set_scale(row, bits);
  }
  void use(const CodeKernels& codes, const RankKernels& ranks) {
    index.code_kernels_ = &codes;
    index.rank_kernels_ = &ranks;
  }
};

}  // namespace kvp::index

namespace {

using namespace index_test;
using kvp::select_kernels;

Settings coded_settings(Index dims, Index flat_keys, Index segment = 64) {
  Settings settings = settings_for(dims, 16);
  settings.flat_keys = flat_keys;
  settings.segment = segment;
  return settings;
}

// Sums of random and of extreme codes equal those of plain loops.
void test_kernels(const CodeKernels& kernels, std::mt19937& random) {
  current_case = "kernels";
  for (Index quads : {1, 2, 16, 33}) {
    for (Index group = 1; group <= 6; ++group) {
      const Index blocks = 5;
      for (bool extreme : {false, true}) {
        // Each block ends with the scales and labels of its keys.
        std::vector<std::vector<std::uint8_t>> memory(blocks);
        std::vector<const std::uint8_t*> pointers;
        for (auto& block : memory) {
          for (Index i = 0; i < block_bytes(quads); ++i) {
            block.push_back(extreme ? 127 : random() % 128);
          }
          for (Index j = 0; j < kCodeBlock; ++j) {
            const auto scale = static_cast<std::uint16_t>(0x3f00 + random() % 512);
            std::memcpy(block.data() + quads * kQuadBytes + 2 * j, &scale,
                        sizeof scale);
          }
          pointers.push_back(block.data());
        }
        std::vector<std::int8_t> queries(group * quads * kQuad);
        for (auto& code : queries) {
          code = static_cast<std::int8_t>(extreme ? -127 : int(random() % 255) - 127);
        }
        std::vector<std::int32_t> biases(group);
        for (auto& bias : biases) bias = static_cast<int>(random() % 1000) - 500;
        const Index stride = blocks * kCodeBlock;
        std::vector<float> scores(group * stride, -1.0f);
        kernels.score({pointers.data(), blocks, quads, queries.data(), biases.data(),
                       group, scores.data(), stride});
        for (Index g = 0; g < group; ++g) {
          for (Index i = 0; i < stride; ++i) {
            const Index j = i % kCodeBlock;
            const std::uint8_t* own = pointers[i / kCodeBlock];
            std::int32_t sum = biases[g];
            for (Index d = 0; d < quads * kQuad; ++d) {
              sum += own[(d / kQuad * kCodeBlock + j) * kQuad + d % kQuad] *
                     queries[g * quads * kQuad + d];
            }
            std::uint16_t scale;
            std::memcpy(&scale, own + quads * kQuadBytes + 2 * j, sizeof scale);
            CHECK(scores[g * stride + i] ==
                  kvp::widen(scale) * static_cast<float>(sum));
          }
        }
      }
    }
  }
}

void test_collecting(const RankKernels& kernels, std::mt19937& random) {
  current_case = "collecting";
  for (Index n : {1, 7, 8, 9, 100}) {
    const Index group = 3, stride = round_up(n, kCodeBlock);
    std::vector<float> scores(group * stride, 1e9f);  // padding reaches any threshold
    for (Index g = 0; g < group; ++g) {
      for (Index i = 0; i < n; ++i) {
        scores[g * stride + i] = static_cast<float>(random() % 10);
      }
    }
    const std::vector<float> thresholds{9.0f, 5.0f, 8.0f};
    std::vector<std::int32_t> slots(n + kPadding), expected;
    std::vector<std::int64_t> counts(group), expected_counts(group);
    for (Index i = 0; i < n; ++i) {
      bool any = false;
      for (Index g = 0; g < group; ++g) {
        const bool reaches = scores[g * stride + i] >= thresholds[g];
        expected_counts[g] += reaches;
        any |= reaches;
      }
      if (any) expected.push_back(static_cast<std::int32_t>(i));
    }
    const Index found =
        kernels.collect({scores.data(), stride, n, group, thresholds.data(),
                         slots.data(), counts.data()});
    slots.resize(found);
    CHECK(slots == expected);
    CHECK(counts == expected_counts);
  }
}

void test_narrowing(const RankKernels& kernels, std::mt19937& random) {
  current_case = "narrowing";
  for (Index n : {1, 7, 8, 9, 100}) {
    for (float threshold : {-1.0f, 4.0f, 10.0f}) {  // all, some, none
      std::vector<float> scores(n), expected;
      for (float& x : scores) x = static_cast<float>(random() % 10);
      for (float x : scores) {
        if (x >= threshold) expected.push_back(x);
      }
      scores.resize(n + kPadding, 1e9f);  // padding reaches any threshold
      std::vector<float> out(expected.size() + kPadding);
      const auto kept = static_cast<Index>(expected.size());
      CHECK(kernels.narrow(scores.data(), n, threshold, out.data()) == kept);
      CHECK(std::equal(expected.begin(), expected.end(), out.begin()));
      CHECK(kernels.narrow(scores.data(), n, threshold, scores.data()) == kept);
      CHECK(std::equal(expected.begin(), expected.end(), scores.begin()));
    }
  }
}

void test_ranks(const RankKernels& kernels, std::mt19937& random) {
  current_case = "ranks";
  for (Index n : {1, 3, 4, 8, 9, 15, 16, 17, 33, 128}) {
    for (unsigned values : {1u, 5u, 1000000u}) {  // with many ties, and with few
      std::vector<float> scores(n);
      for (float& x : scores) x = static_cast<float>(random() % values) - 2.5f;
      std::vector<std::int32_t> ranks(n, -1);
      kernels.rank(scores.data(), n, ranks.data());
      std::vector<Index> order(n);
      for (Index i = 0; i < n; ++i) order[i] = i;
      std::stable_sort(order.begin(), order.end(),
                       [&](Index a, Index b) { return scores[a] > scores[b]; });
      for (Index i = 0; i < n; ++i) CHECK(ranks[order[i]] == i);
    }
  }
}

void test_thresholds(const RankKernels& kernels, std::mt19937& random) {
  current_case = "thresholds";
  std::vector<float> narrowed;
  for (Index n : {1, 2, 16, 17, 100, 1023, 3000}) {
    for (unsigned values : {1u, 3u, 1u << 20}) {
      std::vector<float> scores(n);
      for (float& x : scores) x = static_cast<float>(random() % values) / 64.0f;
      if (values > 3) scores[0] = 1e30f;  // one far from the others
      std::vector<float> sorted = scores;
      scores.resize(n + kPadding, 1e30f);
      std::sort(sorted.begin(), sorted.end(), std::greater<>());
      for (Index rank : {Index{1}, Index{2}, n / 10 + 1, n / 2 + 1, n, n + 5}) {
        const float threshold = threshold_of(kernels, scores.data(), n, rank, narrowed);
        const Index count = kernels.count(scores.data(), n, threshold);
        CHECK(count == std::count_if(scores.begin(), scores.begin() + n,
                                     [&](float x) { return x >= threshold; }));
        CHECK(count >= std::min(rank, n));
        if (rank < n && values > 3 && rank > 1) {
          // Bisecting a range with one far score takes more steps than there are.
          scores[0] = 2.0f * sorted[1] - sorted[2];
          const float close = threshold_of(kernels, scores.data(), n, rank, narrowed);
          const Index reached = kernels.count(scores.data(), n, close);
          CHECK(reached >= rank && reached <= rank + rank / 8 + 2);
          scores[0] = 1e30f;
        }
      }
    }
  }
}

void test_pages(std::mt19937& random) {
  current_case = "pages";
  for (Index n : {16, 32, 48, 640}) {
    const Index dims = 24;
    const std::vector<float> rows = clustered(n, dims, random);
    std::vector<std::int32_t> order, again;
    PageDivider().divide(rows.data(), n, dims, order);
    for (const DivideKernels* kernels : kvp::runnable_kernels<DivideKernels>()) {
      PageDivider(*kernels).divide(rows.data(), n, dims, again);
      CHECK(order == again);
    }
    for (Index i = 1; i < n; ++i) {
      CHECK(i % kCodeBlock == 0 || order[i - 1] < order[i]);
    }
    std::vector<std::int32_t> sorted = order;
    std::sort(sorted.begin(), sorted.end());
    for (Index i = 0; i < n; ++i) CHECK(sorted[i] == i);
    // Distances within pages, against those in the order of arrival.
    double sums[2] = {};
    for (Index page = 0; page < n; page += kCodeBlock) {
      for (Index i = page + 1; i < page + kCodeBlock; ++i) {
        for (Index d = 0; d < dims; ++d) {
          const float apart = rows[order[i] * dims + d] - rows[order[page] * dims + d];
          const float before = rows[i * dims + d] - rows[page * dims + d];
          sums[0] += apart * apart;
          sums[1] += before * before;
        }
      }
    }
    CHECK(n < 640 || sums[0] < 0.6 * sums[1]);
  }
}

double recall(const std::vector<Scored>& found, const std::vector<Scored>& exact) {
  Index hits = 0;
  for (const Scored& best : exact) {
    hits += std::any_of(found.begin(), found.end(),
                        [&](const Scored& x) { return x.slot == best.slot; });
  }
  return exact.empty() ? 1.0 : double(hits) / double(exact.size());
}

void test_index(const CodeKernels& kernels, const RankKernels& ranks,
                std::mt19937& random) {
  const Kernels& exact_kernels = select_kernels<Kernels>();
  for (Index dims : {5, 64, 80}) {
    for (Index n : {0, 1, 63, 64, 700, 1111}) {
      for (bool paged : {false, true}) {
        current_case = paged ? "index with pages" : "index without pages";
        const std::vector<float> keys = clustered(n, dims, random);
        const KeyView view = dense(keys, dims);
        const Settings settings = coded_settings(dims, paged ? 300 : 1 << 20);
        Forest<CodeIndex> index(settings, 1, exact_kernels),
            parts(settings, 1, exact_kernels);
        Forest<BruteForce> scan(settings, 1, exact_kernels);
        CodeBreaker{const_cast<CodeIndex&>(index.tree(0))}.use(kernels, ranks);
        CodeBreaker{const_cast<CodeIndex&>(parts.tree(0))}.use(kernels, ranks);
        CHECK(index.append({view}, n).head == -1);
        scan.append({view}, n);
        CHECK(index.integrity({view}, false) == "");
        CHECK((index.tree(0).paged() > 0) == (paged && n >= 300));
        for (Index done = 0; done < n;) {
          const Index count = std::min<Index>(1 + random() % 40, n - done);
          parts.append({after(view, done)}, count);
          done += count;
        }
        CHECK(parts.integrity({view}, false) == "");
        double total = 0.0;
        for (int round = 0; round < 10; ++round) {
          const std::vector<float> query = clustered(1, dims, random);
          const auto exact = search(scan.tree(0), view, false, query.data(), 20);
          const auto all = search(index.tree(0), view, false, query.data(), 20);
          CHECK(same(all, exact));  // no limit: all keys exactly
          const auto found =
              search(index.tree(0), view, false, query.data(), 20, {600, 1.0});
          CHECK(static_cast<Index>(found.size()) == std::min<Index>(n, 20));
          total += recall(found, exact);
          for (const Scored& each : found) {
            double score = 0.0;
            for (Index d = 0; d < dims; ++d) {
              score += double(query[d]) * double(keys[each.slot * dims + d]);
            }
            CHECK(std::fabs(score - each.score) < 0.1 + 0.025 * double(dims));
          }
          CHECK(same(search(parts.tree(0), view, false, query.data(), 20, {600, 1.0}),
                     found));
        }
        CHECK(total > (paged ? 7.5 : 9.3));
        const std::vector<float> zeros(dims);
        const auto ties =
            search(index.tree(0), view, false, zeros.data(), 5, {100000, 1.0});
        for (std::size_t i = 0; i < ties.size(); ++i) {
          CHECK(ties[i].slot == static_cast<std::int32_t>(i));
        }
      }
    }
  }
}

// In long contexts, keys that arrive in large parts get the pages of keys that arrive at
// once, and their pages hold more of the best keys than those of keys that arrive one by
// one, if similar keys are far apart.
void test_merging(std::mt19937& random) {
  current_case = "merging";
  const Index n = 36000, dims = 16;
  std::vector<float> keys = clustered(n / 12, dims, random);
  while (static_cast<Index>(keys.size()) < n * dims) {  // copies, far apart
    keys.push_back(keys[keys.size() - n / 12 * dims] +
                   0.01f * static_cast<float>(random() % 100));
  }
  const KeyView view = dense(keys, dims);
  const Settings settings = coded_settings(dims, 0, 512);
  const Kernels& kernels = select_kernels<Kernels>();
  Forest<CodeIndex> whole(settings, 1, kernels), parts(settings, 1, kernels),
      grown(settings, 1, kernels);
  Forest<BruteForce> scan(settings, 1, kernels);
  scan.append({view}, n);
  whole.append({view}, 600);
  whole.append({after(view, 600)}, n - 600);
  for (Index done = 0; done < n; done += 600) parts.append({after(view, done)}, 600);
  grown.append({view}, 600);
  for (Index done = 600; done < n; done += 200) grown.append({after(view, done)}, 200);
  for (const auto* index : {&whole, &parts, &grown}) {
    CHECK(index->integrity({view}, false) == "");
    CHECK(index->tree(0).paged() == n / 512 * 512);
  }
  double merged = 0.0, unmerged = 0.0;
  for (int round = 0; round < 30; ++round) {
    const std::vector<float> query = clustered(1, dims, random);
    const auto exact = search(scan.tree(0), view, false, query.data(), 20);
    const QueryOptions few{320, 1.0};
    const auto found = search(whole.tree(0), view, false, query.data(), 20, few);
    CHECK(same(found, search(parts.tree(0), view, false, query.data(), 20, few)));
    merged += recall(found, exact);
    unmerged +=
        recall(search(grown.tree(0), view, false, query.data(), 20, few), exact);
  }
  CHECK(merged > unmerged + 1.0);
}

// The best of so many pages that they are chosen through groups.
void test_groups(std::mt19937& random) {
  current_case = "groups";
  // Segments of 131 pages, so that the last pages are in no group. The keys of the last
  // segment are the best.
  const Index n = 70000, dims = 16, segment = 131 * kCodeBlock;
  std::vector<float> keys = clustered(n, dims, random);
  const Index last = (n / segment - 1) * segment;
  for (Index i = last * dims; i < (last + segment) * dims; ++i) keys[i] *= 3.0f;
  const KeyView view = dense(keys, dims);
  Forest<CodeIndex> index(coded_settings(dims, 0, segment), 1,
                          select_kernels<Kernels>());
  Forest<BruteForce> scan(settings_for(dims, 16), 1, select_kernels<Kernels>());
  index.append({view}, 69000);
  for (Index done = 69000; done < n; done += 10) {
    index.append({after(view, done)}, 10);
  }
  scan.append({view}, n);
  CHECK(index.integrity({view}, false) == "");
  const CodeBreaker looker{const_cast<CodeIndex&>(index.tree(0))};
  const Index paged = index.tree(0).paged();
  std::vector<std::int32_t> ungrouped;
  for (Index row = paged - 3 * kCodeBlock; row < paged; ++row) {
    ungrouped.push_back(static_cast<std::int32_t>(looker.slot_of(row)));
  }
  // A query visits at least as many keys as it is to find.
  // There are 832 keys behind the pages.
  CHECK(search(index.tree(0), view, false, keys.data(), 1000, {16, 1.0}).size() ==
        1000);
  double total = 0.0;
  Index visits = 0, found_there = 0;
  for (int round = 0; round < 40; ++round) {
    const std::vector<float> query = clustered(1, dims, random);
    Scratch scratch;
    TopK top(50);
    visits = index.tree(0).query(view, false, query.data(), {4096, 1.0}, scratch, top);
    total += recall(top.sorted(), search(scan.tree(0), view, false, query.data(), 50));
    for (const Scored& each : top.sorted()) {
      found_there +=
          std::find(ungrouped.begin(), ungrouped.end(), each.slot) != ungrouped.end();
    }
  }
  CHECK(visits < 4096 + 4096 / 8 + segment + kCodeBlock);
  CHECK(found_there > 0);
  CHECK(total > 32.0);
}

// The votes of a group are the attention of the exact scan, restricted to few keys.
void test_votes(std::mt19937& random) {
  current_case = "votes";
  const Index n = 900, dims = 64, group = 3, count = 30;
  const std::vector<float> keys = clustered(n, dims, random);
  const KeyView view = dense(keys, dims);
  const Settings settings = coded_settings(dims, 1 << 20);
  Forest<CodeIndex> index(settings, 1, select_kernels<Kernels>());
  Forest<BruteForce> scan(settings, 1, select_kernels<Kernels>());
  index.append({view}, n);
  scan.append({view}, n);
  const std::vector<float> queries = clustered(group, dims, random);
  VoteScratch scratch, exact_scratch;
  std::vector<std::int64_t> found(count), exact(count);
  const QueryOptions options{400, 1.0, count};
  vote(index.tree(0), view, false, queries.data(), group, dims, 0.5f, options, scratch);
  CHECK(scratch.votes.best(count, found.data()) == count);
  vote(scan.tree(0), view, false, queries.data(), group, dims, 0.5f, options,
       exact_scratch);
  exact_scratch.votes.best(count, exact.data());
  Index hits = 0;
  for (const auto slot : exact) {
    hits += std::find(found.begin(), found.end(), slot) != found.end();
  }
  CHECK(hits >= count - 2);
}

// Keys that are stored in the order of rows. Codes find pages whose attention is that of the
// best pages by an exact scan of the stored keys, and keys stay where they are.
void test_stored_pages(std::mt19937& random) {
  current_case = "stored pages";
  const Index dims = 32, group = 2, count = 6;
  Settings settings = coded_settings(dims, 64);
  settings.stores_pages = true;
  for (const Index n : {100, 400, 1003}) {
    const std::vector<float> keys = clustered(n, dims, random);
    Forest<CodeIndex> index(settings, 1, select_kernels<Kernels>());
    Forest<BruteForce> scan(settings, 1, select_kernels<Kernels>());
    std::vector<Index> before;
    for (Index done = 0; done < n;) {
      const Index more = std::min<Index>(1 + random() % 300, n - done);
      index.append({after(dense(keys, dims), done)}, more);
      done += more;
      for (std::size_t row = 0; row < before.size(); ++row) {
        CHECK(index.tree(0).slot_of(row) == before[row]);
      }
      before.clear();
      for (Index row = 0; row < index.tree(0).paged(); ++row) {
        before.push_back(index.tree(0).slot_of(row));
      }
    }
    CHECK(index.tree(0).paged() == (n < 128 ? 0 : n / 64 * 64));
    std::vector<float> rows;
    for (Index row = 0; row < n; ++row) {
      const bool paged = row < index.tree(0).paged();
      const Index slot = paged ? index.tree(0).slot_of(row) : row;
      const float* key = keys.data() + slot * dims;
      rows.insert(rows.end(), key, key + dims);
    }
    const KeyView stored = dense(rows, dims);
    scan.append({stored}, n);
    const std::vector<float> queries = clustered(group, dims, random);
    VoteScratch scratch;
    std::vector<std::int64_t> found(count), exact(count), all(count), every(1000);
    const auto ask = [&](const auto& tree, Index visits,
                         std::vector<std::int64_t>& out) {
      const auto wanted = static_cast<Index>(out.size());
      vote_pages(tree, stored, queries.data(), group, dims, 0.3f,
                 {visits, 1.0, wanted * kStoredKeys}, scratch);
      scratch.pages.best(wanted, out.data());
    };
    ask(scan.tree(0), 0, exact);
    ask(index.tree(0), 0, all);
    CHECK(all == exact);  // no limit: all keys exactly
    ask(index.tree(0), 4096, found);
    ask(scan.tree(0), 0, every);
    std::vector<double> votes(every.size());
    for (Index g = 0; g < group; ++g) {
      std::vector<double> weights(n);
      double sum = 0.0;
      for (Index row = 0; row < n; ++row) {
        double logit = 0.0;
        for (Index d = 0; d < dims; ++d) {
          logit += double(queries[g * dims + d]) * double(rows[row * dims + d]);
        }
        sum += weights[row] = std::exp(0.3 * logit);
      }
      for (Index row = 0; row < n; ++row)
        votes[row / kStoredKeys] += weights[row] / sum;
    }
    double ours = 0.0, best = 0.0;
    for (Index i = 0; i < count; ++i) {
      ours += votes[found[i]];
      best += votes[exact[i]];
    }
    CHECK(ours > 0.97 * best);
    const Index full = n / kStoredKeys;
    CHECK(every[full - 1] >= 0 && every[full] == -1);  // the last page is not full
    for (Index i = 1; i < full; ++i) {
      CHECK(votes[every[i]] <= votes[every[i - 1]] * 1.0001);
    }
  }
}

void test_damage_is_found(std::mt19937& random) {
  current_case = "damage";
  const Index n = 400, dims = 16;
  const std::vector<float> keys = clustered(n, dims, random);
  const KeyView view = dense(keys, dims);
  Forest<CodeIndex> index(coded_settings(dims, 300), 1, select_kernels<Kernels>());
  index.append({view}, n);
  CHECK(index.tree(0).paged() == 384);
  CodeBreaker breaker{const_cast<CodeIndex&>(index.tree(0))};
  const Index label = breaker.label(3);
  breaker.set_label(3, breaker.label(4));
  CHECK(index.integrity({view}, false) != "");
  breaker.set_label(3, 64);  // segments have 64 keys
  CHECK(index.integrity({view}, false) != "");
  breaker.set_label(3, label);
  const std::uint16_t scale = breaker.scale(7);
  breaker.set_scale(7, scale + 64);  // 1.5 times as much
  CHECK(index.integrity({view}, false) != "");
  breaker.set_scale(7, scale);
  CHECK(index.integrity({view}, false) == "");
}

// Keys with one large dimension, and keys that grow: codes have a scale per key.
void test_outliers(std::mt19937& random) {
  current_case = "outliers";
  const Index n = 800, dims = 32;
  std::vector<float> keys = clustered(n, dims, random);
  for (Index i = 0; i < n; ++i) {
    keys[i * dims + 3] += 1000.0f;  // the same for all: it decides nothing
    if (i >= 400) {
      for (Index d = 0; d < dims; ++d) {
        if (d != 3) keys[i * dims + d] *= 3.0f;
      }
    }
  }
  const KeyView view = dense(keys, dims);
  Forest<CodeIndex> index(coded_settings(dims, 1 << 20), 1, select_kernels<Kernels>());
  Forest<BruteForce> scan(coded_settings(dims, 0), 1, select_kernels<Kernels>());
  index.append({view}, 400);
  index.append({after(view, 400)}, 400);
  scan.append({view}, n);
  double total = 0.0;
  for (int round = 0; round < 20; ++round) {
    const std::vector<float> query = clustered(1, dims, random);
    total += recall(search(index.tree(0), view, false, query.data(), 20, {1, 1.0}),
                    search(scan.tree(0), view, false, query.data(), 20));
  }
  CHECK(total > 18.5);
}

// Keys of any size that can be indexed give finite scores.
void test_extremes(std::mt19937& random) {
  current_case = "extremes";
  const Index n = 200, dims = 16;
  std::vector<float> keys = clustered(n, dims, random);
  for (Index i = 0; i < n * dims; ++i) keys[i] *= i < 100 * dims ? 1e-30f : 1e15f;
  Forest<CodeIndex> index(coded_settings(dims, 0), 1, select_kernels<Kernels>());
  const KeyView view = dense(keys, dims);
  index.append({view}, 100);
  index.append({after(view, 100)}, 100);
  for (const float size : {1e-30f, 1.0f, 1e15f}) {
    std::vector<float> query = clustered(1, dims, random);
    for (float& x : query) x *= size;
    const auto found =
        search(index.tree(0), view, false, query.data(), 150, {400, 1.0});
    CHECK(found.size() == 150);
    for (const Scored& each : found) CHECK(std::isfinite(each.score));
  }
}

void test_bad_keys_change_nothing(std::mt19937& random) {
  current_case = "bad keys";
  const Index n = 400, dims = 8;
  std::vector<float> keys = clustered(n, dims, random);
  Forest<CodeIndex> index(coded_settings(dims, 0), 1, select_kernels<Kernels>());
  index.append({dense(keys, dims)}, n);
  std::vector<float> bad = clustered(n, dims, random);
  bad[100 * dims + 2] = std::nanf("");
  CHECK(index.append({dense(bad, dims)}, n).slot == 100);
  CHECK(index.num_keys() == n);
  CHECK(index.integrity({dense(keys, dims)}, false) == "");
}

}  // namespace

int main() {
  std::mt19937 random(kSeed);
  for (const CodeKernels* kernels : kvp::runnable_kernels<CodeKernels>()) {
    std::printf("kernels: %s\n", kvp::name_of(kernels->simd));
    test_kernels(*kernels, random);
    test_index(*kernels, select_kernels<RankKernels>(), random);
  }
  for (const RankKernels* kernels : kvp::runnable_kernels<RankKernels>()) {
    std::printf("rank kernels: %s\n", kvp::name_of(kernels->simd));
    test_collecting(*kernels, random);
    test_narrowing(*kernels, random);
    test_ranks(*kernels, random);
    test_thresholds(*kernels, random);
    test_index(select_kernels<CodeKernels>(), *kernels, random);
  }
  test_pages(random);
  test_merging(random);
  test_groups(random);
  test_votes(random);
  test_stored_pages(random);
  test_damage_is_found(random);
  test_outliers(random);
  test_extremes(random);
  test_bad_keys_change_nothing(random);
  return report();
}
