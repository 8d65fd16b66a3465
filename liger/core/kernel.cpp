#include "liger/core/kernel.h"

#include <algorithm>
#include <map>
#include <string_view>

namespace liger {
namespace {

std::map<std::string_view, Slot*>& kernels() {
  static std::map<std::string_view, Slot*> all;  // made when the first file registers, whichever that is
  return all;
}

}  // namespace

bool add_kernel(const char* name, Slot* slots, Backend backend, int rank, void (*run)()) {
  kernels().emplace(name, slots);
  if (rank > slots[backend].rank) slots[backend] = {run, rank};
  return true;
}

Slot* find_kernel(const char* name) {
  const auto found = kernels().find(name);
  return found == kernels().end() ? nullptr : found->second;
}

bool has_any_kernel(Backend backend) {
  return std::ranges::any_of(kernels(), [&](const auto& kernel) { return kernel.second[backend].run != nullptr; });
}

}  // namespace liger
