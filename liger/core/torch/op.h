#pragma once
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>
#include "liger/core/kernel.h"
#include "liger/core/partial_sums.h"

namespace liger {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The dtypes that kernels compute with; float64 is refused by every operator.
inline bool has_dtype(at::ScalarType t) { return t == at::kFloat || t == at::kHalf || t == at::kBFloat16; }

inline DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return DType::F32;
    case at::kHalf: return DType::F16;
    case at::kBFloat16: return DType::BF16;
    default: TORCH_CHECK_TYPE(false, "liger: expected float32, float16 or bfloat16, got ", t.scalar_type());
  }
}

/// Runs a kernel on t's device, on its current stream.
template <class Args>
void run(const Kernel<Args>& kernel, const Tensor& t, const Args& args) {
  if (t.is_cpu()) return kernel(kCPU, args, nullptr);
  const auto device = t.device();
  TORCH_CHECK_NOT_IMPLEMENTED(kernel.has(Backend(device.type())), "liger: ", kernel.name, " was not built for ",
                              device.type());
  const c10::DeviceGuard guard(device);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  kernel(Backend(device.type()), args, reinterpret_cast<Stream>(stream.native_handle()));
}

/// Makes the name known of a kernel that an operator runs only where there is one, so that a backend that is plugged in
/// can have it whichever backends this library was built with.
#define LIGER_OPTIONAL(kernel)                        \
  [[maybe_unused]] static const bool kernel##_known = \
      ::liger::add_kernel((kernel).name, (kernel).slots, ::liger::kCPU, -1, nullptr)

inline int64_t cols(const Tensor& t) { return t.size(-1); }
inline int64_t rows(const Tensor& t) { return t.numel() / std::max<int64_t>(cols(t), 1); }

/// The rows of a tensor whose sizes may be symbols.
inline c10::SymInt sym_rows(const Tensor& t) { return c10::multiply_integers(t.sym_sizes().slice(0, t.dim() - 1)); }

inline Tensor value_or_undefined(const OptTensor& t) { return t.value_or(Tensor()); }
inline OptTensor optional(const Tensor& t) { return t.defined() ? OptTensor(t) : std::nullopt; }
inline Tensor contiguous(const OptTensor& t) { return t && t->defined() ? t->contiguous() : Tensor(); }
inline const void* data(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
template <class T>
T* data(const Tensor& t) {
  return t.defined() ? static_cast<T*>(t.data_ptr()) : nullptr;
}

inline Numbers numbers(const Tensor& t) { return t.defined() ? Numbers{data(t), dtype_of(t)} : Numbers{}; }

/// Raises an error that names the operator where a transform of torch.func is active: torch differentiates no C++ node
/// under one.
void check_no_transform(const char* name);

/// A result that a kernel will fill. Fresh memory on the CPU costs more in page faults than in work: large results ask
/// for large pages.
Tensor output(Tensor t);

/// t as a matrix whose rows lie `stride` elements apart; a copy only where no single stride describes it.
struct Rows {
  Tensor tensor;
  int64_t stride;
  explicit Rows(const Tensor& t);
};

/// A schema's result that was not asked for: an empty tensor, because an undefined one is no value for torch.export and
/// AOTInductor.
inline Tensor or_empty(const Tensor& t, const at::TensorOptions& options) {
  return t.defined() ? t : at::empty({0}, options);
}
/// The same result in a graph's node, which must be undefined.
inline Tensor if_wanted(bool wanted, const Tensor& t) { return wanted ? t : Tensor(); }
/// A weight's gradient where there are no rows: zeros, or undefined where it is not wanted.
inline Tensor zeros_if(bool wanted, const OptTensor& weight) { return wanted ? at::zeros_like(*weight) : Tensor(); }

/// Room for one float per row of x [..., cols]: [...].
inline Tensor empty_stat(const Tensor& x) {
  return at::empty_symint(x.sym_sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
}
/// The same for n of them per row: [..., n].
inline Tensor empty_stat(const Tensor& x, int64_t n) {
  c10::SymDimVector shape(x.sym_sizes());
  shape.back() = n;
  return at::empty_symint(shape, x.options().dtype(at::kFloat));
}

/// How many partial sums the sum over x's rows, or over each of `groups` runs of them, is made of (RowPartials).
int64_t partial_count(const Tensor& x, int64_t groups = 1);
/// The same of so many rows and columns, on x's device.
int64_t partial_count(const Tensor& x, int64_t groups, int64_t rows, int64_t cols);
/// The same for a sum over all of x's elements.
int64_t element_partial_count(const Tensor& x);
/// Room for partial sums, float [1, partials, cols] where x is.
Tensor empty_partials(const Tensor& x, int64_t partials, int64_t cols);
/// Sums of partial sums, all made by one launch.
class Totals {
 public:
  /// Σ over the middle dimension of [groups, partials, cols], each partial sum times factor + plus, after run: as large
  /// and of the type as `like`, of groups x cols numbers. factor has one row for all partial sums, or one for as many
  /// as divide them.
  Tensor of(const Tensor& partials, const Tensor& like, const Tensor& factor = {}, double plus = 0);
  void run();

 private:
  AddPartials args_{};
  Tensor first_;
};

/// sum ← aᵀ b, or sum + aᵀ b, accumulated in sum's dtype: that of a and b, or float.
void accumulate(Tensor& sum, const Tensor& a, const Tensor& b, bool first);

/// out = x wᵀ + bias, where there is one; on a GPU out may be float where x and w are not.
void project(Tensor out, const Tensor& x, const Tensor& w, const Tensor& bias);

/// f(first token, tokens) for each chunk of tokens.
template <class F>
void for_chunks(int64_t tokens, int64_t chunk, F f) {
  for (int64_t begin = 0; begin < tokens; begin += chunk) f(begin, std::min(chunk, tokens - begin));
}

/// Whether t's key set says no more than where its numbers lie and that autograd may record: no subclass, no lazy
/// negation, no batch of a transformation, nothing that traces.
bool is_plain(const Tensor& t);

/// A gradient that forward saved, times the upstream gradient g: one number, or one a row. In place where nobody can
/// see it: where autograd will not run this node again and both are plain tensors.
Tensor scaled(const Tensor& saved, const Tensor& g);
/// x times a number, in place. On CPUs x.mul_(number) rounds the number to x's dtype first: its operands change places.
inline Tensor multiplied(Tensor x, double number) { return x.mul_(at::scalar_tensor(number, at::kDouble)); }

/// The dtypes that an argument may have.
enum class Type {
  Same,  // the first argument's
  SameOrFloat,
  Float,
  Kernels,  // float32, float16 or bfloat16
  Floating,
  Bool,
  EightBit,  // int8, or uint8 with the bits of E4M3
  Integer,   // not bool
  Number     // not complex, not bool
};

/// Checks the tensors that an operator is given, before anything is allocated or launched. Each is called by its name
/// in the operator's schema. All must be on the first one's device. Raises TypeError for a dtype, RuntimeError for a
/// shape, a device or a missing tensor.
class Arguments {
 public:
  /// The first argument, `x`: of at least one dimension.
  Arguments(const char* op, const char* name, const Tensor& x, Type type = Type::Kernels);
  /// The operator's name, for what is checked beside.
  const char* op() const { return op_; }

  /// t must have this shape.
  const Arguments& shaped(const char* name, const Tensor& t, c10::SymIntArrayRef shape, Type type) const;
  const Arguments& shaped(const char* name, const OptTensor& t, c10::SymIntArrayRef shape, Type type) const {
    return t ? shaped(name, *t, shape, type) : *this;
  }
  /// t must have the first argument's shape and dtype.
  const Arguments& like(const char* name, const Tensor& t) const { return shaped(name, t, x_.sym_sizes(), Type::Same); }
  const Arguments& like(const char* name, const OptTensor& t) const { return t ? like(name, *t) : *this; }
  /// t must be a vector of n numbers.
  template <class T>
  const Arguments& vector(const char* name, const T& t, const c10::SymInt& n, Type type = Type::SameOrFloat) const {
    return shaped(name, t, {&n, 1}, type);
  }
  /// t must hold n numbers in any shape.
  const Arguments& count(const char* name, const Tensor& t, const c10::SymInt& n, Type type = Type::Float) const;
  const Arguments& count(const char* name, const OptTensor& t, const c10::SymInt& n, Type type = Type::Float) const {
    return t ? count(name, *t, n, type) : *this;
  }
  /// t may have any shape.
  const Arguments& any(const char* name, const Tensor& t, Type type) const;
  /// What has a gradient must be given: `wanted` names the flag.
  const Arguments& present(const char* wanted, bool flag, const char* name, const OptTensor& t) const;

 private:
  [[noreturn]] void refuse(const char* name, const Tensor& t, const std::string& expected, Type type,
                           bool wrong_type) const;
  const char* op_;
  const Tensor& x_;
};

inline bool wants_grad(const Tensor& t) { return t.defined() && t.requires_grad(); }
inline bool wants_grad(const OptTensor& t) { return t && wants_grad(*t); }
template <class T>
bool wants_grad(const T&) {
  return false;
}

/// The derivative of what a backward pass returned is an error, not a zero, also where the gradient was made in forward
/// and is connected with nothing: where autograd records (create_graph), the results get a node that raises. `op` is
/// named in its message.
variable_list refuse_second_derivative(const char* op, const variable_list& upstream, variable_list gradients);

/// What LIGER_IMPL registers, for backends that are plugged in (liger/backend.h).
std::vector<void (*)(torch::Library&)>& implementations();

/// Registers one set of functions for CPU, CUDA and Meta: allocation is the shape function, `run` the rest.
#define LIGER_IMPL(stem, m)                                                                           \
  static void stem##_impl(torch::Library&);                                                           \
  [[maybe_unused]] static const bool stem##_added = (implementations().push_back(stem##_impl), true); \
  TORCH_LIBRARY_IMPL(liger, CPU, lib) { stem##_impl(lib); }                                           \
  TORCH_LIBRARY_IMPL(liger, CUDA, lib) { stem##_impl(lib); }                                          \
  TORCH_LIBRARY_IMPL(liger, Meta, lib) { stem##_impl(lib); }                                          \
  static void stem##_impl(torch::Library& m)

}  // namespace liger
