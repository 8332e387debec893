// torch bindings of kvp/quantized_rows.hpp.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "kvp/for_all.hpp"
#include "quantized_check.hpp"

namespace kvp::binding {
namespace {

constexpr std::int64_t kRowsPerTask = 256;

// Calls visit(first, last) for runs of rows, in parallel if they are many.
template <typename Visit>
void for_rows(std::int64_t n, std::int64_t head_dim, const Visit& visit) {
  const std::int64_t tasks = (n + kRowsPerTask - 1) / kRowsPerTask;
  for_all(tasks, Work::bytes(n * head_dim * 4), [&](std::int64_t task) {
    const std::int64_t first = task * kRowsPerTask;
    visit(first, std::min(first + kRowsPerTask, n));
  });
}

void require_floats(const char* op, const char* name, const Tensor& tensor) {
  const Argument argument{op, name, tensor};
  argument.require_dim(2);
  argument.require_contiguous();
  const ScalarType type = tensor.scalar_type();
  if (!tensor.is_cpu() || (type != ScalarType::Float && type != ScalarType::BFloat16)) {
    fail(op, name, " must be float32 or bfloat16 on the CPU, got ", type_name(type));
  }
}

// uint8 [n, row bytes]: the quantized rows.
Tensor quantize_rows(const Tensor& values, std::int64_t bits) {
  const char* op = "quantize_rows";
  require_floats(op, "values", values);
  if (bits != 8 && bits != 4) fail(op, "bits must be 8 or 4, got ", bits);
  const std::int64_t n = values.size(0), dims = values.size(1);
  const QuantizedFormat format{dims, static_cast<int>(bits)};
  Tensor out =
      torch::stable::new_empty(values, {n, format.row_bytes()}, ScalarType::Byte);
  const QuantizedRows rows =
      quantized_rows_of(op, "the result", out, dims);  // checks head_dim
  auto* to = static_cast<std::uint8_t*>(out.mutable_data_ptr());
  const void* from = values.const_data_ptr();
  const bool wide = values.scalar_type() == ScalarType::Float;
  for_rows(n, dims, [&](std::int64_t first, std::int64_t last) {
    std::vector<float> row(static_cast<std::size_t>(dims));
    for (std::int64_t i = first; i < last; ++i) {
      const float* value = static_cast<const float*>(from) + i * dims;
      if (!wide) {
        const auto* half = static_cast<const std::uint16_t*>(from) + i * dims;
        for (std::int64_t d = 0; d < dims; ++d) row[d] = widen(half[d]);
        value = row.data();
      }
      rows.write(value, to + i * rows.row_bytes());
    }
  });
  return out;
}

// out[i] = the values of row ids[i], or of row i without ids.
void dequantize_rows(const Tensor& out, const Tensor& quantized,
                     const std::optional<Tensor>& ids) {
  const char* op = "dequantize_rows";
  require_floats(op, "out", out);
  const std::int64_t n = out.size(0), dims = out.size(1);
  Argument{op, "rows", quantized}.require_dim(2);
  Argument{op, "rows", quantized}.require_contiguous();
  if (!quantized.is_cpu()) fail(op, "rows must be on the CPU");
  const QuantizedRows rows = quantized_rows_of(op, "rows", quantized, dims);
  const std::int64_t count = quantized.size(0);
  const std::int64_t* id = ids ? Argument{op, "ids", *ids}.indices(out, n) : nullptr;
  if (id == nullptr && count != n) {
    fail(op, "rows must have ", n, " rows, got ", shape_of(quantized));
  }
  for (std::int64_t i = 0; id != nullptr && i < n; ++i) {
    if (id[i] >= 0 && id[i] < count) continue;
    fail(op, "ids[", i, "] is row ", id[i], ", but there are rows 0 to ", count - 1);
  }
  const auto* from = static_cast<const std::uint8_t*>(quantized.const_data_ptr());
  void* to = out.mutable_data_ptr();
  const bool wide = out.scalar_type() == ScalarType::Float;
  for_rows(n, dims, [&](std::int64_t first, std::int64_t last) {
    std::vector<float> row(static_cast<std::size_t>(dims));
    for (std::int64_t i = first; i < last; ++i) {
      const std::uint8_t* source =
          from + (id == nullptr ? i : id[i]) * rows.row_bytes();
      if (wide) {
        rows.read(source, static_cast<float*>(to) + i * dims);
      } else {
        rows.read(source, row.data());
        narrow_row(row.data(), dims, static_cast<std::uint16_t*>(to) + i * dims);
      }
    }
  });
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def("quantize_rows(Tensor values, int bits) -> Tensor");
  m.def("dequantize_rows(Tensor(a!) out, Tensor rows, Tensor? ids) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("quantize_rows", TORCH_BOX(&kvp::binding::quantize_rows));
  m.impl("dequantize_rows", TORCH_BOX(&kvp::binding::dequantize_rows));
}
