// torch binding that ends the OpenMP threads of the calling thread.
#include <torch/csrc/stable/library.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace kvp::binding {
namespace {

// Ends the threads that run the calling thread's parallel loops; its next parallel loop
// creates new ones. Not to be called inside of a parallel loop.
//
// libgomp gives each thread that has parallel loops threads of its own, which stay. If all
// of them together are more than the cores, no thread waits for the next loop actively
// any more, and all loops of the process start later, those of the model too.
void end_threads() {
#if defined(_OPENMP)
  omp_pause_resource(omp_pause_soft, omp_get_initial_device());
#endif
}

}  // namespace
}  // namespace kvp::binding

STABLE_TORCH_LIBRARY_FRAGMENT(kvp, m) { m.def("end_threads() -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(kvp, CompositeExplicitAutograd, m) {
  m.impl("end_threads", TORCH_BOX(&kvp::binding::end_threads));
}
