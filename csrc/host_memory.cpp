// Schemas of the ops that pin host memory. The implementations are in host_memory.cu;
// only builds with CUDA have them.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) {
  m.def("pin_host(Tensor memory, int device) -> ()");
  m.def("unpin_host(Tensor memory) -> ()");
}
