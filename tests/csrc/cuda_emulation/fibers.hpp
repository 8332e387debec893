// Runs the threads of one CUDA block as fibers of one thread of the host: each until
// it waits for others, in an order that the test chooses. Shared memory is the heap's,
// new for each block, so that AddressSanitizer sees what lies beyond an array.
//
// With ThreadSanitizer every CUDA thread is a thread to it too, and what orders them
// is what orders them on a GPU: barriers, atomics on one address, the launch's begin
// and end. Kernels that race are then reported as such, on shared and global memory.
// What ThreadSanitizer must not see here is in functions marked KVP_UNSEEN.
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

// What a kernel's __trap() ends a launch with.
struct Trap : std::runtime_error {
  Trap() : std::runtime_error("a kernel trapped") {}
};

// Threads that wait for each other in different places, for ever.
struct Deadlock : std::runtime_error {
  Deadlock() : std::runtime_error("threads of a block wait in different places") {}
};

// In which order blocks, and threads of a block, take their turns.
enum class Turns { kForwards, kBackwards, kShuffled };

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// What orders threads of different fibers; acquired by those that wait there.
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
  unsigned mask;                // lanes that it waits for
  unsigned long long shown[2];  // what it shows to them, in even and odd rounds
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

  // Runs a whole grid. Throws what a thread threw; the others are then abandoned.
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
    free_shared();  // before, ThreadSanitizer would see no order of use and end
    destroy_fibers();
  }

  void set_turns(Turns order, std::uint64_t seed) { order_ = order, seed_ = seed; }

  // Below: called by kernels.
  KVP_UNSEEN Dim thread_index() const {
    const unsigned n = running_->number;
    return {n % dim_.x, n / dim_.x % dim_.y, n / dim_.x / dim_.y};
  }
  KVP_UNSEEN Dim block_index() const { return index_; }
  KVP_UNSEEN Dim block_dim() const { return dim_; }
  KVP_UNSEEN Dim grid_dim() const { return grid_; }

  // The block's memory for one declaration of shared memory; filled with what no
  // kernel should count on.
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

  // Shows a value to the lanes of a mask and waits for them; `ordered` also orders
  // their memory accesses, as __syncwarp does and shuffles do not.
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

  // What a lane of this warp showed at the meeting that just ended; the own value if
  // the lane was not there.
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

  // Lets the lanes go on if all that one waits for are there.
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

  // Lets all go on if all that have not ended wait at the barrier.
  KVP_UNSEEN bool end_barrier() {
    for (unsigned t = 0; t < threads_; ++t) {
      if (fibers_[t].wait == Wait::kWarp) return false;
    }
    for (unsigned t = 0; t < threads_; ++t) {
      if (fibers_[t].wait == Wait::kBlock) fibers_[t].wait = Wait::kNot;
    }
    return true;
  }

  // A stack's first function. Runs one thread after the other until one waits; then
  // the scheduler takes another stack for those that have not begun.
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
    return false;  // to it a fiber is a thread
#else
    if (failed_ || next_ == threads_) return false;
    running_ = &fibers_[turn_[next_++]];
    return true;
#endif
  }

  KVP_UNSEEN void leave() {
    to_scheduler(running_);
    std::abort();  // nobody enters it again
  }

  KVP_UNSEEN void start(Fiber& fiber, unsigned block_number) {
    // Other threads share a stack in the next block: those that do are ordered in the
    // eyes of ThreadSanitizer.
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

  // When all blocks have run: a new fiber may get a destroyed one's number, by which
  // ThreadSanitizer would take it for the same thread.
  void destroy_fibers() {
#if defined(__SANITIZE_THREAD__)
    for (void* fiber : tsan_fibers_) __tsan_destroy_fiber(fiber);
    tsan_fibers_.clear();
#endif
  }

  // Forgets threads that have not ended: nothing in a kernel has a destructor.
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
