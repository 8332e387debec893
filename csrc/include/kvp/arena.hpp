// Memory of one index: of the trees of all KV heads, counted together, freed together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <type_traits>
#include <vector>

namespace kvp::index {

// Hands out blocks of a power of two bytes and takes them back for reuse.
//
// Blocks come from slabs that are freed only when the arena is destroyed, so the memory of
// an index is one number. Threads that build the trees of different heads share the arena.
// A block is allocated when an array doubles, so the lock is no bottleneck. Only the
// addresses that a tree gets depend on the timing of threads.
class Arena {
 public:
  static constexpr std::size_t kAlignment = 64;

  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (void* slab : slabs_) std::free(slab);
  }

  void* take(std::size_t bytes) {
    const int size_class = class_of(bytes);
    const std::lock_guard<std::mutex> guard(mutex_);
    if (free_[size_class] != nullptr) {
      void* block = free_[size_class];
      std::memcpy(&free_[size_class], block, sizeof(void*));
      return block;
    }
    return cut(std::size_t{1} << size_class);
  }

  void give(void* block, std::size_t bytes) noexcept {
    const int size_class = class_of(bytes);
    const std::lock_guard<std::mutex> guard(mutex_);
    std::memcpy(block, &free_[size_class], sizeof(void*));
    free_[size_class] = block;
  }

  // Bytes taken from the system, used or not.
  std::int64_t bytes() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return bytes_;
  }

  // The bytes that a request of this size occupies.
  static std::size_t rounded(std::size_t bytes) {
    return std::size_t{1} << class_of(bytes);
  }

 private:
  static constexpr std::size_t kSlab = 64 * 1024;

  static int class_of(std::size_t bytes) {
    int size_class = 6;  // kAlignment
    while ((std::size_t{1} << size_class) < bytes) ++size_class;
    return size_class;
  }

  // A block from the newest slab. If the rest of that slab is too small, it is lost: at
  // most half a slab. Blocks larger than half a slab get a slab of their own.
  void* cut(std::size_t bytes) {
    if (bytes > kSlab / 2) return slab(bytes);
    if (left_ < bytes) {
      top_ = static_cast<char*>(slab(kSlab));
      left_ = kSlab;
    }
    void* block = top_;
    top_ += bytes;
    left_ -= bytes;
    return block;
  }

  void* slab(std::size_t bytes) {
    slabs_.reserve(slabs_.size() + 1);  // so that push_back cannot fail
    void* made = std::aligned_alloc(kAlignment, bytes);
    if (made == nullptr) throw std::bad_alloc();
    slabs_.push_back(made);
    bytes_ += static_cast<std::int64_t>(bytes);
    return made;
  }

  mutable std::mutex mutex_;
  std::vector<void*> slabs_;
  void* free_[64] = {};
  char* top_ = nullptr;
  std::size_t left_ = 0;
  std::int64_t bytes_ = 0;
};

// A growing array of plain values in an arena. New entries are zero.
template <typename T>
class Array {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit Array(Arena& arena) : arena_(&arena) {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  Array(Array&& other) noexcept
      : arena_(other.arena_),
        data_(other.data_),
        size_(other.size_),
        capacity_(other.capacity_) {
    other.data_ = nullptr;
    other.size_ = other.capacity_ = 0;
  }
  ~Array() {
    if (data_ != nullptr) arena_->give(data_, byte_size(capacity_));
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::int64_t size() const { return size_; }
  T& operator[](std::int64_t i) { return data_[i]; }
  const T& operator[](std::int64_t i) const { return data_[i]; }

  void push(T value) {
    resize(size_ + 1);
    data_[size_ - 1] = value;
  }

  // Gives the memory back.
  void clear() {
    if (data_ != nullptr) arena_->give(data_, byte_size(capacity_));
    data_ = nullptr;
    size_ = capacity_ = 0;
  }

  void resize(std::int64_t size) {
    if (size > capacity_) grow(size);
    if (size > size_) {
      std::memset(static_cast<void*>(data_ + size_), 0, byte_size(size - size_));
    }
    size_ = size;
  }

 private:
  static std::size_t byte_size(std::int64_t n) {
    return static_cast<std::size_t>(n) * sizeof(T);
  }

  void grow(std::int64_t size) {
    const std::size_t bytes = Arena::rounded(byte_size(size));
    T* grown = static_cast<T*>(arena_->take(bytes));
    if (data_ != nullptr) {
      std::memcpy(static_cast<void*>(grown), data_, byte_size(size_));
      arena_->give(data_, byte_size(capacity_));
    }
    data_ = grown;
    capacity_ = static_cast<std::int64_t>(bytes / sizeof(T));
  }

  Arena* arena_;
  T* data_ = nullptr;
  std::int64_t size_ = 0;
  std::int64_t capacity_ = 0;
};

}  // namespace kvp::index
