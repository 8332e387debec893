// The arguments that the ops that query indexes share, checked once per call.
#pragma once

#include "index_registry.hpp"

namespace kvp::binding {

// Indexes, queries and keys of one call, checked and locked for its duration.
struct QueryCall {
  std::vector<std::shared_ptr<AnyIndex>> indexes;  // one per request
  std::vector<std::shared_lock<std::shared_mutex>> locks;
  std::vector<KeyView> views;  // [request][head]
  std::vector<float> queries;  // [request][head][group][head_dim]
  std::vector<std::int64_t> leading;  // {requests}, or {}: one, without a dimension
  std::int64_t heads, group, head_dim;
  bool by_page;
  std::int64_t k;
  QueryOptions options;

  std::int64_t tasks() const { return static_cast<std::int64_t>(views.size()); }

  // Of all queries of all heads.
  std::int64_t work_ns() const {
    std::int64_t ns = 0;
    for (const auto& key_index : indexes) ns += key_index->query_ns(options);
    return ns * heads * group;
  }

  // An output of this shape, behind the dimension of requests if queries have one.
  Tensor output(const std::vector<std::int64_t>& each, ScalarType type) const {
    std::vector<std::int64_t> shape = leading;
    shape.insert(shape.end(), each.begin(), each.end());
    return new_on_cpu(shape, type);
  }
};

// What the calling thread's loops observed. A helper thread that selects for the next layer
// while the model computes may wait for cores that the model's own thread finds free.
inline FreeCores& free_cores() {
  static thread_local FreeCores cores;
  return cores;
}

inline void lock_indexes(const char* op, const Tensor& handles, QueryCall& call) {
  const Argument argument{op, "handles", handles};
  argument.require_dim(1);
  argument.require_type(ScalarType::Long);
  argument.require_contiguous();
  if (!handles.is_cpu() || handles.size(0) == 0) {
    fail(op, "handles must be on the CPU and not empty");
  }
  const std::int64_t* handle = handles.const_data_ptr<std::int64_t>();
  std::map<std::int64_t, AnyIndex*> distinct;
  for (std::int64_t i = 0; i < handles.size(0); ++i) {
    call.indexes.push_back(Registry::get().find(op, handle[i]));
    distinct[handle[i]] = call.indexes.back().get();
  }
  // Lock each index once: a thread must not wait for a lock that it holds.
  for (const auto& [number, key_index] : distinct) {
    call.locks.emplace_back(key_index->mutex);
    require_usable(op, *key_index);
  }
}

inline void read_queries(const char* op, const Tensor& queries, QueryCall& call) {
  const AnyIndex& first = *call.indexes.front();
  const Argument argument{op, "queries", queries};
  const std::int64_t lead = queries.dim() - 3;
  if (lead != 0) argument.require_dim(4);
  argument.require_contiguous();
  const auto requests = static_cast<std::int64_t>(call.indexes.size());
  call.heads = first.num_heads();
  call.head_dim = first.settings().head_dim;
  for (const auto& key_index : call.indexes) {
    if (key_index->num_heads() != call.heads ||
        key_index->settings().head_dim != call.head_dim) {
      fail(op, "indexes of one call must have the same heads and head_dim");
    }
  }
  if (!queries.is_cpu() || (lead == 0 ? 1 : queries.size(0)) != requests ||
      queries.size(lead) != call.heads || queries.size(lead + 2) != call.head_dim) {
    fail(op, "queries must be [", requests, ", ", call.heads, ", group, ",
         call.head_dim, "] on the CPU, got ", shape_of(queries));
  }
  call.group = queries.size(lead + 1);
  if (lead == 1) call.leading = {requests};
  call.queries.resize(static_cast<std::size_t>(queries.numel()));
  const ScalarType type = queries.scalar_type();
  for (std::size_t i = 0; i < call.queries.size(); ++i) {
    float& out = call.queries[i];
    if (type == ScalarType::Float) {
      out = static_cast<const float*>(queries.const_data_ptr())[i];
    } else if (type == ScalarType::BFloat16) {
      out = widen(static_cast<const std::uint16_t*>(queries.const_data_ptr())[i]);
    } else {
      fail(op, "queries must be float32 or bfloat16, got ", type_name(type));
    }
    if (!(out >= -1e18f && out <= 1e18f)) {
      fail(op, "element ", i, " of queries is not finite, or exceeds 1e18");
    }
  }
}

inline QueryCall checked_call(const char* op, const Tensor& handles,
                              const Tensor& queries, const Tensor& keys,
                              const Tensor& table, bool by_page, std::int64_t k,
                              std::int64_t max_visits, double visit_ratio) {
  QueryCall call{};
  lock_indexes(op, handles, call);
  read_queries(op, queries, call);
  if (k < 1 || k > 0x7fffffff / 4) fail(op, "k must be positive, got ", k);
  if (max_visits < 0) {
    fail(op, "max_visits must be 0 (no limit) or positive, got ", max_visits);
  }
  if (!(visit_ratio > 0.0 && visit_ratio <= 1.0)) {
    fail(op, "visit_ratio must be above 0 and at most 1, got ", visit_ratio);
  }
  call.by_page = by_page;
  call.k = k;
  call.options = {max_visits, visit_ratio, k};
  const auto requests = static_cast<std::int64_t>(call.indexes.size());
  call.views = view_keys(op, keys, table, requests, call.heads, call.head_dim);
  for (std::int64_t r = 0; r < requests; ++r) {
    require_places(op, *call.indexes[static_cast<std::size_t>(r)],
                   call.views.data() + r * call.heads, by_page);
  }
  return call;
}

}  // namespace kvp::binding
