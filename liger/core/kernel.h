#pragma once
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace liger {

enum class DType : uint8_t { F32, F16, BF16 };
using Stream = void*;  // a cudaStream_t for CUDA; unused by CPU

/// c10::DeviceType's number: a backend that is plugged in needs no entry here.
using Backend = int8_t;
inline constexpr Backend kCPU = 0, kCUDA = 1;
inline constexpr int kBackends = 24;

/// One kernel, one slot per backend. A backend that is not built leaves its slot empty.
template <class Args>
struct Kernel {
  using Fn = void (*)(const Args&, Stream);
  struct Slot { Fn fn = nullptr; int rank = -1; };
  const char* name;
  std::array<Slot, kBackends> slots{};

  /// The highest rank wins: a CPU file is built once per instruction set (liger/core/cpu/isa.h).
  bool add(Backend b, int rank, Fn fn) {
    if (auto& slot = slots[b]; rank > slot.rank) slot = {fn, rank};
    return true;
  }

  bool has(Backend b) const { return b >= 0 && b < kBackends && slots[b].fn; }

  void operator()(Backend b, const Args& args, Stream stream) const {
    if (has(b)) return slots[b].fn(args, stream);
    throw std::runtime_error(std::string("liger: ") + name + " was not built for this device type");
  }
};

/// Fills a kernel's slot for the backend in whose namespace it stands, from that backend's own file.
#define LIGER_REGISTER(kernel, ...) \
  [[maybe_unused]] static const bool kernel##_registered = (kernel).add(kBackend, rank(), __VA_ARGS__)

}  // namespace liger
