// Biases of chunks against a count of each token.
#include "kvp/unselected.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

void test_counts(std::mt19937& random) {
  std::vector<std::int64_t> left;
  for (int round = 0; round < 300; ++round) {
    const std::int64_t size = 1 + random() % 9, tokens = random() % 120;
    const std::int64_t chunks = tokens / size;
    std::vector<std::int64_t> all(static_cast<std::size_t>(tokens));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    const std::int64_t count = tokens ? random() % (tokens + 1) : 0;
    std::vector<float> logs(static_cast<std::size_t>(size + 1));
    for (std::size_t n = 0; n < logs.size(); ++n) logs[n] = std::log(float(n));
    const float unset = 77.0f;
    std::vector<float> bias(static_cast<std::size_t>(chunks + 1), unset);
    require(kvp::write_unselected({all.data(), count},
                                  {bias.data(), chunks, size, logs.data()}, left),
            "distinct tokens are accepted");
    for (std::int64_t c = 0; c < chunks; ++c) {
      std::int64_t unselected = size;
      for (std::int64_t i = 0; i < count; ++i) {
        unselected -= all[static_cast<std::size_t>(i)] / size == c;
      }
      require(bias[static_cast<std::size_t>(c)] == std::log(float(unselected)),
              "the logarithm of the tokens that are not selected");
    }
    require(bias.back() == unset, "nothing behind the last chunk is written");
  }
}

void test_refusals() {
  std::vector<std::int64_t> left;
  std::vector<float> bias(2, 1.0f);
  const std::vector<float> logs{-std::numeric_limits<float>::infinity(), 0.0f};
  const std::vector<std::int64_t> twice{0, 0}, negative{-1};
  const kvp::ChunkEntries entries{bias.data(), 2, 1, logs.data()};
  require(!kvp::write_unselected({twice.data(), 2}, entries, left), "a token twice");
  require(!kvp::write_unselected({negative.data(), 1}, entries, left),
          "a negative one");
  require(bias == std::vector<float>(2, 1.0f), "nothing is written then");
}

}  // namespace

int main() {
  std::mt19937 random(20261128);
  test_counts(random);
  test_refusals();
  std::puts("ok");
}
