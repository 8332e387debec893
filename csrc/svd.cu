// torch binding of the reconstruction of low-rank factors on CUDA; the schema is in
// svd.cpp.
//
// Factors are on the device. The tensors that locate their records (offsets, ranks,
// tokens, which) are on the host: the size of the result follows from them, and
// records are checked without waiting for the stream.
#include "kvp/low_rank.cuh"

#include <type_traits>
#include <vector>

#include "cuda_binding.hpp"
#include "factor_check.hpp"

namespace kvp::binding {
namespace {

// The work of all chosen matrices, copied to the device in stream order.
struct DeviceWork {
  Tensor memory;
  std::int64_t n;

  const cuda::RowTile* list() const {
    return static_cast<const cuda::RowTile*>(memory.const_data_ptr());
  }
};

template <typename Factor>
DeviceWork device_work(const char* op, const Chosen& chosen) {
  const std::vector<Index> first = chosen.row_offsets();
  std::vector<cuda::RowTile> list;
  for (Index i = 0; i < chosen.count; ++i) {
    cuda::list_rows(chosen.shape<Factor>(i), chosen.all.offsets[chosen.which[i]],
                    first[static_cast<std::size_t>(i)], list);
  }
  const auto n = static_cast<std::int64_t>(list.size());
  const std::size_t bytes = list.size() * sizeof(cuda::RowTile);
  const Tensor& factors = chosen.all.tensor;
  Tensor memory = torch::stable::new_empty(
      factors, {static_cast<std::int64_t>(bytes / sizeof(std::int64_t))},
      ScalarType::Long);
  if (bytes == 0) return {memory, n};
  // From pageable memory: `list` may be freed as soon as the call returns.
  const cudaError_t error =
      cudaMemcpyAsync(memory.mutable_data_ptr(), list.data(), bytes,
                      cudaMemcpyHostToDevice, stream_of(factors));
  if (error != cudaSuccess) fail(op, "CUDA error: ", cudaGetErrorString(error));
  return {memory, n};
}

Tensor reconstruct_cuda(const Tensor& factors, const Tensor& offsets,
                        const Tensor& ranks, const Tensor& tokens,
                        std::int64_t head_dim, const Tensor& which, bool in_bfloat16) {
  const char* op = "reconstruct";
  const Chosen chosen(op,
                      checked_factors(op, "factors", factors, offsets, ranks, tokens,
                                      head_dim, &factors),
                      which);
  const DeviceGuard guard(factors.get_device_index());
  Tensor rows =
      torch::stable::new_empty(factors, {chosen.row_offsets().back(), head_dim},
                               in_bfloat16 ? ScalarType::BFloat16 : ScalarType::Float);
  with_number(Argument{op, "rows", rows}, [&](auto* row_tag) {
    with_number(Argument{op, "factors", factors}, [&](auto* factor_tag) {
      using Factor = std::remove_pointer_t<decltype(factor_tag)>;
      const DeviceWork work = device_work<Factor>(op, chosen);
      cuda::reconstruct(read(factors, factor_tag), work.list(), work.n, head_dim,
                        write(rows, row_tag), stream_of(factors));
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return rows;
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_IMPL(kvp, CUDA, m) {
  m.impl("reconstruct", TORCH_BOX(&kvp::binding::reconstruct_cuda));
}
