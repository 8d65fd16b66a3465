#include "liger/backend.h"
#include <map>
#include "liger/core/torch/op.h"

namespace liger {

std::vector<void (*)(torch::Library&)>& implementations() {
  static std::vector<void (*)(torch::Library&)> all;
  return all;
}

void register_backend(c10::DeviceType device, std::initializer_list<KernelFunction> kernels) {
  static std::map<c10::DeviceType, torch::Library> libraries;  // what is registered stays for as long as these
  TORCH_CHECK(device != at::kCPU && device != at::kCUDA && device != at::kMeta && !libraries.contains(device),
              "liger: there is a backend for ", device);
  for (const KernelFunction& kernel : kernels)
    TORCH_CHECK(find_kernel(kernel.name), "liger: there is no kernel ", kernel.name);
  for (const KernelFunction& kernel : kernels)
    add_kernel(kernel.name, find_kernel(kernel.name), Backend(device), 0, kernel.run);
  const auto key = c10::computeDispatchKey(std::nullopt, std::nullopt, device);
  auto& library = libraries.try_emplace(device, torch::Library::IMPL, "liger", key, __FILE__, __LINE__).first->second;
  for (const auto implement : implementations()) implement(library);
}

bool has_kernels(c10::Device device, c10::ArrayRef<std::string> kernels) {
  const auto backend = Backend(device.type());
  if (!has_any_kernel(backend)) return false;
  for (const std::string& name : kernels) {
    const Slot* slots = find_kernel(name.c_str());
    TORCH_CHECK(slots, "liger: there is no kernel ", name);
    if (!slots[backend].run) return false;
  }
  if (!runs_here.has(backend)) return true;  // a backend that is plugged in
  bool yes = false;
  const c10::DeviceGuard guard(device);
  runs_here(backend, {&yes}, nullptr);
  return yes;
}

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("has_kernels(Device device, str[] kernels) -> bool",
        [](c10::Device device, const std::vector<std::string>& kernels) { return has_kernels(device, kernels); });
}

}  // namespace liger
