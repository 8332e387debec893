// Runs the threads of one CUDA block as fibers of one host thread. A fiber runs until it
// waits for others; the test chooses the order. Shared memory is allocated on the heap for
// each block, so that AddressSanitizer sees accesses past an array.
//
// ThreadSanitizer sees every CUDA thread as a thread, ordered as on a GPU: by barriers,
// atomics on one address, and begin and end of the launch. It then reports races of
// kernels on shared and global memory. Functions marked KVP_UNSEEN hide the emulator's own
// accesses from it.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define KVP_UNSEEN __attribute__((noinline, no_sanitize("thread")))
#else
#define KVP_UNSEEN
#endif

namespace kvp::emulation {

constexpr unsigned kWarp = 32;
constexpr unsigned kMostThreads = 1024;

// The exception of a kernel's __trap().
struct Trap : std::runtime_error {
  Trap() : std::runtime_error("a kernel trapped") {}
};

// The exception of a deadlock: threads wait for each other in different places.
struct Deadlock : std::runtime_error {
  Deadlock() : std::runtime_error("threads of a block wait in different places") {}
};

// The order in which blocks, and threads of a block, run.
enum class Turns { kForwards, kBackwards, kShuffled };

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// Orders threads of different fibers; the waiting ones acquire it.
struct Meeting {
  char passed[2];  // of even and odd rounds: a thread may be one round ahead
};

enum class Wait { kNot, kBlock, kWarp, kDone };

// One CUDA thread of the block that runs.
struct Fiber {
  ucontext_t context;
  unsigned number;  // in its block
  Wait wait;
  unsigned block_round, warp_round;
  unsigned mask;  // lanes that the thread waits for
  unsigned long long shown[2];  // its values for them, in even and odd rounds
  void* tsan;
  void* fake_stack;
};

// Threads that share a stack, one after the other, are ordered by `passed`.
struct Stack {
  void* memory;
  char passed;
};

class Block {
 public:
  static Block& instance() {
    static Block block;
    return block;
  }

  using Body = void (*)(const void* arguments);

  // Runs a whole grid. Rethrows the exception of a thread and abandons the others.
  void run_grid(Dim grid, Dim block, Body body, const void* arguments) {
    const unsigned threads = block.x * block.y * block.z;
    if (threads == 0 || threads > kMostThreads || grid.x * grid.y * grid.z == 0) {
      throw std::invalid_argument("a launch of no threads, or of too many");
    }
    body_ = body, arguments_ = arguments, grid_ = grid, dim_ = block;
    threads_ = threads;
    const std::vector<unsigned> order = turns(grid.x * grid.y * grid.z);
    for (const unsigned number : order) {
      index_ = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
      run_block(number);
#if !defined(__SANITIZE_THREAD__)
      free_shared();
#endif
    }
    acquire(&launched_);
    free_shared();  // earlier, ThreadSanitizer would see no order between use and free
    destroy_fibers();
  }

  void set_turns(Turns order, std::uint64_t seed) { order_ = order, seed_ = seed; }

  // Called by kernels:
  KVP_UNSEEN Dim thread_index() const {
    const unsigned n = running_->number;
    return {n % dim_.x, n / dim_.x % dim_.y, n / dim_.x / dim_.y};
  }
  KVP_UNSEEN Dim block_index() const { return index_; }
  KVP_UNSEEN Dim block_dim() const { return dim_; }
  KVP_UNSEEN Dim grid_dim() const { return grid_; }

  // The memory of the block for one declaration of shared memory, filled with a pattern
  // that no kernel should rely on.
  KVP_UNSEEN void* shared(const void* site, std::size_t bytes) {
    Shared* at = nullptr;
    for (unsigned i = 0; i < num_shared_; ++i) {
      if (shared_[i].site == site) at = &shared_[i];
    }
    if (at == nullptr) {
      if (num_shared_ == kMostShared) throw std::bad_alloc();
      at = &shared_[num_shared_++];
      at->site = site;
      at->memory = ::operator new(bytes, std::align_val_t{16});
      std::memset(at->memory, 0xf0 + static_cast<int>(index_.x % 15), bytes);
      kept_.push_back(at->memory);
      release(&at->made);
    }
    acquire(&at->made);
    return at->memory;
  }

  KVP_UNSEEN unsigned lane() const { return running_->number % kWarp; }

  KVP_UNSEEN void wait_for_block() {
    Fiber* self = running_;
    char* passed = &block_meeting_.passed[self->block_round++ % 2];
    release(passed);
    release(&waited_);
    self->wait = Wait::kBlock;
    to_scheduler(self);
    acquire(passed);
  }

  // Passes a value to the lanes of a mask and waits for them. `ordered` also orders their
  // memory accesses, like __syncwarp and unlike shuffles.
  KVP_UNSEEN void wait_for_warp(unsigned mask, unsigned long long value, bool ordered) {
    Fiber* self = running_;
    const unsigned round = self->warp_round++ % 2;
    char* passed = &warp_meetings_[self->number / kWarp].passed[round];
    self->shown[round] = value;
    if (ordered) release(passed);
    self->mask = mask;
    release(&waited_);
    self->wait = Wait::kWarp;
    to_scheduler(self);
    if (ordered) acquire(passed);
  }

  // The value that a lane of this warp passed last; the own value if the lane did not take
  // part.
  KVP_UNSEEN unsigned long long shown_by(unsigned lane) const {
    const Fiber* self = running_;
    const unsigned round = (self->warp_round - 1) % 2;
    const unsigned there = self->number / kWarp * kWarp + lane;
    const bool met = there < threads_ && (self->mask >> lane & 1) != 0;
    return met ? fibers_[there].shown[round] : self->shown[round];
  }

 private:
  struct Shared {
    const void* site;
    void* memory;
    char made;
  };
  static constexpr unsigned kMostShared = 16;
  static constexpr std::size_t kStackBytes = 256 * 1024;

  Block() = default;

  std::vector<unsigned> turns(unsigned n) {
    std::vector<unsigned> order(n);
    for (unsigned i = 0; i < n; ++i) {
      order[i] = order_ == Turns::kBackwards ? n - 1 - i : i;
    }
    if (order_ != Turns::kShuffled) return order;
    for (unsigned i = n; i > 1; --i) {
      seed_ = seed_ * 6364136223846793005ull + 1442695040888963407ull;
      std::swap(order[i - 1], order[(seed_ >> 33) % i]);
    }
    return order;
  }

  void run_block(unsigned number) {
    order_of_threads_ = turns(threads_);
    turn_ = order_of_threads_.data();
    next_ = stacks_in_use_ = done_ = num_shared_ = 0;
    failed_ = false;
    for (unsigned t = 0; t < threads_; ++t) {
      fibers_[t].number = t;
      fibers_[t].wait = Wait::kNot;
      fibers_[t].block_round = fibers_[t].warp_round = 0;
    }
    while (next_ < threads_) {
      Fiber& fiber = fibers_[turn_[next_++]];
      start(fiber, number);
      resume(fiber);
    }
    while (done_ < threads_) {
      bool moved = false;
      for (unsigned i = 0; i < threads_; ++i) {
        Fiber& fiber = fibers_[turn_[i]];
        if (fiber.wait != Wait::kNot) continue;
        moved = true;
        resume(fiber);
      }
      if (!moved && !end_barrier()) {
        abandon();
        throw Deadlock();
      }
    }
  }

  void resume(Fiber& fiber) {
    to_fiber(fiber);
    if (failed_) {
      abandon();
      std::rethrow_exception(error_);
    }
    if (running_->wait == Wait::kWarp) end_meeting(running_->number);
  }

  // Resumes the lanes if all lanes that they wait for have arrived.
  KVP_UNSEEN void end_meeting(unsigned thread) {
    const unsigned first = thread / kWarp * kWarp, mask = fibers_[thread].mask;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) == 0 || first + lane >= threads_) continue;
      const Fiber& other = fibers_[first + lane];
      if (other.wait != Wait::kWarp || other.mask != mask) return;
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) != 0 && first + lane < threads_) {
        fibers_[first + lane].wait = Wait::kNot;
      }
    }
  }

  // Resumes all threads if all that have not ended wait at the barrier.
  KVP_UNSEEN bool end_barrier() {
    for (unsigned t = 0; t < threads_; ++t) {
      if (fibers_[t].wait == Wait::kWarp) return false;
    }
    for (unsigned t = 0; t < threads_; ++t) {
      if (fibers_[t].wait == Wait::kBlock) fibers_[t].wait = Wait::kNot;
    }
    return true;
  }

  // The first function of a stack. Runs one thread after the other until one waits; the
  // scheduler then uses another stack for the threads that have not begun.
  static void enter() {
    Block& block = instance();
    finish_switch(nullptr);
    do {
      char* passed = block.passed_here();
      acquire(passed);
      try {
        block.call_body();
      } catch (...) {
        block.keep_error();
      }
      release(&block.launched_);
      release(passed);
    } while (block.take_next());
    block.leave();
  }

  KVP_UNSEEN void call_body() { body_(arguments_); }
  KVP_UNSEEN void keep_error() {
    error_ = std::current_exception();
    failed_ = true;
  }
  KVP_UNSEEN char* passed_here() { return &stacks_[stack_].passed; }

  KVP_UNSEEN bool take_next() {
    running_->wait = Wait::kDone;
    ++done_;
#if defined(__SANITIZE_THREAD__)
    return false;  // ThreadSanitizer sees a fiber as a thread
#else
    if (failed_ || next_ == threads_) return false;
    running_ = &fibers_[turn_[next_++]];
    return true;
#endif
  }

  KVP_UNSEEN void leave() {
    to_scheduler(running_);
    std::abort();  // not reached: the fiber is never resumed
  }

  KVP_UNSEEN void start(Fiber& fiber, unsigned block_number) {
    // Other threads share a stack in the next block. This orders them for ThreadSanitizer.
    stack_ = (stacks_in_use_++ + 7 * block_number) % threads_;
    Stack& stack = stacks_[stack_];
    if (stack.memory == nullptr) {
      stack.memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (stack.memory == MAP_FAILED) throw std::bad_alloc();
    }
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack.memory;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &Block::enter, 0);
#if defined(__SANITIZE_THREAD__)
    fiber.tsan = __tsan_create_fiber(0);
    tsan_fibers_.push_back(fiber.tsan);
#endif
  }

  void free_shared() {
    for (void* memory : kept_) ::operator delete(memory, std::align_val_t{16});
    kept_.clear();
  }

  // After all blocks have run: a new fiber may get the number of a destroyed one, and
  // ThreadSanitizer would then take both for one thread.
  void destroy_fibers() {
#if defined(__SANITIZE_THREAD__)
    for (void* fiber : tsan_fibers_) __tsan_destroy_fiber(fiber);
    tsan_fibers_.clear();
#endif
  }

  // Drops threads that have not ended: kernels have no objects with destructors.
  void abandon() {
    destroy_fibers();
    acquire(&launched_);
    acquire(&waited_);
    free_shared();
    for (unsigned i = 0; i < kMostThreads; ++i) {
      if (stacks_[i].memory == nullptr) continue;
      munmap(stacks_[i].memory, kStackBytes);
      stacks_[i].memory = nullptr;
    }
  }

  KVP_UNSEEN void to_fiber(Fiber& fiber) {
    running_ = &fiber;
#if defined(__SANITIZE_THREAD__)
    scheduler_tsan_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber.tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.context.uc_stack.ss_sp, kStackBytes);
#endif
    swapcontext(&scheduler_, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }

  KVP_UNSEEN void to_scheduler(Fiber* self) {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(scheduler_tsan_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
    const bool last = self->wait == Wait::kDone;
    __sanitizer_start_switch_fiber(last ? nullptr : &self->fake_stack, host_stack_,
                                   host_stack_bytes_);
#endif
    swapcontext(&self->context, &scheduler_);
    finish_switch(self);
  }

  static void finish_switch([[maybe_unused]] Fiber* self) {
#if defined(__SANITIZE_ADDRESS__)
    Block& block = instance();
    __sanitizer_finish_switch_fiber(self != nullptr ? self->fake_stack : nullptr,
                                    &block.host_stack_, &block.host_stack_bytes_);
#endif
  }

  static void release([[maybe_unused]] char* at) {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(at);
#endif
  }
  static void acquire([[maybe_unused]] char* at) {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(at);
#endif
  }

  Fiber fibers_[kMostThreads]{};
  Stack stacks_[kMostThreads]{};
  unsigned stack_ = 0, stacks_in_use_ = 0;
  std::vector<unsigned> order_of_threads_;
  const unsigned* turn_ = nullptr;
  unsigned next_ = 0, done_ = 0;  // turns taken, threads that ended
  Fiber* running_ = nullptr;
  ucontext_t scheduler_;
  Dim grid_, dim_, index_;
  unsigned threads_ = 0;
  Shared shared_[kMostShared]{};
  unsigned num_shared_ = 0;
  std::vector<void*> kept_;  // shared memory of blocks that ran
  Body body_ = nullptr;
  const void* arguments_ = nullptr;
  std::exception_ptr error_;
  bool failed_ = false;
  Turns order_ = Turns::kForwards;
  std::uint64_t seed_ = 0;
  Meeting block_meeting_{}, warp_meetings_[kMostThreads / kWarp]{};
  char launched_ = 0, waited_ = 0;
  [[maybe_unused]] void* scheduler_tsan_ = nullptr;
  std::vector<void*> tsan_fibers_;
  [[maybe_unused]] const void* host_stack_ = nullptr;
  [[maybe_unused]] std::size_t host_stack_bytes_ = 0;
};

}  // namespace kvp::emulation
