// The indexes that Python refers to by handles, and the checks of their keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "binding.hpp"
#include "kvp/index_forest.hpp"
#include "kvp/votes.hpp"
#include "quantized_check.hpp"

namespace kvp::binding {

using index::BadKey;
using index::KeyView;
using index::QueryOptions;
using index::Scored;
using index::Scratch;
using index::Settings;
using index::TopK;
using index::VoteScratch;

using TakeBest = std::function<void(std::int64_t, TopK&, std::int64_t)>;

// What the ops call; every kind of index implements it.
class AnyIndex {
 public:
  virtual ~AnyIndex() = default;
  virtual const Settings& settings() const = 0;
  virtual std::int64_t num_heads() const = 0;
  virtual std::int64_t num_keys() const = 0;
  virtual std::int64_t num_pages(std::int64_t head) const = 0;
  virtual std::int64_t memory_bytes() const = 0;
  virtual std::int64_t place(std::int64_t head, std::int64_t slot) const = 0;
  virtual BadKey append(const std::vector<KeyView>& heads, std::int64_t n) = 0;
  virtual std::string integrity(const std::vector<KeyView>& heads,
                                bool by_page) const = 0;
  // About how long one query of a KV head takes.
  virtual std::int64_t query_ns(const QueryOptions& options) const = 0;
  // Calls take(g, top, visits) for each query of a KV head.
  virtual void query(std::int64_t head, const KeyView& keys, bool by_page,
                     const float* queries, std::int64_t group,
                     const QueryOptions& options, Scratch& scratch, TopK& top,
                     const TakeBest& take) const = 0;
  virtual void vote(std::int64_t head, const KeyView& keys, bool by_page,
                    const float* queries, std::int64_t group, float scale,
                    const QueryOptions& options, VoteScratch& scratch) const = 0;
  virtual std::int64_t pages(std::int64_t head,
                             const std::vector<std::vector<Scored>>& best,
                             std::int64_t max_pages, std::int64_t* out) const = 0;
  // Whether keys are in the order of pages: what vote_pages needs.
  virtual bool has_ordered_pages() const = 0;
  // Keys that have pages for good, and the key of their row; the others lie in the order of
  // arrival.
  virtual std::int64_t ordered_keys() const = 0;
  virtual std::int64_t slot_of(std::int64_t head, std::int64_t row) const = 0;
  // Keys lie in the order of rows.
  virtual void vote_pages(std::int64_t head, const KeyView& keys, const float* queries,
                          std::int64_t group, float scale, const QueryOptions& options,
                          VoteScratch& scratch) const = 0;

  mutable std::shared_mutex mutex;
  bool broken = false;  // an append ran out of memory half-way
};

template <typename Tree>
class OneIndex final : public AnyIndex {
  static constexpr bool kCoded = std::is_same_v<Tree, index::CodeIndex>;
  static constexpr bool kOrdered = !std::is_same_v<Tree, index::DciTree>;

 public:
  OneIndex(const Settings& settings, std::int64_t num_heads)
      : forest_(settings, num_heads, kvp::select_kernels<index::Kernels>()) {}

  const Settings& settings() const override { return forest_.settings(); }
  std::int64_t num_heads() const override { return forest_.num_heads(); }
  std::int64_t num_keys() const override { return forest_.num_keys(); }
  std::int64_t num_pages(std::int64_t head) const override {
    return forest_.tree(head).num_pages();
  }
  std::int64_t memory_bytes() const override { return forest_.memory_bytes(); }
  std::int64_t place(std::int64_t head, std::int64_t slot) const override {
    return forest_.tree(head).place(slot);
  }
  BadKey append(const std::vector<KeyView>& heads, std::int64_t n) override {
    return forest_.append(heads, n);
  }
  std::string integrity(const std::vector<KeyView>& heads,
                        bool by_page) const override {
    return forest_.integrity(heads, by_page);
  }
  std::int64_t query_ns(const QueryOptions& options) const override {
    return forest_.tree(0).query_ns(options);
  }
  void query(std::int64_t head, const KeyView& keys, bool by_page, const float* queries,
             std::int64_t group, const QueryOptions& options, Scratch& scratch,
             TopK& top, const TakeBest& take) const override {
    index::query_group(forest_.tree(head), keys, by_page, queries, group,
                       settings().head_dim, options, scratch, top, take);
  }
  void vote(std::int64_t head, const KeyView& keys, bool by_page, const float* queries,
            std::int64_t group, float scale, const QueryOptions& options,
            VoteScratch& scratch) const override {
    index::vote(forest_.tree(head), keys, by_page, queries, group, settings().head_dim,
                scale, options, scratch);
  }
  std::int64_t pages(std::int64_t head, const std::vector<std::vector<Scored>>& best,
                     std::int64_t max_pages, std::int64_t* out) const override {
    return index::pages_of(forest_.tree(head), settings().page_size, best, max_pages,
                           out);
  }
  bool has_ordered_pages() const override { return kOrdered; }
  std::int64_t ordered_keys() const override {
    if constexpr (kCoded) return forest_.tree(0).paged();
    return 0;
  }
  std::int64_t slot_of(std::int64_t head, std::int64_t row) const override {
    if constexpr (kCoded) return forest_.tree(head).slot_of(row);
    return row;
  }
  void vote_pages(std::int64_t head, const KeyView& keys, const float* queries,
                  std::int64_t group, float scale, const QueryOptions& options,
                  VoteScratch& scratch) const override {
    if constexpr (kOrdered) {
      index::vote_pages(forest_.tree(head), keys, queries, group, settings().head_dim,
                        scale, options, scratch);
    }
  }

 private:
  index::Forest<Tree> forest_;
};

// Indexes by handle. A handle is never reused.
class Registry {
 public:
  static Registry& get() {
    static Registry registry;
    return registry;
  }

  std::int64_t add(std::shared_ptr<AnyIndex> index) {
    const std::lock_guard<std::mutex> guard(mutex_);
    indexes_[++last_] = std::move(index);
    return last_;
  }

  bool remove(std::int64_t handle) {
    std::shared_ptr<AnyIndex> removed;  // destroyed after the lock is released
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = indexes_.find(handle);
    if (found == indexes_.end()) return false;
    removed = std::move(found->second);
    indexes_.erase(found);
    return true;
  }

  std::shared_ptr<AnyIndex> find(const char* op, std::int64_t handle) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = indexes_.find(handle);
    if (found == indexes_.end()) fail(op, "there is no index ", handle);
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::int64_t, std::shared_ptr<AnyIndex>> indexes_;
  std::int64_t last_ = 0;
};

inline void require_usable(const char* op, const AnyIndex& key_index) {
  if (key_index.broken) {
    fail(op, "an earlier append ran out of memory; destroy this index");
  }
}

// What a tensor's last dimension holds: head_dim elements, or the bytes of quantized rows.
// Fp8 elements are read as rows without a scale.
inline void set_elements(const char* op, const Tensor& keys, KeyView& view) {
  const ScalarType type = keys.scalar_type();
  const std::int64_t last = keys.dim() - 1, width = keys.size(last);
  if (type == ScalarType::Byte) {
    view.rows = quantized_rows_of(op, "keys", keys, view.head_dim);
    return;
  }
  const bool fp8 = type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2;
  if (!fp8 && type != ScalarType::Float && type != ScalarType::BFloat16) {
    fail(op, "keys must be float32, bfloat16 or fp8, or quantized (uint8), got ",
         type_name(type));
  }
  if (width != view.head_dim) {
    fail(op, "keys must have ", view.head_dim, " elements, got ", shape_of(keys));
  }
  if (fp8) {
    view.rows = fp8_rows_of(op, "keys", keys);
    return;
  }
  view.type = type == ScalarType::Float ? index::ElementType::kFloat32
                                        : index::ElementType::kBFloat16;
  view.dim_stride = keys.stride(last);
}

// Keys of all (request, head), from [requests, heads, n, head_dim] of any strides,
// or from pages [num_pages, block_size, head_dim] and a table of page ids
// [requests, heads, pages]. Quantized keys have bytes of rows instead of head_dim.
inline std::vector<KeyView> view_keys(const char* op, const Tensor& keys,
                                      const Tensor& table, std::int64_t requests,
                                      std::int64_t heads, std::int64_t head_dim) {
  const Argument argument{op, "keys", keys};
  if (!keys.is_cpu()) fail(op, "keys must be on the CPU");
  const bool paged = keys.dim() == 3;
  if (!paged) argument.require_dim(4);
  const std::int64_t last = keys.dim() - 1;
  KeyView view;
  view.head_dim = head_dim;
  set_elements(op, keys, view);
  if (keys.size(last - 1) > 0x7fffffff ||
      (!paged && (keys.size(0) != requests || keys.size(1) != heads))) {
    fail(op, "keys must be [", requests, ", ", heads, ", n, ", head_dim,
         "] or pages [num_pages, block_size, ", head_dim, "], got ", shape_of(keys));
  }
  view.slots_per_page = std::max<std::int64_t>(keys.size(last - 1), 1);
  view.slot_stride = keys.stride(last - 1);
  std::int64_t per_row = 0;
  const std::int64_t* ids = nullptr;
  if (paged) {
    const Argument rows{op, "table", table};
    rows.require_dim(3);
    rows.require_type(ScalarType::Long);
    rows.require_contiguous();
    if (!table.is_cpu() || table.size(0) != requests || table.size(1) != heads) {
      fail(op, "table must be [", requests, ", ", heads, ", pages] on the CPU, got ",
           shape_of(table));
    }
    ids = table.const_data_ptr<std::int64_t>();
    per_row = table.size(2);
    for (std::int64_t i = 0; i < table.numel(); ++i) {
      if (ids[i] < 0 || ids[i] >= keys.size(0)) {
        fail(op, "table entry ", i, " is page ", ids[i], ", but keys has pages 0 to ",
             keys.size(0) - 1);
      }
    }
    view.page_stride = keys.stride(0);
    view.num_places = per_row * keys.size(1);
  } else {
    view.num_places = keys.size(2);
  }
  const char* base = static_cast<const char*>(keys.const_data_ptr());
  const auto bytes = static_cast<std::int64_t>(keys.element_size());
  std::vector<KeyView> views;
  for (std::int64_t request = 0; request < requests; ++request) {
    for (std::int64_t head = 0; head < heads; ++head) {
      view.base = base;
      if (paged) {
        view.table = ids + (request * heads + head) * per_row;
      } else {
        view.base = base + (request * keys.stride(0) + head * keys.stride(1)) * bytes;
      }
      views.push_back(view);
    }
  }
  return views;
}

// Checks that the keys of every head include all places that a query reads.
inline void require_places(const char* op, const AnyIndex& key_index,
                           const KeyView* views, bool by_page) {
  for (std::int64_t head = 0; head < key_index.num_heads(); ++head) {
    const std::int64_t needed =
        by_page ? key_index.num_pages(head) * key_index.settings().page_size
                : key_index.num_keys();
    if (views[head].num_places < needed) {
      fail(op, "keys has ", views[head].num_places, " slots for head ", head,
           ", the index reads ", needed);
    }
  }
}

}  // namespace kvp::binding
