// torch bindings of the page copies on CUDA; the schemas are in page_copy.cpp.
//
// A `slot_stride` above 0 is the caller's promise that the offset tables describe rows
// at this distance, starting at the given bases. The tables are on the device, and reading
// them would wait for the stream. The CPU ops read their tables and ignore it.
#include "kvp/page_copy.cuh"

#include <tuple>
#include <type_traits>

#include "cuda_binding.hpp"
#include "host_rows.hpp"

namespace kvp::binding {
namespace {

// Queues one kernel and reports a failure to launch it.
template <typename Body>
void launch(const HeapView& view, const Body& body) {
  with_element(view, body);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

PageLayout layout_of(const char* op, const Tensor& heap, const HeapView& view,
                     const Tensor& k_offsets, const Tensor& v_offsets,
                     std::int64_t key_base, std::int64_t value_base,
                     std::int64_t slot_stride) {
  require_rows_inside(op, "key_base", view, key_base, slot_stride);
  require_rows_inside(op, "value_base", view, value_base, slot_stride);
  const Argument keys{op, "k_offsets", k_offsets}, values{op, "v_offsets", v_offsets};
  return {
      view.block_size, view.head_dim,
      device_plane(keys.offsets(heap, view.plane_elems), key_base, slot_stride),
      device_plane(values.offsets(heap, view.plane_elems), value_base, slot_stride)};
}

// (page, slot) pairs; the kernels check their range.
TokenSlots tokens_of(const char* op, const char* pages_name, const char* slots_name,
                     const Tensor& heap, const Tensor& pages, const Tensor& slots,
                     std::int64_t size) {
  const std::int64_t* page = Argument{op, pages_name, pages}.indices(heap, size);
  const std::int64_t n = pages.size(0);
  return {page, Argument{op, slots_name, slots}.indices(heap, n), n};
}

std::tuple<Tensor, Tensor> gather_tokens_cuda(
    const Tensor& heap, const Tensor& pages, const Tensor& slots,
    const Tensor& k_offsets, const Tensor& v_offsets, std::int64_t block_size,
    std::int64_t key_base, std::int64_t value_base, std::int64_t slot_stride) {
  const char* op = "gather_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout = layout_of(op, heap, view, k_offsets, v_offsets, key_base,
                                      value_base, slot_stride);
  const TokenSlots tokens = tokens_of(op, "pages", "slots", heap, pages, slots, -1);
  const DeviceGuard guard(heap.get_device_index());
  Tensor keys = torch::stable::new_empty(heap, {tokens.n, view.head_dim});
  Tensor values = torch::stable::new_empty(heap, {tokens.n, view.head_dim});
  launch(view, [&](auto* tag) {
    cuda::gather_tokens(view.paged(read(heap, tag), layout), tokens, write(keys, tag),
                        write(values, tag), stream_of(heap));
  });
  return {keys, values};
}

void scatter_tokens_cuda(const Tensor& heap, const Tensor& pages, const Tensor& slots,
                         const Tensor& keys, const Tensor& values,
                         const Tensor& k_offsets, const Tensor& v_offsets,
                         std::int64_t block_size, std::int64_t key_base,
                         std::int64_t value_base, std::int64_t slot_stride) {
  const char* op = "scatter_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout = layout_of(op, heap, view, k_offsets, v_offsets, key_base,
                                      value_base, slot_stride);
  const TokenSlots tokens = tokens_of(op, "pages", "slots", heap, pages, slots, -1);
  Argument{op, "keys", keys}.require_rows(heap, tokens.n, view.head_dim);
  Argument{op, "values", values}.require_rows(heap, tokens.n, view.head_dim);
  const DeviceGuard guard(heap.get_device_index());
  launch(view, [&](auto* tag) {
    cuda::scatter_tokens(view.paged(write(heap, tag), layout), tokens, read(keys, tag),
                         read(values, tag), stream_of(heap));
  });
}

void fetch_tokens_cuda(const Tensor& heap, const Tensor& pages, const Tensor& slots,
                       const Tensor& rows, const Tensor& key_rows,
                       const Tensor& value_rows, const Tensor& k_offsets,
                       const Tensor& v_offsets, std::int64_t block_size,
                       std::int64_t key_base, std::int64_t value_base,
                       std::int64_t slot_stride) {
  const char* op = "fetch_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout = layout_of(op, heap, view, k_offsets, v_offsets, key_base,
                                      value_base, slot_stride);
  const TokenSlots tokens = tokens_of(op, "pages", "slots", heap, pages, slots, -1);
  require_host_rows(op, view, heap, rows);
  const std::int64_t* key = Argument{op, "key_rows", key_rows}.indices(heap, tokens.n);
  const std::int64_t* value =
      Argument{op, "value_rows", value_rows}.indices(heap, tokens.n);
  const DeviceGuard guard(heap.get_device_index());
  launch(view, [&](auto* tag) {
    using Element = std::remove_pointer_t<decltype(tag)>;
    cuda::fetch_tokens(view.paged(write(heap, tag), layout), tokens,
                       TokenRows<Element>{read(rows, tag), rows.size(0), key, value},
                       stream_of(heap));
  });
}

void move_tokens_cuda(const Tensor& heap, const Tensor& src_pages,
                      const Tensor& src_slots, const Tensor& dst_pages,
                      const Tensor& dst_slots, const Tensor& k_offsets,
                      const Tensor& v_offsets, std::int64_t block_size,
                      std::int64_t key_base, std::int64_t value_base,
                      std::int64_t slot_stride) {
  const char* op = "move_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const PageLayout layout = layout_of(op, heap, view, k_offsets, v_offsets, key_base,
                                      value_base, slot_stride);
  const TokenSlots from =
      tokens_of(op, "src_pages", "src_slots", heap, src_pages, src_slots, -1);
  const TokenSlots to =
      tokens_of(op, "dst_pages", "dst_slots", heap, dst_pages, dst_slots, from.n);
  const DeviceGuard guard(heap.get_device_index());
  launch(view, [&](auto* tag) {
    cuda::move_tokens(view.paged(write(heap, tag), layout), from, to, stream_of(heap));
  });
}

Tensor gather_pages_cuda(const Tensor& heap, const Tensor& page_table,
                         const Tensor& offsets, std::int64_t block_size,
                         std::int64_t base, std::int64_t slot_stride) {
  const char* op = "gather_pages";
  const HeapView view = view_heap(op, heap, block_size);
  require_rows_inside(op, "base", view, base, slot_stride);
  const Plane plane =
      device_plane(Argument{op, "offsets", offsets}.offsets(heap, view.plane_elems),
                   base, slot_stride);
  const PageLayout layout{view.block_size, view.head_dim, plane, plane};
  const PageTable<std::int64_t> table = page_list(op, heap, page_table);
  const DeviceGuard guard(heap.get_device_index());
  Tensor out = torch::stable::new_empty(
      heap, {table.rows, table.pages_per_row * view.block_size, view.head_dim});
  launch(view, [&](auto* tag) {
    cuda::gather_plane(view.paged(read(heap, tag), layout), plane, table,
                       write(out, tag), stream_of(heap));
  });
  return out;
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_IMPL(kvp, CUDA, m) {
  m.impl("gather_tokens", TORCH_BOX(&kvp::binding::gather_tokens_cuda));
  m.impl("scatter_tokens", TORCH_BOX(&kvp::binding::scatter_tokens_cuda));
  m.impl("fetch_tokens", TORCH_BOX(&kvp::binding::fetch_tokens_cuda));
  m.impl("move_tokens", TORCH_BOX(&kvp::binding::move_tokens_cuda));
  m.impl("gather_pages", TORCH_BOX(&kvp::binding::gather_pages_cuda));
}
