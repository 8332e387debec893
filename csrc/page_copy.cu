// torch bindings of the CUDA page copies; the schemas are in page_copy.cpp.
//
// `slot_stride`, if it is not 0, is the caller's word that the offset tables describe
// rows so far apart, from certain bases on: tables live on the device, and looking
// would wait for the stream. The CPU ops look for themselves and ignore it.
#include "kvp/page_copy.cuh"

#include <tuple>
#include <type_traits>

#include "cuda_binding.hpp"
#include "host_rows.hpp"

namespace kvp::binding {
namespace {

using cuda::DeviceHeap;
using cuda::DeviceLayout;

// Queues one kernel and reports a failure to launch it.
template <typename Body>
void launch(const HeapView& view, const Body& body) {
  with_element(view, body);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

DeviceLayout layout_of(const char* op, const Tensor& heap, const HeapView& view,
                       const Tensor& k_offsets, const Tensor& v_offsets,
                       std::int64_t key_base, std::int64_t value_base,
                       std::int64_t slot_stride) {
  require_rows_inside(op, "key_base", view, key_base, slot_stride);
  require_rows_inside(op, "value_base", view, value_base, slot_stride);
  return DeviceLayout{
      view.block_size,
      view.head_dim,
      Argument{op, "k_offsets", k_offsets}.offsets(heap, view.plane_elems),
      Argument{op, "v_offsets", v_offsets}.offsets(heap, view.plane_elems),
      key_base,
      value_base,
      slot_stride};
}

DeviceHeap heap_of(const HeapView& view) {
  return DeviceHeap{view.num_pages, view.page_stride};
}

std::tuple<Tensor, Tensor> gather_tokens_cuda(
    const Tensor& heap, const Tensor& pages, const Tensor& slots,
    const Tensor& k_offsets, const Tensor& v_offsets, std::int64_t block_size,
    std::int64_t key_base, std::int64_t value_base, std::int64_t slot_stride) {
  const char* op = "gather_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const DeviceLayout layout = layout_of(op, heap, view, k_offsets, v_offsets, key_base,
                                        value_base, slot_stride);
  const std::int64_t* page = Argument{op, "pages", pages}.indices(heap, -1);
  const std::int64_t n = pages.size(0);
  const std::int64_t* slot = Argument{op, "slots", slots}.indices(heap, n);
  const DeviceGuard guard(heap.get_device_index());
  Tensor keys = torch::stable::new_empty(heap, {n, view.head_dim});
  Tensor values = torch::stable::new_empty(heap, {n, view.head_dim});
  launch(view, [&](auto* tag) {
    cuda::gather_tokens(read(heap, tag), heap_of(view), page, slot, n, layout,
                        write(keys, tag), write(values, tag), stream_of(heap));
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
  const DeviceLayout layout = layout_of(op, heap, view, k_offsets, v_offsets, key_base,
                                        value_base, slot_stride);
  const std::int64_t* page = Argument{op, "pages", pages}.indices(heap, -1);
  const std::int64_t n = pages.size(0);
  const std::int64_t* slot = Argument{op, "slots", slots}.indices(heap, n);
  Argument{op, "keys", keys}.require_rows(heap, n, view.head_dim);
  Argument{op, "values", values}.require_rows(heap, n, view.head_dim);
  const DeviceGuard guard(heap.get_device_index());
  launch(view, [&](auto* tag) {
    cuda::scatter_tokens(write(heap, tag), heap_of(view), page, slot, n, layout,
                         read(keys, tag), read(values, tag), stream_of(heap));
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
  const DeviceLayout layout = layout_of(op, heap, view, k_offsets, v_offsets, key_base,
                                        value_base, slot_stride);
  const std::int64_t* page = Argument{op, "pages", pages}.indices(heap, -1);
  const std::int64_t n = pages.size(0);
  const std::int64_t* slot = Argument{op, "slots", slots}.indices(heap, n);
  require_host_rows(op, view, heap, rows);
  const std::int64_t* key = Argument{op, "key_rows", key_rows}.indices(heap, n);
  const std::int64_t* value = Argument{op, "value_rows", value_rows}.indices(heap, n);
  const DeviceGuard guard(heap.get_device_index());
  launch(view, [&](auto* tag) {
    using Element = std::remove_pointer_t<decltype(tag)>;
    cuda::fetch_tokens(write(heap, tag), heap_of(view), page, slot, n, layout,
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
  const DeviceLayout layout = layout_of(op, heap, view, k_offsets, v_offsets, key_base,
                                        value_base, slot_stride);
  const std::int64_t* from_page =
      Argument{op, "src_pages", src_pages}.indices(heap, -1);
  const std::int64_t n = src_pages.size(0);
  const std::int64_t* from_slot = Argument{op, "src_slots", src_slots}.indices(heap, n);
  const std::int64_t* to_page = Argument{op, "dst_pages", dst_pages}.indices(heap, n);
  const std::int64_t* to_slot = Argument{op, "dst_slots", dst_slots}.indices(heap, n);
  const DeviceGuard guard(heap.get_device_index());
  launch(view, [&](auto* tag) {
    cuda::move_tokens(write(heap, tag), heap_of(view), from_page, from_slot, to_page,
                      to_slot, n, layout, stream_of(heap));
  });
}

Tensor gather_pages_cuda(const Tensor& heap, const Tensor& page_table,
                         const Tensor& offsets, std::int64_t block_size,
                         std::int64_t base, std::int64_t slot_stride) {
  const char* op = "gather_pages";
  const HeapView view = view_heap(op, heap, block_size);
  const std::int32_t* table =
      Argument{op, "offsets", offsets}.offsets(heap, view.plane_elems);
  require_rows_inside(op, "base", view, base, slot_stride);
  const std::int64_t* pages = Argument{op, "page_table", page_table}.table(heap);
  const DeviceGuard guard(heap.get_device_index());
  Tensor out = torch::stable::new_empty(
      heap, {page_table.size(0), page_table.size(1) * view.block_size, view.head_dim});
  launch(view, [&](auto* tag) {
    cuda::gather_plane(read(heap, tag), heap_of(view), pages, page_table.numel(),
                       view.block_size, view.head_dim, table, {base, slot_stride},
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
