// Pins host memory and maps it at the same address, so that a GPU can read it.
#include "cuda_binding.hpp"

namespace kvp::binding {
namespace {

// While it lives, this thread may make calls that a graph capture of another thread would
// otherwise forbid.
class CaptureElsewhere {
 public:
  CaptureElsewhere() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~CaptureElsewhere() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  CaptureElsewhere(const CaptureElsewhere&) = delete;
  CaptureElsewhere& operator=(const CaptureElsewhere&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void require(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return;
  // Clear the error: otherwise the next launch would report it.
  (void)cudaGetLastError();
  fail(op, cudaGetErrorName(status), ", ", cudaGetErrorString(status));
}

void require_memory(const char* op, const Tensor& memory) {
  const Argument argument{op, "memory", memory};
  argument.require_dim(1);
  argument.require_contiguous();
  if (!memory.is_cpu()) fail(op, "memory must be on the CPU");
}

// Kernels receive host addresses, so the device addresses must equal them.
void pin_host(const Tensor& memory, std::int64_t device) {
  const char* op = "pin_host";
  require_memory(op, memory);
  const DeviceGuard guard(static_cast<std::int32_t>(device));
  const CaptureElsewhere elsewhere;
  void* const here = memory.mutable_data_ptr();
  const auto bytes = static_cast<std::size_t>(memory.numel()) *
                     static_cast<std::size_t>(memory.element_size());
  require(op, cudaHostRegister(here, bytes,
                               cudaHostRegisterPortable | cudaHostRegisterMapped));
  void* there = nullptr;
  const cudaError_t status = cudaHostGetDevicePointer(&there, here, 0);
  if (status == cudaSuccess && there == here) return;
  (void)cudaHostUnregister(here);
  require(op, status);
  fail(op, "the device maps this host memory at another address");
}

void unpin_host(const Tensor& memory) {
  const char* op = "unpin_host";
  require_memory(op, memory);
  const CaptureElsewhere elsewhere;
  require(op, cudaHostUnregister(memory.mutable_data_ptr()));
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_IMPL(kvp, CPU, m) {
  m.impl("pin_host", TORCH_BOX(&kvp::binding::pin_host));
  m.impl("unpin_host", TORCH_BOX(&kvp::binding::unpin_host));
}
