// Tests of the votes on pages against their definition in double precision, for every
// set of kernels that this CPU can run, and with any number of threads.
#ifdef _OPENMP
#include <omp.h>
#endif

#include "vote_fixtures.hpp"

namespace {

using namespace vote_test;
namespace votes = kvp::page_votes;

int failures = 0;
const char* current_case = "";

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::printf("%s:%d: %s (case %s)\n", __FILE__, __LINE__, #condition, \
                  current_case);                                           \
      ++failures;                                                          \
    }                                                                      \
  } while (0)

template <typename Element>
void test_definition(std::mt19937& random) {
  for (const Shape& shape : shapes()) {
    Request<Element> request(shape, random);
    for (const bool largest : {false, true}) {
      const std::vector<double> expected = request.expected(largest);
      for (const votes::Kernels* kernels : kvp::runnable_kernels<votes::Kernels>()) {
        std::vector<float> out(request.votes(), -1.0f);
        votes::vote(*kernels, request.call(largest, out.data()));
        CHECK(error_of(out, expected) < 2e-6 * static_cast<double>(shape.num_queries));
        for (std::size_t i = 0; i < out.size(); ++i) {
          CHECK((out[i] == 0.0f) == (expected[i] == 0.0));  // no query sees it
        }
      }
    }
  }
}

void test_threads(std::mt19937& random) {
#ifdef _OPENMP
  const Shape shape{4, 2, 32, 1000, 16, 128, Order::kInterleaved, true, true};
  const Request<BFloat16> request(shape, random);
  std::vector<float> first;
  for (const int threads : {1, 2, 3, 5}) {
    omp_set_num_threads(threads);
    std::vector<float> out(request.votes());
    votes::vote(kvp::select_kernels<votes::Kernels>(), request.call(false, out.data()));
    if (first.empty()) first = out;
    CHECK(out == first);
  }
#else
  (void)random;
#endif
}

// Scores that are far apart: the softmax must not overflow, and low scores have no weight.
void test_extremes(std::mt19937& random) {
  const Shape shape{1, 1, 4, 90, 16, 16, Order::kNatural, false, false};
  Request<float> request(shape, random);
  for (float& x : request.queries) x *= 400.0f;
  const std::vector<double> expected = request.expected(false);
  std::vector<float> out(request.votes());
  votes::vote(kvp::select_kernels<votes::Kernels>(), request.call(false, out.data()));
  CHECK(error_of(out, expected) < 1e-3);  // scores are in the thousands
}

}  // namespace

int main() {
  const unsigned seed = 20253;
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  current_case = "float32";
  test_definition<float>(random);
  current_case = "bfloat16";
  test_definition<BFloat16>(random);
  current_case = "float16";
  test_definition<Float16>(random);
  current_case = "threads";
  test_threads(random);
  current_case = "extremes";
  test_extremes(random);
  std::printf("%d failure(s)\n", failures);
  return failures != 0;
}
