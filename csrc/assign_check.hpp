// Checks of assign_and_average that its CPU and CUDA bindings share.
#pragma once

#include <cstdint>
#include <optional>

#include "binding.hpp"
#include "kvp/elements.hpp"

namespace kvp::binding {

inline constexpr const char* kAssign = "assign_and_average";

struct AssignSizes {
  std::int64_t heads, slots, head_dim, prototypes;
};

inline AssignSizes checked_assignment(const Tensor& keys, const Tensor& prototypes,
                                      const Tensor& values,
                                      const std::optional<Tensor>& valid) {
  Argument{kAssign, "keys", keys}.require_dim(3);
  const Argument rows{kAssign, "prototypes", prototypes};
  const Argument weights{kAssign, "values", values};
  rows.require_dim(3);
  const AssignSizes size{keys.size(0), keys.size(1), keys.size(2), prototypes.size(1)};
  rows.require_shape({size.heads, size.prototypes, size.head_dim});
  weights.require_shape({size.heads, size.slots});
  rows.require_device_of(keys, "the keys");
  weights.require_device_of(keys, "the keys");
  if (size.prototypes == 0) fail(kAssign, "there must be at least one prototype");
  rows.require_type(ScalarType::Float);
  weights.require_type(ScalarType::Float);
  if (size.head_dim > kMaxHeadDim) {
    fail(kAssign, "head_dim must be at most ", kMaxHeadDim, ", got ", size.head_dim);
  }
  if (size.head_dim > 1 && size.slots > 0 && keys.stride(2) != 1) {
    fail(kAssign, "the elements of a key must be contiguous");
  }
  rows.require_contiguous();
  weights.require_contiguous();
  if (valid) {
    const Argument mask{kAssign, "valid", *valid};
    mask.require_shape({size.heads, size.slots});
    mask.require_device_of(keys, "the keys");
    mask.require_type(ScalarType::Bool);
    mask.require_contiguous();
  }
  return size;
}

}  // namespace kvp::binding
