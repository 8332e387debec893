// The check of tensors of quantized rows (kvp/quantized_rows.hpp).
#pragma once

#include "binding.hpp"
#include "kvp/quantized_rows.hpp"

namespace kvp::binding {

// Fails unless the rows in the last dimension of a tensor are contiguous.
inline void require_whole_rows(const char* op, const char* name, const Tensor& tensor) {
  const std::int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) {
    fail(op, name, " must have contiguous rows");
  }
}

// How to read rows of fp8 elements.
inline QuantizedRows fp8_rows_of(const char* op, const char* name,
                                 const Tensor& tensor) {
  require_whole_rows(op, name, tensor);
  const bool e4m3 = tensor.scalar_type() == ScalarType::Float8_e4m3fn;
  const std::int64_t head_dim = tensor.size(tensor.dim() - 1);
  return {{head_dim, 8, e4m3 ? Fp8::kE4m3 : Fp8::kE5m2},
          &select_kernels<QuantizedKernels>()};
}

// The format of the rows in the last dimension of a tensor, and this CPU's kernels.
inline QuantizedRows quantized_rows_of(const char* op, const char* name,
                                       const Tensor& tensor, std::int64_t head_dim) {
  const Argument argument{op, name, tensor};
  argument.require_type(ScalarType::Byte);
  const std::int64_t last = tensor.dim() - 1, bytes = tensor.size(last);
  QuantizedFormat format;
  if (head_dim < 2 || !format_of(head_dim, bytes, &format)) {
    fail(op, name, " must have quantized rows of ", head_dim, " elements (",
         QuantizedFormat{head_dim, 8}.row_bytes(), " or ",
         QuantizedFormat{head_dim, 4}.row_bytes(), " bytes), got ", shape_of(tensor));
  }
  require_whole_rows(op, name, tensor);
  return {format, &select_kernels<QuantizedKernels>()};
}

}  // namespace kvp::binding
