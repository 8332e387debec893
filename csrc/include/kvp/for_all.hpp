// Parallel loops, and the decision whether a loop is worth threads.
//
// A parallel region ends when all of its threads have ended. If another program runs on the
// core of one of them, everyone waits until the scheduler lets that thread run: 4 to 8 ms,
// however short the work is. A loop that takes less than about a millisecond is therefore
// left to one thread, unless its caller observes whether the cores are free (FreeCores).
//
// A region has either one thread or all. A number in between would be worse: libgomp ends
// the threads that the next region does not use, and creates new ones for the region after
// it (tenths of a millisecond). Results must not depend on the number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>

namespace kvp {

// Multiply-adds of about a millisecond, where data lie in order.
constexpr std::int64_t kParallelWork = 1 << 24;
// Bytes below which one thread does a whole copy.
constexpr std::int64_t kParallelBytes = 256 * 1024;
// For loops that estimate their time (the search of an index, the exchange of hot tokens).
// Measured with calls of CodedIndex.query_topk for 1 to 64 heads of 8192 keys, three
// queries each, with one and two threads in turns and empty caches, on a CPU with AVX2: 20
// heads take so long. A second core that is free then saves 0.45 ms, a busy one loses 7 ms.
constexpr std::int64_t kParallelNs = 1'000'000;
// The same if the cores are free, as FreeCores expects. An estimate: to wake a thread that
// sleeps takes some ten microseconds, which a second thread must save first.
constexpr std::int64_t kParallelNsIfFree = 100'000;

// How much a loop has to do, in any unit, and the amount from which on threads share it.
struct Work {
  std::int64_t amount, shared_from;

  static constexpr Work products(std::int64_t n) { return {n, kParallelWork}; }
  static constexpr Work bytes(std::int64_t n) { return {n, kParallelBytes}; }
  static constexpr Work nanoseconds(std::int64_t n) { return {n, kParallelNs}; }

  constexpr bool parallel() const { return amount >= shared_from; }
};

// Whether other programs leave the cores to the loops of one thread, by how long these took.
//
// A loop that took far longer than its work explains waited for a core. Short loops then
// run without threads for a while, which doubles each time: at most one of them per
// kLongestPauseNs waits, if a core stays busy.
class FreeCores {
 public:
  // Longer than the estimate of a loop is wrong, shorter than the scheduler lets wait.
  static constexpr std::int64_t kWaitNs = 2'000'000;
  static constexpr std::int64_t kFirstPauseNs = 250'000'000;
  static constexpr std::int64_t kLongestPauseNs = 8'000'000'000;

  static std::int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  bool expected(std::int64_t now_ns) const { return now_ns >= closed_until_ns_; }

  // Takes note of a parallel loop that was to take `work_ns` in one thread.
  void observe(std::int64_t work_ns, std::int64_t begin_ns, std::int64_t end_ns) {
    if (end_ns - begin_ns > work_ns + kWaitNs) {
      closed_until_ns_ = end_ns + pause_ns_;
      pause_ns_ = std::min(2 * pause_ns_, kLongestPauseNs);
    } else if (end_ns - closed_until_ns_ > pause_ns_) {
      pause_ns_ = kFirstPauseNs;  // free for as long as the next pause would have been
    }
  }

 private:
  std::int64_t closed_until_ns_ = 0, pause_ns_ = kFirstPauseNs;
};

// Runs body(i) for i in [0, n), by several threads if the work of all together is worth it.
// An exception must not leave a parallel region, so the first one is rethrown afterwards.
template <typename Body>
void for_all(std::int64_t n, const Work& work, const Body& body) {
  if (n < 2 || !work.parallel()) {
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

// The same for loops of `work_ns`. Shorter ones than kParallelNs have threads too, while
// `cores` are free.
template <typename Body>
void for_all(std::int64_t n, std::int64_t work_ns, FreeCores& cores, const Body& body) {
  const std::int64_t begin_ns = FreeCores::now_ns();
  const bool free = cores.expected(begin_ns);
  const Work work{work_ns, free ? kParallelNsIfFree : kParallelNs};
  for_all(n, work, body);
  if (n >= 2 && work.parallel()) {
    cores.observe(work_ns, begin_ns, FreeCores::now_ns());
  }
}

}  // namespace kvp
