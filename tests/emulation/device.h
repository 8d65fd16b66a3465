#pragma once
// The device whose limits the emulation has: LIGER_EMULATED_DEVICE, such as sm_89; sm_90 where it is not set.
#include <string_view>

namespace liger::emulation {

/// Shared memory, in KiB, of a multiprocessor and of a block that asks for it (CUDA's programming guide has a table of
/// technical specifications).
struct Device {
  std::string_view name;
  int capability_major, shared_kib, shared_kib_of_block;

  bool has_clusters() const { return capability_major >= 9; }
  bool has_byte_mma(bool floats) const {
    return capability_major == 12 || (capability_major == 8 && (!floats || name == "sm_89"));
  }
};

const Device& device_called(std::string_view name);
const Device& device();

/// Refuses a launch that the device refuses, in CUDA's words. How much shared memory a kernel's static variables take
/// is not known here.
void check_launch(const Device& device, int threads, int shared_bytes, int cluster);

}  // namespace liger::emulation
