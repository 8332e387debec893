// torch binding of kvp/paged_decode.hpp, for CPUs. On CUDA a Triton kernel does this
// (vllm_kvplugins/ops/mixed_attention.py).
#include "kvp/paged_decode.hpp"

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "kvp/paged_decode_check.hpp"
#include "token_check.hpp"

namespace kvp::binding {
namespace {

constexpr const char* kOp = "attend_mixed";

index::ElementType element_type(const char* name, const Tensor& tensor) {
  if (tensor.scalar_type() == ScalarType::Float) return index::ElementType::kFloat32;
  if (tensor.scalar_type() == ScalarType::BFloat16) {
    return index::ElementType::kBFloat16;
  }
  fail(kOp, name, " must be float32 or bfloat16, got ",
       type_name(tensor.scalar_type()));
}

// The type of the elements of pages; fp8 elements are read without a scale.
void set_page_type(decode::Call& call, const Tensor& heap) {
  const ScalarType type = heap.scalar_type();
  if (type == ScalarType::Float8_e4m3fn) {
    call.page_fp8 = Fp8::kE4m3;
  } else if (type == ScalarType::Float8_e5m2) {
    call.page_fp8 = Fp8::kE5m2;
  } else if (type == ScalarType::Float || type == ScalarType::BFloat16) {
    call.page_type = element_type("heap", heap);
  } else {
    fail(kOp, "heap must be float32, bfloat16, float8_e4m3fn or float8_e5m2, got ",
         type_name(type));
  }
}

// Derives the numbers of rows, KV heads and heads per group from the shapes.
void set_sizes(decode::Call& call, const Tensor& queries, const Tensor& page_table) {
  const std::int64_t sequences = page_table.size(0);
  require_shape(kOp, "queries", queries,
                {queries.size(0), queries.size(1), call.head_dim()});
  call.rows = queries.size(0);
  if (call.rows == 0 ? sequences != 0 : sequences % call.rows != 0) {
    fail(kOp, "page_table must have a row for each KV head of ", call.rows,
         " rows, got ", sequences);
  }
  call.kv_heads = call.rows == 0 ? 1 : sequences / call.rows;
  if (call.kv_heads == 0 || queries.size(1) % call.kv_heads != 0) {
    fail(kOp, "queries must have a multiple of ", call.kv_heads,
         " KV heads, got shape ", shape_of(queries));
  }
  call.group = queries.size(1) / call.kv_heads;
}

void set_pages(decode::Call& call, const Tensor& heap, const Tensor& page_table,
               const Tensor& lengths) {
  Argument{kOp, "page_table", page_table}.require_type(ScalarType::Int);
  Argument{kOp, "lengths", lengths}.require_type(ScalarType::Int);
  const std::int64_t per_row = page_table.size(1);
  require_shape(kOp, "page_table", page_table, {call.sequences(), per_row});
  require_shape(kOp, "lengths", lengths, {call.sequences()});
  set_page_type(call, heap);
  call.table = {page_table.const_data_ptr<std::int32_t>(), call.sequences(), per_row};
  call.lengths = lengths.const_data_ptr<std::int32_t>();
  const std::int64_t num_pages = call.kv.num_pages, size = call.kv.block_size();
  const Status status = check_page_lists(call.table, call.lengths, size, num_pages);
  const bool too_long = status.fault == Fault::kLengthOutOfRange;
  require_ok(kOp, too_long ? "lengths" : "page_table", status,
             too_long ? per_row * size : num_pages);
}

void set_coarse(decode::Call& call, const Tensor& keys, const Tensor& values,
                const Tensor& bias, const Tensor& starts, const Tensor& counts) {
  Argument{kOp, "coarse_keys", keys}.require_dim(2);
  const std::int64_t entries = keys.size(0);
  require_shape(kOp, "coarse_keys", keys, {entries, call.head_dim()});
  require_shape(kOp, "coarse_values", values, {entries, call.head_dim()});
  require_shape(kOp, "bias", bias, {entries});
  require_shape(kOp, "starts", starts, {call.sequences()});
  require_shape(kOp, "counts", counts, {call.sequences()});
  Argument{kOp, "coarse_values", values}.require_type(keys.scalar_type());
  Argument{kOp, "bias", bias}.require_type(ScalarType::Float);
  Argument{kOp, "starts", starts}.require_type(ScalarType::Long);
  Argument{kOp, "counts", counts}.require_type(ScalarType::Long);
  call.coarse_keys = keys.const_data_ptr();
  call.coarse_values = values.const_data_ptr();
  call.coarse_type = element_type("coarse_keys", keys);
  call.bias = bias.const_data_ptr<float>();
  call.starts = starts.const_data_ptr<std::int64_t>();
  call.counts = counts.const_data_ptr<std::int64_t>();
  require_ok(kOp, "starts",
             check_runs(call.starts, call.counts, call.sequences(), entries), entries);
  require_ok(kOp, "bias",
             check_bias(call.bias, call.starts, call.counts, call.sequences()), 0);
}

// Returns the outputs, shaped like the queries, and float32 log-sum-exps [rows,
// num_q_heads]. Callers pass all five tensors of coarse entries or none.
std::tuple<Tensor, Tensor> attend_mixed_cpu(
    const Tensor& queries, const Tensor& heap, const Tensor& page_table,
    const Tensor& lengths, const Tensor& k_offsets, const Tensor& v_offsets,
    std::int64_t block_size, double scale, std::optional<Tensor> coarse_keys,
    std::optional<Tensor> coarse_values, std::optional<Tensor> bias,
    std::optional<Tensor> starts, std::optional<Tensor> counts) {
  if (!std::isfinite(scale)) fail(kOp, "scale must be finite, got ", scale);
  const HeapView view = view_pages(kOp, heap, block_size);
  decode::Call call{};
  call.kv = view.paged(heap.const_data_ptr(),
                       checked_layout(kOp, heap, view, k_offsets, v_offsets));
  call.scale = static_cast<float>(scale);
  Argument{kOp, "queries", queries}.require_dim(3);
  Argument{kOp, "page_table", page_table}.require_dim(2);
  set_sizes(call, queries, page_table);
  set_pages(call, heap, page_table, lengths);
  std::vector<std::int64_t> none;
  if (coarse_keys && coarse_values && bias && starts && counts) {
    set_coarse(call, *coarse_keys, *coarse_values, *bias, *starts, *counts);
  } else {
    none.resize(static_cast<std::size_t>(call.sequences()));
    call.starts = call.counts = none.data();
  }
  call.queries = queries.const_data_ptr();
  call.query_type = element_type("queries", queries);
  Tensor out = torch::stable::new_empty(
      queries, {queries.size(0), queries.size(1), queries.size(2)});
  Tensor lse = torch::stable::new_empty(queries, {queries.size(0), queries.size(1)},
                                        ScalarType::Float);
  call.out = out.mutable_data_ptr();
  call.lse = lse.mutable_data_ptr<float>();
  decode::attend_mixed(kvp::select_kernels<decode::Kernels>(), call);
  return {out, lse};
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def(
      "attend_mixed(Tensor queries, Tensor heap, Tensor page_table, Tensor lengths, "
      "Tensor k_offsets, Tensor v_offsets, int block_size, float scale, "
      "Tensor? coarse_keys, Tensor? coarse_values, Tensor? bias, Tensor? starts, "
      "Tensor? counts) "
      "-> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("attend_mixed", TORCH_BOX(&kvp::binding::attend_mixed_cpu));
}
