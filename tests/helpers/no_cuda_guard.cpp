// Registers a device guard, so that a CPU build of torch accepts CUDA tensors.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}  // namespace
