// torch binding of kvp/page_votes.hpp. The CUDA version is in page_votes.cu; only that
// one reads the arguments base and slot_stride.
#include "kvp/page_votes.hpp"

#include "token_check.hpp"
#include "vote_check.hpp"

namespace kvp::binding {
namespace {

constexpr const char* kOp = "page_votes";

// The pages that hold slots.
void require_pages(const VoteArguments& of) {
  const std::int64_t used = (of.slots + of.view.block_size - 1) / of.view.block_size;
  for (std::int64_t head = 0; head < of.kv_heads; ++head) {
    Status status = check_pages(of.table.row(head), used, of.view.num_pages);
    if (!status.ok()) status.index += head * of.table.pages_per_row;
    require_ok(kOp, "page_table", status, of.view.num_pages);
  }
}

Tensor page_votes_cpu(const Tensor& heap, const Tensor& page_table,
                      const Tensor& positions, const Tensor& queries,
                      const Tensor& query_positions,
                      const std::optional<Tensor>& own_keys, const Tensor& k_offsets,
                      std::int64_t block_size, double scale, bool largest,
                      std::int64_t /*base*/, std::int64_t /*slot_stride*/) {
  const VoteArguments of = view_votes(kOp, heap, page_table, positions, queries,
                                      query_positions, own_keys, k_offsets, block_size);
  require_pages(of);
  const std::int32_t* offsets =
      checked_offsets(kOp, "k_offsets", heap, of.view, k_offsets);
  // Votes read no values.
  const PageLayout layout =
      make_layout(offsets, offsets, of.view.block_size, of.view.head_dim);
  Tensor votes = new_votes(heap, of);
  with_vote_element(heap, [&](auto* tag) {
    using Element = std::remove_pointer_t<decltype(tag)>;
    const page_votes::Call<Element> call{of.kv_heads,
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
    page_votes::vote(kvp::select_kernels<page_votes::Kernels>(), call);
  });
  return votes;
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def(
      "page_votes(Tensor heap, Tensor page_table, Tensor positions, Tensor queries, "
      "Tensor query_positions, Tensor? own_keys, Tensor k_offsets, int block_size, "
      "float scale, bool largest, int base=0, int slot_stride=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("page_votes", TORCH_BOX(&kvp::binding::page_votes_cpu));
}
