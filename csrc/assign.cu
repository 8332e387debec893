// torch binding of the CUDA assignment to prototypes; the schema is in assign.cpp.
#include "kvp/assign.cuh"

#include <tuple>

#include "assign_check.hpp"
#include "cuda_binding.hpp"

namespace kvp::binding {
namespace {

template <typename Element>
void assign_all(const Tensor& keys, const Tensor& prototypes, const Tensor& values,
                const std::optional<Tensor>& valid, const AssignSizes& size,
                const Tensor& clusters, const Tensor& means) {
  const cuda::AssignCall<Element> call{
      static_cast<const Element*>(keys.const_data_ptr()),
      keys.stride(0),
      keys.stride(1),
      size.heads,
      size.slots,
      size.head_dim,
      size.prototypes,
      prototypes.const_data_ptr<float>(),
      values.const_data_ptr<float>(),
      valid ? valid->const_data_ptr<bool>() : nullptr,
      clusters.mutable_data_ptr<std::int64_t>(),
      means.mutable_data_ptr<float>()};
  Tensor scratch =
      torch::stable::new_empty(values, {cuda::assign_scratch(call)}, ScalarType::Long);
  cuda::assign_and_average(call, static_cast<cuda::Word*>(scratch.mutable_data_ptr()),
                           stream_of(keys));
}

std::tuple<Tensor, Tensor> assign_and_average_cuda(const Tensor& keys,
                                                   const Tensor& prototypes,
                                                   const Tensor& values,
                                                   std::optional<Tensor> valid) {
  const AssignSizes size = checked_assignment(keys, prototypes, values, valid);
  const DeviceGuard guard(keys.get_device_index());
  Tensor means = torch::stable::new_empty(values, {size.heads, size.slots});
  Tensor clusters =
      torch::stable::new_empty(values, {size.heads, size.slots}, ScalarType::Long);
  switch (keys.scalar_type()) {
    case ScalarType::Float:
      assign_all<float>(keys, prototypes, values, valid, size, clusters, means);
      break;
    case ScalarType::Half:
      assign_all<Float16>(keys, prototypes, values, valid, size, clusters, means);
      break;
    case ScalarType::BFloat16:
      assign_all<BFloat16>(keys, prototypes, values, valid, size, clusters, means);
      break;
    default:
      fail(kAssign, "keys must be float32, float16 or bfloat16, got ",
           type_name(keys.scalar_type()));
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {means, clusters};
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_IMPL(kvp, CUDA, m) {
  m.impl("assign_and_average", TORCH_BOX(&kvp::binding::assign_and_average_cuda));
}
