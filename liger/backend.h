#pragma once
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <initializer_list>
#include <string>
#include "liger/core/kernel.h"

/// A backend of another library's: kernels for a device that torch knows through a plug-in, such as PrivateUse1.
/// docs/architecture.md says what a kernel must do; examples/backend is one.
namespace liger {

/// A kernel and the function that a backend runs as it: `{norm_forward, run_norm_forward}`.
struct KernelFunction {
  template <class Args>
  KernelFunction(const Kernel<Args>& kernel, typename Kernel<Args>::Fn run)
      : name(kernel.name), run(reinterpret_cast<void (*)()>(run)) {}
  const char* name;
  void (*run)();
};

/// Makes liger's operators take tensors of this device type, and those run that these kernels make up; the others raise
/// NotImplementedError there. Call it once for a device, before its first tensor is given to an operator. A kernel is
/// called with its device current and with the current stream's native handle.
/// Raises c10::Error for CPU, CUDA and Meta, which have backends, for a kernel that this version of liger does not
/// have, and when it is called for a device again.
void register_backend(c10::DeviceType device, std::initializer_list<KernelFunction> kernels);

/// Whether operators that run these kernels (by name: `norm_forward.name`) work on this device:
/// liger was built for it, or a backend was registered, has all of them, and a GPU is of an architecture that there is
/// code for. Of no names: whether the device has any kernel. Raises c10::Error for a name that no kernel has.
bool has_kernels(c10::Device device, c10::ArrayRef<std::string> kernels);

}  // namespace liger
