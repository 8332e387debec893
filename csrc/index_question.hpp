// The arguments that all queries of an index share, checked once per call.
#pragma once

#include "index_registry.hpp"

namespace kvp::binding {

// Indexes, queries and keys of one call, checked and locked for its duration.
struct Question {
  std::vector<std::shared_ptr<AnyIndex>> indexes;  // one per request
  std::vector<std::shared_lock<std::shared_mutex>> locks;
  std::vector<KeyView> views;  // [request][head]
  std::vector<float> queries;  // [request][head][group][head_dim]
  std::int64_t heads, group, head_dim;
  bool by_page;
  std::int64_t k;
  QueryOptions options;

  std::int64_t tasks() const { return static_cast<std::int64_t>(views.size()); }
};

inline void lock_indexes(const char* op, const Tensor& handles, Question& question) {
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
    question.indexes.push_back(Registry::get().find(op, handle[i]));
    distinct[handle[i]] = question.indexes.back().get();
  }
  // Lock each index once: a thread must not wait for a lock that it holds.
  for (const auto& [number, found] : distinct) {
    question.locks.emplace_back(found->mutex);
    require_whole(op, *found);
  }
}

inline void read_queries(const char* op, const Tensor& queries, Question& question) {
  const AnyIndex& first = *question.indexes.front();
  const Argument argument{op, "queries", queries};
  argument.require_dim(4);
  argument.require_contiguous();
  const auto requests = static_cast<std::int64_t>(question.indexes.size());
  question.heads = first.num_heads();
  question.head_dim = first.settings().head_dim;
  for (const auto& found : question.indexes) {
    if (found->num_heads() != question.heads ||
        found->settings().head_dim != question.head_dim) {
      fail(op, "indexes of one call must have the same heads and head_dim");
    }
  }
  if (!queries.is_cpu() || queries.size(0) != requests ||
      queries.size(1) != question.heads || queries.size(3) != question.head_dim) {
    fail(op, "queries must be [", requests, ", ", question.heads, ", group, ",
         question.head_dim, "] on the CPU, got ", shape_of(queries));
  }
  question.group = queries.size(2);
  question.queries.resize(static_cast<std::size_t>(queries.numel()));
  const ScalarType type = queries.scalar_type();
  for (std::size_t i = 0; i < question.queries.size(); ++i) {
    float& out = question.queries[i];
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

inline Question ask(const char* op, const Tensor& handles, const Tensor& queries,
                    const Tensor& keys, const Tensor& table, bool by_page,
                    std::int64_t k, std::int64_t max_visits, double visit_ratio) {
  Question question{};
  lock_indexes(op, handles, question);
  read_queries(op, queries, question);
  if (k < 1 || k > 0x7fffffff / 4) fail(op, "k must be positive, got ", k);
  if (max_visits < 0) {
    fail(op, "max_visits must be 0 (no limit) or positive, got ", max_visits);
  }
  if (!(visit_ratio > 0.0 && visit_ratio <= 1.0)) {
    fail(op, "visit_ratio must be above 0 and at most 1, got ", visit_ratio);
  }
  question.by_page = by_page;
  question.k = k;
  question.options = {max_visits, visit_ratio};
  const auto requests = static_cast<std::int64_t>(question.indexes.size());
  question.views =
      view_keys(op, keys, table, requests, question.heads, question.head_dim);
  for (std::int64_t r = 0; r < requests; ++r) {
    require_places(op, *question.indexes[static_cast<std::size_t>(r)],
                   question.views.data() + r * question.heads, by_page);
  }
  return question;
}

}  // namespace kvp::binding
