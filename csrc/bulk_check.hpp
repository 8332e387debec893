// The checks of copy_pages that its CPU and CUDA bindings share: everything except the
// contents of index tensors.
#pragma once

#include <cstdint>
#include <optional>

#include "binding.hpp"

namespace kvp::binding {

// One side of a copy. Pages are bytes, whatever the element type.
struct PageSide {
  std::int64_t num_pages;
  std::int64_t page_bytes;
  std::int64_t stride_bytes;
  const std::int64_t* ids;  // null: the first pages, in order
};

struct PageCopy {
  PageSide target, source;
  std::int64_t n;
};

inline PageSide view_pages(const char* op, const char* name, const Tensor& tensor) {
  if (tensor.dim() < 1) fail(op, name, " must be [num_pages, ...], got a scalar");
  std::int64_t page_elems = 1;
  bool contiguous = true;
  for (std::int64_t d = tensor.dim() - 1; d >= 1; --d) {
    // The stride of a dimension of size 1 carries no meaning.
    contiguous &= tensor.size(d) == 1 || tensor.stride(d) == page_elems;
    page_elems *= tensor.size(d);
  }
  const std::int64_t stride = tensor.size(0) > 1 ? tensor.stride(0) : page_elems;
  if (page_elems > 0 && (!contiguous || stride < page_elems)) {
    fail(op, name, " must have contiguous pages that do not overlap, got shape ",
         shape_of(tensor), " with strides ", strides_of(tensor));
  }
  const auto element_size = static_cast<std::int64_t>(tensor.element_size());
  if (element_size > 8) {
    fail(op, name, " must have elements of 1, 2, 4 or 8 bytes, got ",
         type_name(tensor.scalar_type()));
  }
  return {tensor.size(0), page_elems * element_size, stride * element_size, nullptr};
}

// Also rejects sides whose pages interleave, without finding out whether they share
// a byte.
inline void require_apart(const char* op, const Tensor& target, const PageSide& to,
                          const Tensor& source, const PageSide& from) {
  const auto first = [](const Tensor& tensor) {
    return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  };
  const auto size = [](const PageSide& side) {
    return side.num_pages == 0 || side.page_bytes == 0
               ? std::uintptr_t{0}
               : static_cast<std::uintptr_t>((side.num_pages - 1) * side.stride_bytes +
                                             side.page_bytes);
  };
  if (size(to) == 0 || size(from) == 0) return;
  if (first(target) < first(source) + size(from) &&
      first(source) < first(target) + size(to)) {
    fail(op, "target and source must not share memory, got pages ", to.stride_bytes,
         " bytes apart from address ", first(target), " and ", from.stride_bytes,
         " bytes apart from ", first(source));
  }
}

inline PageCopy view_copy(const char* op, const Tensor& target,
                          const std::optional<Tensor>& target_ids, const Tensor& source,
                          const std::optional<Tensor>& source_ids) {
  PageCopy copy{view_pages(op, "target", target), view_pages(op, "source", source), 0};
  const Argument other{op, "source", source};
  other.require_device_of(target, "target");
  other.require_type(target.scalar_type());
  if (copy.source.page_bytes != copy.target.page_bytes) {
    fail(op, "pages of source must have the size of target's, got ",
         copy.source.page_bytes, " and ", copy.target.page_bytes, " bytes");
  }
  require_apart(op, target, copy.target, source, copy.source);
  const auto ids = [&](const char* name, const Tensor& tensor) {
    const Argument argument{op, name, tensor};
    argument.require_device_of(target, "target");
    return argument.indices(target, -1);
  };
  if (target_ids) copy.target.ids = ids("target_ids", *target_ids);
  if (source_ids) copy.source.ids = ids("source_ids", *source_ids);
  copy.n = target_ids   ? target_ids->size(0)
           : source_ids ? source_ids->size(0)
                        : copy.source.num_pages;
  if (target_ids && source_ids && source_ids->size(0) != copy.n) {
    fail(op, "source_ids must have ", copy.n, " entries, got ", source_ids->size(0));
  }
  const auto require_enough = [&](const char* name, const PageSide& side) {
    if (side.ids == nullptr && side.num_pages < copy.n) {
      fail(op, name, " has ", side.num_pages, " pages, but ", copy.n,
           " are copied in order");
    }
  };
  require_enough("target", copy.target);
  require_enough("source", copy.source);
  return copy;
}

}  // namespace kvp::binding
