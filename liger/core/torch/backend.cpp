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

}  // namespace liger
