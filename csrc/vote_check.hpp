// The checks of page_votes that its CPU and CUDA bindings share: everything except the
// contents of index tensors.
#pragma once

#include <cstdint>
#include <optional>

#include "binding.hpp"
#include "kvp/elements.hpp"

namespace kvp::binding {

struct VoteArguments {
  HeapView view;
  std::int64_t kv_heads, group, num_queries, slots;
  PageTable<std::int64_t> table;
  const std::int64_t* positions;
  const std::int64_t* query_positions;
  const std::int32_t* k_offsets;
};

// Calls body with a null pointer of the heap's type, bfloat16 and float16 as bits.
template <typename Body>
void with_vote_element(const Tensor& heap, const Body& body) {
  switch (heap.scalar_type()) {
    case ScalarType::Float:
      return body(static_cast<float*>(nullptr));
    case ScalarType::Half:
      return body(static_cast<Float16*>(nullptr));
    default:  // view_heap allows no other
      return body(static_cast<BFloat16*>(nullptr));
  }
}

inline VoteArguments view_votes(const char* op, const Tensor& heap,
                                const Tensor& page_table, const Tensor& positions,
                                const Tensor& queries, const Tensor& query_positions,
                                const std::optional<Tensor>& own_keys,
                                const Tensor& k_offsets, std::int64_t block_size) {
  const HeapView view = view_heap(op, heap, block_size);
  if (view.head_dim > kMaxHeadDim) {
    fail(op, "head_dim must be at most ", kMaxHeadDim, ", got ", view.head_dim);
  }
  const auto require_numbers = [&](const Argument& argument, std::int64_t first) {
    argument.require_device_of(heap);
    argument.require_dim(3);
    argument.require_type(heap.scalar_type());
    argument.require_contiguous();
    if (argument.tensor.size(2) == view.head_dim &&
        (first < 0 || argument.tensor.size(0) == first)) {
      return;
    }
    fail(op, argument.name, " must have head_dim ", view.head_dim,
         " and a row per head, got shape ", shape_of(argument.tensor));
  };
  VoteArguments arguments{};
  arguments.view = view;
  arguments.table = page_list(op, heap, page_table);
  arguments.positions = Argument{op, "positions", positions}.table(heap);
  arguments.kv_heads = arguments.table.rows;
  arguments.slots = positions.size(1);
  const std::int64_t room = arguments.table.pages_per_row * block_size;
  if (positions.size(0) != arguments.kv_heads || arguments.slots > room) {
    fail(op, "positions must be of at most ", room, " slots of ", arguments.kv_heads,
         " KV heads, got shape ", shape_of(positions));
  }
  require_numbers({op, "queries", queries}, -1);
  arguments.num_queries = queries.size(1);
  if (arguments.kv_heads == 0 || queries.size(0) % arguments.kv_heads != 0) {
    fail(op, "queries must be of a multiple of ", arguments.kv_heads,
         " KV heads, got shape ", shape_of(queries));
  }
  arguments.group = queries.size(0) / arguments.kv_heads;
  arguments.query_positions = Argument{op, "query_positions", query_positions}.indices(
      heap, arguments.num_queries);
  if (own_keys) {
    require_numbers({op, "own_keys", *own_keys}, arguments.kv_heads);
    if (own_keys->size(1) != arguments.num_queries) {
      fail(op, "own_keys must have ", arguments.num_queries,
           " rows per head, got shape ", shape_of(*own_keys));
    }
  }
  arguments.k_offsets =
      Argument{op, "k_offsets", k_offsets}.offsets(heap, view.plane_elems);
  return arguments;
}

inline Tensor new_votes(const Tensor& heap, const VoteArguments& arguments) {
  return torch::stable::new_empty(
      heap, {arguments.kv_heads, arguments.group, arguments.slots}, ScalarType::Float);
}

}  // namespace kvp::binding
