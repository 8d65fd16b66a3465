#include "device.h"
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace liger::emulation {

constexpr Device kDevices[] = {
    {"sm_80", 8, 164, 163}, {"sm_86", 8, 100, 99},    {"sm_89", 8, 100, 99},
    {"sm_90", 9, 228, 227}, {"sm_100", 10, 228, 227}, {"sm_120", 12, 100, 99},
};

const Device& device_called(std::string_view name) {
  for (const Device& d : kDevices)
    if (d.name == name) return d;
  throw std::runtime_error("emulation: no device is called " + std::string(name));
}

const Device& device() {
  static const Device& chosen = []() -> const Device& {
    const char* name = std::getenv("LIGER_EMULATED_DEVICE");
    return device_called(name ? name : "sm_90");
  }();
  return chosen;
}

void check_launch(const Device& device, int threads, int shared_bytes, int cluster) {
  const auto refuse = [&](const char* error) {
    throw std::runtime_error(std::string("CUDA: ") + error + " (emulated " + std::string(device.name) + ": " +
                             std::to_string(threads) + " threads and " + std::to_string(shared_bytes) +
                             " bytes of shared memory per block, " + std::to_string(cluster) + " blocks per cluster)");
  };
  if (threads < 1 || threads > 1024) refuse("invalid configuration argument");
  if (shared_bytes > device.shared_kib_of_block * 1024) refuse("invalid argument");
  if (cluster > 1 && !device.has_clusters()) refuse("operation not supported");
  if (cluster > 8) refuse("invalid cluster size");
}

}  // namespace liger::emulation

// For a GPU's fake tensors, with which torch's compiler traces: indexing guards the device also where there is none.
namespace c10::impl {
using CudaGuard = NoOpDeviceGuardImpl<DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, CudaGuard)
}  // namespace c10::impl
