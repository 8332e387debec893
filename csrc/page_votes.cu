// torch binding of page votes on CUDA; the schema is in page_votes.cpp.
#include "kvp/page_votes.cuh"

#include "cuda_binding.hpp"
#include "vote_check.hpp"

namespace kvp::binding {
namespace {

Tensor page_votes_cuda(const Tensor& heap, const Tensor& page_table,
                       const Tensor& positions, const Tensor& queries,
                       const Tensor& query_positions,
                       const std::optional<Tensor>& own_keys, const Tensor& k_offsets,
                       std::int64_t block_size, double scale, bool largest,
                       std::int64_t base, std::int64_t slot_stride) {
  const char* op = "page_votes";
  const VoteArguments of = view_votes(op, heap, page_table, positions, queries,
                                      query_positions, own_keys, k_offsets, block_size);
  require_rows_inside(op, "base", of.view, base, slot_stride);
  const Plane keys = device_plane(of.k_offsets, base, slot_stride);
  const PageLayout layout{of.view.block_size, of.view.head_dim, keys, keys};
  const DeviceGuard guard(heap.get_device_index());
  Tensor votes = new_votes(heap, of);
  with_vote_element(heap, [&](auto* tag) {
    using Element = std::remove_pointer_t<decltype(tag)>;
    const cuda::VoteCall<Element> call{of.kv_heads,
                                       of.group,
                                       of.num_queries,
                                       of.slots,
                                       static_cast<float>(scale),
                                       largest,
                                       read(queries, tag),
                                       of.query_positions,
                                       own_keys ? read(*own_keys, tag) : nullptr,
                                       of.view.paged(read(heap, tag), layout),
                                       of.table,
                                       of.positions,
                                       votes.mutable_data_ptr<float>()};
    Tensor scratch =
        torch::stable::new_empty(heap, {cuda::vote_scratch(call)}, ScalarType::Float);
    cuda::vote(call, scratch.mutable_data_ptr<float>(), stream_of(heap));
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return votes;
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_IMPL(kvp, CUDA, m) {
  m.impl("page_votes", TORCH_BOX(&kvp::binding::page_votes_cuda));
}
