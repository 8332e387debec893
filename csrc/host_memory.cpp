// Schemas of what pins memory of the host; the bodies, which only builds with CUDA have,
// are in host_memory.cu.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def("pin_host(Tensor memory, int device) -> ()");
  m.def("unpin_host(Tensor memory) -> ()");
}
