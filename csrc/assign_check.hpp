// Checks of assign_and_average that its CPU and CUDA bindings share.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "binding.hpp"
#include "kvp/elements.hpp"

namespace kvp::binding {

inline constexpr const char* kAssign = "assign_and_average";

struct AssignSizes {
  std::int64_t heads, slots, head_dim, prototypes;
};

inline void require_shape(const char* name, const Tensor& tensor,
                          const std::vector<std::int64_t>& shape) {
  bool same = tensor.dim() == static_cast<std::int64_t>(shape.size());
  for (std::size_t i = 0; same && i < shape.size(); ++i) {
    same = tensor.size(static_cast<std::int64_t>(i)) == shape[i];
  }
  if (same) return;
  std::ostringstream wanted;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    wanted << (i ? ", " : "") << shape[i];
  }
  fail(kAssign, name, " must have shape [", wanted.str(), "], got ", shape_of(tensor));
}

inline AssignSizes checked_assignment(const Tensor& keys, const Tensor& prototypes,
                                      const Tensor& values,
                                      const std::optional<Tensor>& valid) {
  Argument{kAssign, "keys", keys}.require_dim(3);
  const Argument rows{kAssign, "prototypes", prototypes};
  rows.require_dim(3);
  const AssignSizes size{keys.size(0), keys.size(1), keys.size(2), prototypes.size(1)};
  require_shape("prototypes", prototypes, {size.heads, size.prototypes, size.head_dim});
  require_shape("values", values, {size.heads, size.slots});
  const auto require_device = [&](const char* name, const Tensor& tensor) {
    if (tensor.is_cpu() == keys.is_cpu() &&
        tensor.get_device_index() == keys.get_device_index()) {
      return;
    }
    fail(kAssign, name, " must be on the device of the keys");
  };
  require_device("prototypes", prototypes);
  require_device("values", values);
  if (valid) require_device("valid", *valid);
  rows.require_type(ScalarType::Float);
  Argument{kAssign, "values", values}.require_type(ScalarType::Float);
  if (size.prototypes == 0) fail(kAssign, "there must be at least one prototype");
  if (size.head_dim > kMaxHeadDim) {
    fail(kAssign, "head_dim must be at most ", kMaxHeadDim, ", got ", size.head_dim);
  }
  if (size.head_dim > 1 && size.slots > 0 && keys.stride(2) != 1) {
    fail(kAssign, "the elements of a key must lie side by side");
  }
  rows.require_contiguous();
  Argument{kAssign, "values", values}.require_contiguous();
  if (valid) {
    require_shape("valid", *valid, {size.heads, size.slots});
    Argument{kAssign, "valid", *valid}.require_type(ScalarType::Bool);
    Argument{kAssign, "valid", *valid}.require_contiguous();
  }
  return size;
}

}  // namespace kvp::binding
