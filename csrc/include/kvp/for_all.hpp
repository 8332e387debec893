// One parallel loop for work that may throw.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

namespace kvp {

// Runs body(i) for i in [0, n), on several threads if `parallel`. An exception must not
// leave a parallel region, so the first one is rethrown afterwards. A serial loop does
// not enter OpenMP, whose overhead shows if a body takes a microsecond.
template <typename Body>
void for_all(std::int64_t n, const Body& body, bool parallel = true) {
  if (!parallel || n < 2) {
    for (std::int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  std::exception_ptr thrown;
  std::atomic<bool> caught{false};
#pragma omp parallel for schedule(dynamic, 1)
  for (std::int64_t i = 0; i < n; ++i) {
    try {
      body(i);
    } catch (...) {
      if (!caught.exchange(true)) thrown = std::current_exception();
    }
  }
  if (caught.load()) std::rethrow_exception(thrown);
}

}  // namespace kvp
