// A device for torch whose memory is the host's: what a backend's own plug-in for torch brings. Whatever it has no
// kernel for is computed on the CPU.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <cstdlib>
#include <cstring>

namespace {

constexpr c10::DeviceType kHost = c10::DeviceType::PrivateUse1;

/// One device with one stream, on which everything has happened when a call returns.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kHost; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kHost, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void* getStreamNativeHandle(const c10::Stream) const override { return nullptr; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

/// What autograd asks of a device.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
Hooks hooks;
const bool known = [] {
  c10::register_privateuse1_backend("host");
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes > 0 ? std::malloc(bytes) : nullptr;
    return {data, data, &std::free, c10::Device(kHost, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

/// A tensor of the CPU that stands for the same memory.
at::Tensor on_cpu(const at::Tensor& t) {
  return t.is_cpu() ? t : at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

const at::Tensor& resize_storage(const at::Tensor& t, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(t.unsafeGetTensorImpl(), size, std::nullopt);
  return t;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  return copy_from(from, resize_storage(to, from.sizes(), std::nullopt), false);
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_storage);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }
