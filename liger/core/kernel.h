#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace liger {

enum class DType : uint8_t { F32, F16, BF16 };
using Stream = void*;  // a cudaStream_t for CUDA; unused by CPU

/// a / b, rounded up; of any integers, in their common type.
template <class A, class B>
constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}
/// a, rounded up to a multiple of b.
template <class A, class B>
constexpr auto round_up(A a, B b) {
  return ceil_div(a, b) * b;
}

/// A few numbers of any type, of which kernels read the i-th as number(of, i).
struct Numbers {
  const void* of;
  DType dtype;
};

/// c10::DeviceType's number: a backend that is plugged in needs no entry here.
using Backend = int8_t;
inline constexpr Backend kCPU = 0, kCUDA = 1;
inline constexpr int kBackends = 24;

/// Where a backend's kernel is found; what `run` takes, its Kernel knows.
struct Slot {
  void (*run)() = nullptr;
  int rank = -1;
};

/// Fills a backend's slot of a kernel unless it holds a higher rank: a CPU file is built once per instruction set
/// (liger/core/cpu/isa.h). Not inline: files call it when they are loaded, those for instructions that the machine
/// lacks too, and what they would make of it may not run there.
bool add_kernel(const char* name, Slot* slots, Backend backend, int rank, void (*run)());

/// The slots of the kernel of this name in this library, null where there is none. (A library that includes a kernel's
/// header may have its own variable.)
Slot* find_kernel(const char* name);

/// Whether a backend has any kernel in this library.
bool has_any_kernel(Backend backend);

/// One kernel, one slot per backend. A backend that is not built leaves its slot empty.
template <class Args>
struct Kernel {
  using Fn = void (*)(const Args&, Stream);
  const char* name;
  Slot slots[kBackends] = {};

  bool has(Backend b) const { return b >= 0 && b < kBackends && slots[b].run; }

  void operator()(Backend b, const Args& args, Stream stream) const {
    if (has(b)) return reinterpret_cast<Fn>(slots[b].run)(args, stream);
    throw std::runtime_error(std::string("liger: ") + name + " was not built for this device type");
  }
};

/// Fills a kernel's slot for the backend in whose namespace it stands, from that backend's own file.
#define LIGER_REGISTER(kernel, ...)                                        \
  [[maybe_unused]] static const bool kernel##_registered =                 \
      ::liger::add_kernel((kernel).name, (kernel).slots, kBackend, rank(), \
                          reinterpret_cast<void (*)()>(static_cast<decltype(kernel)::Fn>(__VA_ARGS__)))

}  // namespace liger
