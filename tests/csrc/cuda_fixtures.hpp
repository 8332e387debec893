// Fixtures of the tests of CUDA kernels, which run under the emulator: compile with
// -Itests/csrc/cuda_emulation.
//
// No framework: CHECK counts, main returns non-zero if anything failed.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

namespace cuda_test {

inline int failures = 0;
inline const char* current_case = "";

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::printf("%s:%d: %s (case %s)\n", __FILE__, __LINE__, #condition, \
                  cuda_test::current_case);                                \
      ++cuda_test::failures;                                               \
    }                                                                      \
  } while (0)

// ThreadSanitizer treats every CUDA thread as a thread, which takes a millisecond. Tests
// then run few cases and one order: it finds races in any order.
#if defined(__SANITIZE_THREAD__)
constexpr bool kFewThreads = true;
#else
constexpr bool kFewThreads = false;
#endif

using kvp::emulation::Block;
using kvp::emulation::Turns;

// Runs body, which launches kernels on its own memory, with blocks and threads in every
// order. Its result must equal `expected` bit for bit each time.
template <typename Result, typename Body>
void check_all_turns(const Result& expected, const Body& body) {
  for (const Turns turns : {Turns::kForwards, Turns::kBackwards, Turns::kShuffled}) {
    Block::instance().set_turns(turns, 20251);
    CHECK(body() == expected);
    if (kFewThreads) break;
  }
  Block::instance().set_turns(Turns::kForwards, 0);
}

// Whether a launch traps.
template <typename Body>
bool traps(const Body& body) {
  try {
    body();
  } catch (const kvp::emulation::Trap&) {
    return true;
  }
  return false;
}

inline int report() {
  std::printf("%d failure(s)\n", failures);
  return failures != 0;
}

}  // namespace cuda_test
