// torch binding of the CUDA bulk copy; the schema is in bulk_copy.cpp.
#include "kvp/bulk_copy.cuh"

#include "bulk_check.hpp"
#include "cuda_binding.hpp"

namespace kvp::binding {
namespace {

void copy_pages_cuda(const Tensor& target, const std::optional<Tensor>& target_ids,
                     const Tensor& source, const std::optional<Tensor>& source_ids) {
  const PageCopy copy = view_copy("copy_pages", target, target_ids, source, source_ids);
  const auto list = [](const PageSide& side) {
    return cuda::PageList{side.num_pages, side.stride_bytes, side.ids};
  };
  const DeviceGuard guard(target.get_device_index());
  cuda::copy_pages(target.mutable_data_ptr(), list(copy.target),
                   source.const_data_ptr(), list(copy.source), copy.n,
                   copy.target.page_bytes, stream_of(target));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_IMPL(kvp, CUDA, m) {
  m.impl("copy_pages", TORCH_BOX(&kvp::binding::copy_pages_cuda));
}
