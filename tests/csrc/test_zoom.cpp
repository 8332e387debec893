// Tests of kvp/zoom.hpp: random steps against sorting, and the invariants of each step.
#include <numeric>

#include "kvp/zoom.hpp"
#include "svd_fixtures.hpp"

namespace {

using kvp::zoom::Choice;
using kvp::zoom::kOff;
using kvp::zoom::Row;

// One KV head of one request. Vectors have the exact size, so that a sanitizer sees
// accesses past the end.
struct Head {
  std::vector<float> gates, log_sizes, bias;
  std::vector<Index> sizes, owner;
  Index room;

  Head(Index spans, Index wanted_room, std::mt19937& random) : room(wanted_room) {
    std::uniform_int_distribution<Index> length(1, 9);
    for (Index s = 0; s < spans; ++s) {
      sizes.push_back(length(random));
      log_sizes.push_back(std::log(float(sizes.back())));
    }
    gates.assign(u(spans), 0.0f);
    bias = log_sizes;
    bias.resize(u(spans + room), kOff);
    owner.assign(u(spans + room), -1);
  }

  Index spans() const { return Index(sizes.size()); }
  Row row() {
    return {gates.data(), sizes.data(), log_sizes.data(), spans(),
            room,         bias.data(),  owner.data()};
  }
  bool zoomed(Index s) const { return bias[u(s)] == kOff; }
};

// The choice, by sorting.
std::vector<char> best(const Head& head) {
  std::vector<Index> order;
  for (Index s = 0; s < head.spans(); ++s) {
    if (head.gates[u(s)] > kOff && head.sizes[u(s)] <= head.room) order.push_back(s);
  }
  std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) {
    return head.gates[u(a)] > head.gates[u(b)];
  });
  std::vector<char> chosen(u(head.spans()));
  Index used = 0;
  for (const Index s : order) {
    used += head.sizes[u(s)];
    if (used > head.room) break;
    chosen[u(s)] = 1;
  }
  return chosen;
}

void draw(Head& head, std::mt19937& random) {
  const float special[] = {NAN, kOff, -kOff, -0.0f};
  for (float& gate : head.gates) {
    gate = float(random() % 40) / 8.0f;  // many are equal
    if (random() % 5 == 0) gate = special[random() % 4];
  }
}

// A step and its invariants.
void step(Head& head, Choice& choice) {
  const Head before = head;
  const std::vector<char> wanted = best(head);
  kvp::zoom::choose(head.row(), choice);
  CHECK(head.bias == before.bias && head.owner == before.owner);  // only reads
  CHECK(choice.fits && choice.chosen == wanted);
  kvp::zoom::apply(head.row(), choice);
  std::vector<Index> owned(u(head.spans()));
  Index zoomed_tokens = 0, made = 0;
  for (Index e = head.spans(); e < head.spans() + head.room; ++e) {
    const Index owner = head.owner[u(e)], old = before.owner[u(e)];
    CHECK(owner >= -1 && owner < head.spans());
    CHECK(head.bias[u(e)] == (owner < 0 ? kOff : 0.0f));
    if (owner >= 0) ++owned[u(owner)], ++zoomed_tokens;
    if (old >= 0 && wanted[u(old)]) CHECK(owner == old);  // keeps its entry
    made += owner >= 0 && owner != old;
  }
  CHECK(zoomed_tokens == choice.zoomed_tokens && made == Index(choice.slots.size()));
  Index slot = 0;
  for (Index s = 0; s < head.spans(); ++s) {
    CHECK(owned[u(s)] == (wanted[u(s)] ? head.sizes[u(s)] : 0));
    CHECK(head.bias[u(s)] == (wanted[u(s)] ? kOff : head.log_sizes[u(s)]));
    if (!wanted[u(s)] || before.zoomed(s)) continue;
    for (Index t = 0; t < head.sizes[u(s)]; ++t, ++slot) {
      CHECK(head.owner[u(choice.slots[u(slot)])] == s);
      CHECK(slot == 0 || choice.slots[u(slot)] > choice.slots[u(slot - 1)]);
    }
  }
}

void test_steps(std::mt19937& random) {
  current_case = "steps";
  Choice choice;  // reused: holds the result of the row before
  for (Index spans : {0, 1, 7, 40, 300, 3000}) {
    for (Index room : {0, 1, 9, 30, 600}) {
      Head head(spans, room, random);
      for (int i = 0; i < 30; ++i) {
        draw(head, random);
        step(head, choice);
        step(head, choice);
        CHECK(choice.slots.empty());  // no token is reconstructed twice
      }
      std::fill(head.gates.begin(), head.gates.end(), NAN);
      step(head, choice);
      CHECK(choice.zoomed_tokens == 0);
    }
  }
}

// Owners that contradict the biases are detected before anything is written.
void test_contradiction(std::mt19937& random) {
  current_case = "contradiction";
  Head head(3, 9, random);
  head.sizes = {4, 4, 4};
  head.gates = {1.0f, kOff, kOff};
  Choice choice;
  for (Index e = 3; e < 12; ++e) head.owner[u(e)] = 0;
  kvp::zoom::choose(head.row(), choice);
  CHECK(!choice.fits);
  for (Index e = 7; e < 12; ++e) head.owner[u(e)] = -1;
  kvp::zoom::choose(head.row(), choice);
  CHECK(choice.fits);  // room for four more
}

// Tokens are written to their slots and nowhere else.
template <typename Element, typename Factor>
void check_entries(Index tokens, Index dim, std::mt19937& random) {
  const auto problem = make_problem<float>(tokens, dim, Spectrum::kDecaying, random);
  const auto made = decompose<Factor>(problem, 6);
  static Workspace work;
  std::vector<Element> rows(u(tokens * dim));
  kvp::svd::reconstruct_rows(*kernels, made.shape, made.record.data(), rows.data(),
                             work);
  std::vector<Index> places(u(tokens + 5));
  std::iota(places.begin(), places.end(), 0);
  std::shuffle(places.begin(), places.end(), random);
  places.resize(u(tokens));
  std::vector<Element> found(u((tokens + 5) * dim)), wanted;
  std::memset(found.data(), 0x5a, found.size() * sizeof(Element));
  wanted = found;
  for (Index t = 0; t < tokens; ++t) {
    std::copy_n(rows.begin() + t * dim, dim, wanted.begin() + places[u(t)] * dim);
  }
  kvp::zoom::reconstruct_entries(*kernels, made.shape, made.record.data(),
                                 places.data(), found.data(), work);
  CHECK(std::memcmp(found.data(), wanted.data(), found.size() * sizeof(Element)) == 0);
}

void test_entries(std::mt19937& random) {
  current_case = "entries";
  for (Index tokens : {0, 1, 15, 64, 150}) {
    for (Index dim : {1, 64, 80}) {
      check_entries<float, float>(tokens, dim, random);
      check_entries<BFloat16, float>(tokens, dim, random);
      check_entries<BFloat16, BFloat16>(tokens, dim, random);
    }
  }
}

}  // namespace

int main() {
  std::mt19937 random(kSeed);
  test_steps(random);
  test_contradiction(random);
  with_all_kernels([&] { test_entries(random); });
  std::printf("%d failure(s)\n", failures);
  return failures != 0;
}
