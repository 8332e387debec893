// torch bindings of the page copies on CPUs. Each function checks its arguments once
// and calls a loop of kvp/page_copy.hpp.
//
// page_copy.cu registers the CUDA versions of the same schemas. Only those read the
// arguments key_base, value_base, base and slot_stride.
#include "kvp/page_copy.hpp"

#include <string>
#include <tuple>
#include <type_traits>

#include "host_rows.hpp"
#include "token_check.hpp"

namespace kvp::binding {
namespace {

std::tuple<Tensor, Tensor> gather_tokens_cpu(
    const Tensor& heap, const Tensor& pages, const Tensor& slots,
    const Tensor& k_offsets, const Tensor& v_offsets, std::int64_t block_size,
    std::int64_t /*key_base*/, std::int64_t /*value_base*/,
    std::int64_t /*slot_stride*/) {
  const char* op = "gather_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout = checked_layout(op, heap, view, k_offsets, v_offsets);
  const TokenSlots from =
      checked_tokens(op, "pages", "slots", heap, view, pages, slots, -1);
  Tensor keys = torch::stable::new_empty(heap, {from.n, view.head_dim});
  Tensor values = torch::stable::new_empty(heap, {from.n, view.head_dim});
  with_element(view, [&](auto* tag) {
    gather_tokens(view.paged(read(heap, tag), layout), from, write(keys, tag),
                  write(values, tag));
  });
  return {keys, values};
}

void scatter_tokens_cpu(const Tensor& heap, const Tensor& pages, const Tensor& slots,
                        const Tensor& keys, const Tensor& values,
                        const Tensor& k_offsets, const Tensor& v_offsets,
                        std::int64_t block_size, std::int64_t /*key_base*/,
                        std::int64_t /*value_base*/, std::int64_t /*slot_stride*/) {
  const char* op = "scatter_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout = checked_layout(op, heap, view, k_offsets, v_offsets);
  const TokenSlots to =
      checked_tokens(op, "pages", "slots", heap, view, pages, slots, -1);
  Argument{op, "keys", keys}.require_rows(heap, to.n, view.head_dim);
  Argument{op, "values", values}.require_rows(heap, to.n, view.head_dim);
  check_writes(op, view, to, nullptr);
  with_element(view, [&](auto* tag) {
    scatter_tokens(view.paged(write(heap, tag), layout), to, read(keys, tag),
                   read(values, tag));
  });
}

const std::int64_t* checked_rows(const char* op, const char* name, const Tensor& heap,
                                 const Tensor& ids, std::int64_t n,
                                 std::int64_t num_rows) {
  const std::int64_t* row = Argument{op, name, ids}.indices(heap, n);
  for (std::int64_t i = 0; i < n; ++i) {
    if (row[i] >= 0 && row[i] < num_rows) continue;
    fail(op, name, "[", i, "] is row ", row[i], ", but there are rows 0 to ",
         num_rows - 1);
  }
  return row;
}

void fetch_tokens_cpu(const Tensor& heap, const Tensor& pages, const Tensor& slots,
                      const Tensor& rows, const Tensor& key_rows,
                      const Tensor& value_rows, const Tensor& k_offsets,
                      const Tensor& v_offsets, std::int64_t block_size,
                      std::int64_t /*key_base*/, std::int64_t /*value_base*/,
                      std::int64_t /*slot_stride*/) {
  const char* op = "fetch_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout = checked_layout(op, heap, view, k_offsets, v_offsets);
  const TokenSlots to =
      checked_tokens(op, "pages", "slots", heap, view, pages, slots, -1);
  require_host_rows(op, view, heap, rows);
  const std::int64_t count = rows.size(0);
  const std::int64_t* key = checked_rows(op, "key_rows", heap, key_rows, to.n, count);
  const std::int64_t* value =
      checked_rows(op, "value_rows", heap, value_rows, to.n, count);
  check_writes(op, view, to, nullptr);
  with_element(view, [&](auto* tag) {
    using Element = std::remove_pointer_t<decltype(tag)>;
    fetch_tokens(view.paged(write(heap, tag), layout), to,
                 TokenRows<Element>{read(rows, tag), count, key, value});
  });
}

void move_tokens_cpu(const Tensor& heap, const Tensor& src_pages,
                     const Tensor& src_slots, const Tensor& dst_pages,
                     const Tensor& dst_slots, const Tensor& k_offsets,
                     const Tensor& v_offsets, std::int64_t block_size,
                     std::int64_t /*key_base*/, std::int64_t /*value_base*/,
                     std::int64_t /*slot_stride*/) {
  const char* op = "move_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout = checked_layout(op, heap, view, k_offsets, v_offsets);
  const TokenSlots from = checked_tokens(op, "src_pages", "src_slots", heap, view,
                                         src_pages, src_slots, -1);
  const TokenSlots to = checked_tokens(op, "dst_pages", "dst_slots", heap, view,
                                       dst_pages, dst_slots, from.n);
  check_writes(op, view, to, &from);
  with_element(view, [&](auto* tag) {
    move_tokens(view.paged(write(heap, tag), layout), from, to);
  });
}

Tensor gather_pages_cpu(const Tensor& heap, const Tensor& page_table,
                        const Tensor& offsets, std::int64_t block_size,
                        std::int64_t /*base*/, std::int64_t /*slot_stride*/) {
  const char* op = "gather_pages";
  const HeapView view = view_heap(op, heap, block_size);
  const Plane plane = make_plane(checked_offsets(op, "offsets", heap, view, offsets),
                                 view.block_size, view.head_dim);
  const PageTable<std::int64_t> table = page_list(op, heap, page_table);
  require_ok(op, "page_table",
             check_pages(table.ids, page_table.numel(), view.num_pages),
             view.num_pages);
  Tensor out = torch::stable::new_empty(
      heap, {table.rows, table.pages_per_row * view.block_size, view.head_dim});
  const PageLayout layout{view.block_size, view.head_dim, plane, plane};
  with_element(view, [&](auto* tag) {
    gather_plane(view.paged(read(heap, tag), layout), plane, table, write(out, tag));
  });
  return out;
}

#define KVP_STRINGIZE_(x) #x
#define KVP_STRINGIZE(x) KVP_STRINGIZE_(x)

// "name=value" pairs separated by ';', for `kvplugins doctor`.
std::string build_info() {
  // ops_version counts changes of the schemas; ops/extension.py has the same.
  std::string info =
      "ops_version=15;build_type=" KVP_BUILD_TYPE ";torch_headers=" KVP_TORCH_VERSION;
#ifdef KVP_WITH_CUDA
  info += ";cuda=1";
#else
  info += ";cuda=0";
#endif
#ifdef _OPENMP
  info += ";openmp=" KVP_STRINGIZE(_OPENMP);
#else
  info += ";openmp=0";
#endif
#ifdef __VERSION__
  info += ";compiler=" __VERSION__;
#endif
  return info;
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY(kvp, m) {
  m.def(
      "gather_tokens(Tensor heap, Tensor pages, Tensor slots, Tensor k_offsets, "
      "Tensor v_offsets, int block_size, int key_base=0, int value_base=0, "
      "int slot_stride=0) -> (Tensor, Tensor)");
  m.def(
      "scatter_tokens(Tensor(a!) heap, Tensor pages, Tensor slots, Tensor keys, "
      "Tensor values, Tensor k_offsets, Tensor v_offsets, int block_size, "
      "int key_base=0, int value_base=0, int slot_stride=0) -> ()");
  m.def(
      "fetch_tokens(Tensor(a!) heap, Tensor pages, Tensor slots, Tensor rows, "
      "Tensor key_rows, Tensor value_rows, Tensor k_offsets, Tensor v_offsets, "
      "int block_size, int key_base=0, int value_base=0, int slot_stride=0) -> ()");
  m.def(
      "move_tokens(Tensor(a!) heap, Tensor src_pages, Tensor src_slots, "
      "Tensor dst_pages, Tensor dst_slots, Tensor k_offsets, Tensor v_offsets, "
      "int block_size, int key_base=0, int value_base=0, int slot_stride=0) -> ()");
  m.def(
      "gather_pages(Tensor heap, Tensor page_table, Tensor offsets, "
      "int block_size, int base=0, int slot_stride=0) -> Tensor");
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("gather_tokens", TORCH_BOX(&kvp::binding::gather_tokens_cpu));
  m.impl("scatter_tokens", TORCH_BOX(&kvp::binding::scatter_tokens_cpu));
  m.impl("fetch_tokens", TORCH_BOX(&kvp::binding::fetch_tokens_cpu));
  m.impl("move_tokens", TORCH_BOX(&kvp::binding::move_tokens_cpu));
  m.impl("gather_pages", TORCH_BOX(&kvp::binding::gather_pages_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&kvp::binding::build_info));
}
