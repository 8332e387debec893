// Argument checks and error messages that the CPU and CUDA bindings share.
//
// Messages start with "kvp." and the name of the op; Python turns such errors into
// ValueError (ops/dispatch.py). Only stable-ABI headers of torch are included, so one
// library serves torch 2.11 and later.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvp/paged_kv.hpp"

namespace kvp::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << "kvp." << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// The name of a dtype in messages, as in Python.
inline const char* type_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    default:
      return torch::headeronly::toString(type);
  }
}

inline std::string shape_of(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    text << (i ? ", " : "") << tensor.size(i);
  }
  text << ']';
  return text.str();
}

inline std::string strides_of(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    text << (i ? ", " : "") << tensor.stride(i);
  }
  text << ']';
  return text.str();
}

// A contiguous tensor on the CPU. Unlike torch::stable::empty it does not go through the
// dispatcher, which takes some ten microseconds when caches are cold.
inline Tensor new_on_cpu(const std::vector<std::int64_t>& shape, ScalarType type) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * std::max<std::int64_t>(shape[i], 1);
  }
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<std::int64_t>(shape.size()), shape.data(), strides.data(),
      torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(type)),
      aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// A tensor argument of a call, and its name for error messages.
struct Argument {
  const char* op;
  const char* name;
  const Tensor& tensor;

  void require_dim(std::int64_t dim) const {
    if (tensor.dim() != dim) {
      fail(op, name, " must have ", dim, " dimension(s), got shape ", shape_of(tensor));
    }
  }

  void require_type(ScalarType type) const {
    if (tensor.scalar_type() != type) {
      fail(op, name, " must be ", type_name(type), ", got ",
           type_name(tensor.scalar_type()));
    }
  }

  void require_shape(const std::vector<std::int64_t>& shape) const {
    bool same = tensor.dim() == static_cast<std::int64_t>(shape.size());
    for (std::size_t i = 0; same && i < shape.size(); ++i) {
      same = tensor.size(static_cast<std::int64_t>(i)) == shape[i];
    }
    if (same) return;
    std::ostringstream text;
    for (std::size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "") << shape[i];
    fail(op, name, " must have shape [", text.str(), "], got ", shape_of(tensor));
  }

  void require_contiguous() const {
    if (!tensor.is_contiguous()) fail(op, name, " must be contiguous");
  }

  void require_device_of(const Tensor& other, const char* owner = "the heap") const {
    if (tensor.is_cpu() != other.is_cpu() ||
        tensor.get_device_index() != other.get_device_index()) {
      fail(op, name, " must be on the device of ", owner);
    }
  }

  // A contiguous int64 vector of `size` indices (any size if negative).
  const std::int64_t* indices(const Tensor& heap, std::int64_t size) const {
    require_device_of(heap);
    require_dim(1);
    require_type(ScalarType::Long);
    require_contiguous();
    if (size >= 0 && tensor.size(0) != size) {
      fail(op, name, " must have ", size, " entries, got ", tensor.size(0));
    }
    return tensor.const_data_ptr<std::int64_t>();
  }

  // A contiguous int64 [rows, pages_per_row] table of page ids.
  const std::int64_t* table(const Tensor& heap) const {
    require_device_of(heap);
    require_dim(2);
    require_type(ScalarType::Long);
    require_contiguous();
    return tensor.const_data_ptr<std::int64_t>();
  }

  // A contiguous [rows, cols] matrix of the heap's dtype.
  void require_rows(const Tensor& heap, std::int64_t rows, std::int64_t cols) const {
    require_device_of(heap);
    require_dim(2);
    require_type(heap.scalar_type());
    require_contiguous();
    if (tensor.size(0) != rows || tensor.size(1) != cols) {
      fail(op, name, " must have shape [", rows, ", ", cols, "], got ",
           shape_of(tensor));
    }
  }

  // A contiguous int32 table of `size` offsets.
  const std::int32_t* offsets(const Tensor& heap, std::int64_t size) const {
    require_device_of(heap);
    require_dim(1);
    require_type(ScalarType::Int);
    require_contiguous();
    if (tensor.size(0) != size) {
      fail(op, name, " must have page_elems / 2 = ", size, " entries, got ",
           tensor.size(0));
    }
    return tensor.const_data_ptr<std::int32_t>();
  }
};

// Checks that a tensor is contiguous, on the CPU and of a shape.
inline void require_shape(const char* op, const char* name, const Tensor& tensor,
                          const std::vector<std::int64_t>& shape) {
  const Argument argument{op, name, tensor};
  argument.require_contiguous();
  argument.require_shape(shape);
  if (!tensor.is_cpu()) fail(op, name, " must be on the CPU");
}

// The sizes of a heap of pages, checked.
struct HeapView {
  std::int64_t num_pages;
  std::int64_t page_stride;
  std::int64_t plane_elems;
  std::int64_t block_size;
  std::int64_t head_dim;
  std::int64_t element_size;  // 1, 2 or 4

  template <typename Element>
  PagedKV<Element> paged(Element* pages, const PageLayout& layout) const {
    return {pages, num_pages, page_stride, layout};
  }
};

// Calls body with a null pointer of the unsigned type of the element's size;
// read() and write() take it to cast data pointers.
template <typename Body>
void with_element(const HeapView& view, const Body& body) {
  if (view.element_size == 4) {
    body(static_cast<std::uint32_t*>(nullptr));
  } else if (view.element_size == 2) {
    body(static_cast<std::uint16_t*>(nullptr));
  } else {
    body(static_cast<std::uint8_t*>(nullptr));
  }
}

template <typename Element>
const Element* read(const Tensor& tensor, Element*) {
  return static_cast<const Element*>(tensor.const_data_ptr());
}

template <typename Element>
Element* write(const Tensor& tensor, Element*) {
  return static_cast<Element*>(tensor.mutable_data_ptr());
}

// The pages of a heap, whatever the type of their elements.
inline HeapView view_pages(const char* op, const Tensor& heap,
                           std::int64_t block_size) {
  Argument{op, "heap", heap}.require_dim(2);
  const std::int64_t page_elems = heap.size(1);
  // The stride of a dimension of size 1 means nothing.
  const std::int64_t page_stride = heap.size(0) > 1 ? heap.stride(0) : page_elems;
  if ((page_elems > 1 && heap.stride(1) != 1) || page_stride < page_elems) {
    fail(op, "heap must have contiguous pages that do not overlap, got strides [",
         heap.stride(0), ", ", heap.stride(1), "] for pages of ", page_elems,
         " elements");
  }
  if (block_size <= 0) {
    fail(op, "block_size must be positive, got ", block_size);
  }
  if (page_elems == 0 || page_elems % (2 * block_size) != 0) {
    fail(op, "heap pages must hold 2 * block_size * head_dim elements, got ",
         page_elems, " elements with block_size ", block_size);
  }
  return HeapView{heap.size(0),
                  page_stride,
                  page_elems / 2,
                  block_size,
                  page_elems / 2 / block_size,
                  static_cast<std::int64_t>(heap.element_size())};
}

// The pages of a heap whose elements are copied, or read as they are.
inline HeapView view_heap(const char* op, const Tensor& heap, std::int64_t block_size) {
  const ScalarType type = heap.scalar_type();
  if (type != ScalarType::Float && type != ScalarType::Half &&
      type != ScalarType::BFloat16 && type != ScalarType::Byte) {
    fail(op, "heap must be float32, float16, bfloat16 or uint8, got ", type_name(type));
  }
  return view_pages(op, heap, block_size);
}

// An int64 [rows, pages_per_row] tensor of page ids; their range is not checked.
inline PageTable<std::int64_t> page_list(const char* op, const Tensor& heap,
                                         const Tensor& page_table) {
  const std::int64_t* ids = Argument{op, "page_table", page_table}.table(heap);
  return {ids, page_table.size(0), page_table.size(1)};
}

}  // namespace kvp::binding
