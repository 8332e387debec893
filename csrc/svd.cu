// torch bindings of the CUDA reconstruction of low-rank factors; schemas are in svd.cpp.
//
// Factors lie on the device, and what says where each record is (offsets, ranks,
// tokens, which) on the host: sizes of results follow from it, and records are checked
// without waiting for the stream. Pages and slots are not.
#include "kvp/low_rank.cuh"

#include <vector>

#include "cuda_binding.hpp"
#include "factor_check.hpp"

namespace kvp::binding {
namespace {

// The work of all chosen matrices, copied to the device behind what is queued there.
struct DeviceWork {
  Tensor memory;
  std::int64_t n;

  const cuda::MadeRows* list() const {
    return static_cast<const cuda::MadeRows*>(memory.const_data_ptr());
  }
};

template <typename Factor>
DeviceWork device_work(const char* op, const Chosen& chosen) {
  const std::vector<Index> first = chosen.row_offsets();
  std::vector<cuda::MadeRows> list;
  for (Index i = 0; i < chosen.count; ++i) {
    cuda::list_rows(chosen.shape<Factor>(i), chosen.all.offsets[chosen.which[i]],
                    first[static_cast<std::size_t>(i)], list);
  }
  const auto n = static_cast<std::int64_t>(list.size());
  const std::size_t bytes = list.size() * sizeof(cuda::MadeRows);
  const Tensor& factors = chosen.all.tensor;
  Tensor memory = torch::stable::new_empty(
      factors, {static_cast<std::int64_t>(bytes / sizeof(std::int64_t))},
      ScalarType::Long);
  if (bytes == 0) return {memory, n};
  // From pageable memory: `list` may go as soon as the call returns.
  const cudaError_t error =
      cudaMemcpyAsync(memory.mutable_data_ptr(), list.data(), bytes,
                      cudaMemcpyHostToDevice, stream_of(factors));
  if (error != cudaSuccess) fail(op, "CUDA error: ", cudaGetErrorString(error));
  return {memory, n};
}

// Makes all rows into `target`.
template <typename Target>
void make_rows(const char* op, const Chosen& chosen, const Target& target) {
  const Tensor& factors = chosen.all.tensor;
  with_number(Argument{op, chosen.all.name, factors}, [&](auto* tag) {
    using Factor = std::remove_pointer_t<decltype(tag)>;
    const DeviceWork work = device_work<Factor>(op, chosen);
    cuda::reconstruct(read(factors, tag), work.list(), work.n, chosen.all.head_dim,
                      target, stream_of(factors));
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor reconstruct_cuda(const Tensor& factors, const Tensor& offsets,
                        const Tensor& ranks, const Tensor& tokens,
                        std::int64_t head_dim, const Tensor& which, bool narrow) {
  const char* op = "reconstruct";
  const Chosen chosen(op,
                      checked_factors(op, "factors", factors, offsets, ranks, tokens,
                                      head_dim, &factors),
                      which);
  const DeviceGuard guard(factors.get_device_index());
  Tensor rows =
      torch::stable::new_empty(factors, {chosen.row_offsets().back(), head_dim},
                               narrow ? ScalarType::BFloat16 : ScalarType::Float);
  with_number(Argument{op, "rows", rows}, [&](auto* tag) {
    using Element = std::remove_pointer_t<decltype(tag)>;
    make_rows(op, chosen, cuda::RowTarget<Element>{write(rows, tag), head_dim});
  });
  return rows;
}

void reconstruct_tokens_cuda(const Tensor& heap, const Tensor& pages,
                             const Tensor& slots, const Tensor& k_offsets,
                             const Tensor& v_offsets, std::int64_t block_size,
                             const Tensor& key_factors, const Tensor& key_starts,
                             const Tensor& key_ranks, const Tensor& value_factors,
                             const Tensor& value_starts, const Tensor& value_ranks,
                             const Tensor& tokens, const Tensor& which) {
  const char* op = "reconstruct_tokens";
  const HeapView view = view_heap(op, heap, block_size);
  const Chosen keys(op,
                    checked_factors(op, "keys", key_factors, key_starts, key_ranks,
                                    tokens, view.head_dim, &heap),
                    which);
  const Chosen values(op,
                      checked_factors(op, "values", value_factors, value_starts,
                                      value_ranks, tokens, view.head_dim, &heap),
                      which);
  const std::int64_t total = keys.row_offsets().back();
  const std::int64_t* page = Argument{op, "pages", pages}.indices(heap, total);
  const std::int64_t* slot = Argument{op, "slots", slots}.indices(heap, total);
  const std::int32_t* key_places =
      Argument{op, "k_offsets", k_offsets}.offsets(heap, view.plane_elems);
  const std::int32_t* value_places =
      Argument{op, "v_offsets", v_offsets}.offsets(heap, view.plane_elems);
  const DeviceGuard guard(heap.get_device_index());
  with_number(Argument{op, "heap", heap}, [&](auto* tag) {
    using Element = std::remove_pointer_t<decltype(tag)>;
    const auto fill = [&](const Chosen& chosen, const std::int32_t* places) {
      make_rows(op, chosen,
                cuda::SlotTarget<Element>{write(heap, tag),
                                          {view.num_pages, view.page_stride},
                                          view.block_size,
                                          view.head_dim,
                                          places,
                                          page,
                                          slot});
    };
    fill(keys, key_places);
    fill(values, value_places);
  });
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_IMPL(kvp, CUDA, m) {
  m.impl("reconstruct", TORCH_BOX(&kvp::binding::reconstruct_cuda));
  m.impl("reconstruct_tokens", TORCH_BOX(&kvp::binding::reconstruct_tokens_cuda));
}
