#include "liger/core/torch/batch_invariant.h"
#include <ATen/Parallel.h>
#include <ATen/RedispatchFunctions.h>
#include <ATen/native/Resize.h>
#include <atomic>
#include <memory>
#include <mutex>

namespace liger {
namespace {

/// How products are made: in blocks of so many rows; 0: whole, but with so many rows at least.
struct Shape {
  std::atomic<int64_t> block, least;
};
enum Where { kOnCPU, kOnGPUIn16Bits, kOnGPUInFloat, kWheres };
Shape shapes[kWheres];
std::atomic<bool> on;
thread_local bool as_asked = false;

using Keys = c10::DispatchKeySet;

/// The kernels below stand at BackendSelect, which every call of an operator passes below autograd and above the
/// device's kernels, and where nothing else stands in the way of a product.
Keys below(Keys keys) { return keys & Keys(Keys::FULL_AFTER, c10::DispatchKey::BackendSelect); }

/// Backward passes need no blocks: their sums are over the tokens of the batch. A checkpoint that runs a layer again
/// there does so with grad mode on.
bool is_in_backward() { return !at::GradMode::is_enabled() && torch::autograd::get_current_graph_task_id() != -1; }

bool is_dense(const Tensor& t, c10::DispatchKey key) {
  const Keys keys = t.key_set();
  return keys.has(key) && !keys.has_backend(c10::BackendComponent::MetaBit) && !keys.has(c10::DispatchKey::Python);
}

/// The rows of a block of x's product; 0: all.
int64_t block_of(const Tensor& x) {
  if (as_asked || x.numel() == 0 || is_in_backward()) return 0;
  const bool on_cpu = is_dense(x, c10::DispatchKey::CPU);
  if (!on_cpu && !is_dense(x, c10::DispatchKey::CUDA)) return 0;
  const Shape& shape = shapes[on_cpu ? kOnCPU : x.element_size() == 2 ? kOnGPUIn16Bits : kOnGPUInFloat];
  const int64_t block = shape.block, least = shape.least;
  return block > 0 ? block : x.size(-2) < least ? least : 0;
}

c10::SmallVector<int64_t, 3> shape_of(const Tensor& a, const Tensor& b) {
  c10::SmallVector<int64_t, 3> shape(a.sizes());
  shape.back() = b.size(-1);
  return shape;
}

bool fit(const Tensor& a, const Tensor& b, int64_t dim) {
  return a.dim() == dim && b.dim() == dim && a.size(-1) == b.size(-2);  // otherwise torch has an error for it
}

// mm, bmm and those whose result has a wider dtype than the operands.
template <auto kWhole, auto kTo, int64_t kDim, class... Dtype>
struct Product {
  static Tensor& to(Keys keys, const Tensor& a, const Tensor& b, Dtype... dtype, Tensor& out) {
    const int64_t block = fit(a, b, kDim) ? block_of(a) : 0;
    if (block == 0) return kTo(below(keys), a, b, dtype..., out);
    at::native::resize_output(out, shape_of(a, b));
    in_blocks<1>(out, {a}, block, [&](Tensor y, const auto& x) { kTo(below(keys), x[0], b, dtype..., y); });
    return out;
  }
  static Tensor whole(Keys keys, const Tensor& a, const Tensor& b, Dtype... dtype) {
    if (!fit(a, b, kDim) || block_of(a) == 0) return kWhole(below(keys), a, b, dtype...);
    Tensor out = at::empty(shape_of(a, b), a.options().dtype(c10::typeMetaToScalarType(type(a, dtype...))));
    return to(keys, a, b, dtype..., out);
  }
  static caffe2::TypeMeta type(const Tensor& a) { return a.dtype(); }
  static caffe2::TypeMeta type(const Tensor&, at::ScalarType dtype) { return c10::scalarTypeToTypeMeta(dtype); }
};

// addmm and baddbmm, whose sum may be one row for all.
template <auto kWhole, auto kTo, int64_t kDim, class... Dtype>
struct Sum {
  using Number = const at::Scalar&;
  static Tensor& to(Keys keys, const Tensor& plus, const Tensor& a, const Tensor& b, Dtype... dtype, Number beta,
                    Number alpha, Tensor& out) {
    const int64_t block = fit(a, b, kDim) ? block_of(a) : 0;
    if (block == 0) return kTo(below(keys), plus, a, b, dtype..., beta, alpha, out);
    at::native::resize_output(out, shape_of(a, b));
    const bool of_all = plus.dim() < 2 || (plus.size(-2) == 1 && a.size(-2) != 1);
    in_blocks<2>(out, {a, of_all ? Tensor() : plus}, block, [&](Tensor y, const auto& x) {
      kTo(below(keys), of_all ? plus : x[1], x[0], b, dtype..., beta, alpha, y);
    });
    return out;
  }
  static Tensor whole(Keys keys, const Tensor& plus, const Tensor& a, const Tensor& b, Dtype... dtype, Number beta,
                      Number alpha) {
    if (!fit(a, b, kDim) || block_of(a) == 0) return kWhole(below(keys), plus, a, b, dtype..., beta, alpha);
    Tensor out = at::empty(shape_of(a, b), plus.options());
    return to(keys, plus, a, b, dtype..., beta, alpha, out);
  }
};

/// A function of each number on a CPU. torch computes the last numbers of a thread's share one by one, and for these
/// the functions below give other bits than for those before them: here no share has such a rest.
template <auto kWhole, auto kTo, class... Options>
struct Pointwise {
  static Tensor whole(Keys keys, const Tensor& x, Options... options) {
    // The numbers of a share, fewer than torch divides among threads; the numbers of whole vectors, of any dtype and
    // instruction set.
    constexpr int64_t kShare = 16384, kVectors = 64;
    if (!on || as_asked || x.numel() == 0 || is_in_backward() || !is_dense(x, c10::DispatchKey::CPU) ||
        !x.is_floating_point())
      return kWhole(below(keys), x, options...);
    const Tensor in = x.contiguous(), out = at::empty(x.sizes(), x.options());
    const Tensor from = in.view(-1), into = out.view(-1);
    const int64_t numbers = x.numel();
    at::parallel_for(0, (numbers + kShare - 1) / kShare, 1, [&](int64_t begin, int64_t end) {
      const at::AutoDispatchBelowADInplaceOrView unrecorded;
      for (int64_t share = begin; share < end; ++share) {
        const int64_t first = share * kShare, n = std::min(kShare, numbers - first), rest = n % kVectors;
        if (n > rest) {
          Tensor part = into.narrow(0, first, n - rest);
          kTo(below(keys), from.narrow(0, first, n - rest), options..., part);
        }
        if (rest == 0) continue;
        Tensor y = at::empty({kVectors}, x.options());
        kTo(below(keys), at::constant_pad_nd(from.narrow(0, first + n - rest, rest), {0, kVectors - rest}), options...,
            y);
        into.narrow(0, first + n - rest, rest).copy_(y.narrow(0, 0, rest));
      }
    });
    return out;
  }
  static Tensor& in_place(Keys keys, Tensor& x, Options... options) { return x.copy_(whole(keys, x, options...)); }
};

std::mutex switching;
std::unique_ptr<torch::Library> kernels;

void register_kernels(torch::Library& m) {
  namespace of = at::redispatch;
  using Type = at::ScalarType;
  using MM = Product<static_cast<Tensor (*)(Keys, const Tensor&, const Tensor&)>(of::mm),
                     static_cast<Tensor& (*)(Keys, const Tensor&, const Tensor&, Tensor&)>(of::mm_outf), 2>;
  using WideMM =
      Product<static_cast<Tensor (*)(Keys, const Tensor&, const Tensor&, Type)>(of::mm),
              static_cast<Tensor& (*)(Keys, const Tensor&, const Tensor&, Type, Tensor&)>(of::mm_outf), 2, Type>;
  using BMM = Product<static_cast<Tensor (*)(Keys, const Tensor&, const Tensor&)>(of::bmm),
                      static_cast<Tensor& (*)(Keys, const Tensor&, const Tensor&, Tensor&)>(of::bmm_outf), 3>;
  using Number = const at::Scalar&;
  using AddMM =
      Sum<static_cast<Tensor (*)(Keys, const Tensor&, const Tensor&, const Tensor&, Number, Number)>(of::addmm),
          static_cast<Tensor& (*)(Keys, const Tensor&, const Tensor&, const Tensor&, Number, Number, Tensor&)>(
              of::addmm_outf),
          2>;
  using WideAddMM =
      Sum<static_cast<Tensor (*)(Keys, const Tensor&, const Tensor&, const Tensor&, Type, Number, Number)>(of::addmm),
          static_cast<Tensor& (*)(Keys, const Tensor&, const Tensor&, const Tensor&, Type, Number, Number, Tensor&)>(
              of::addmm_outf),
          2, Type>;
  m.impl("mm", &MM::whole), m.impl("mm.out", &MM::to);
  m.impl("mm.dtype", &WideMM::whole), m.impl("mm.dtype_out", &WideMM::to);
  m.impl("bmm", &BMM::whole), m.impl("bmm.out", &BMM::to);
  m.impl("addmm", &AddMM::whole), m.impl("addmm.out", &AddMM::to);
  m.impl("addmm.dtype", &WideAddMM::whole), m.impl("addmm.dtype_out", &WideAddMM::to);

  using Sigmoid = Pointwise<&of::sigmoid, &of::sigmoid_outf>;
  using Silu = Pointwise<&of::silu, &of::silu_outf>;
  using Rsqrt = Pointwise<&of::rsqrt, &of::rsqrt_outf>;
  using Gelu = Pointwise<&of::gelu, &of::gelu_outf, c10::string_view>;
  using Softplus = Pointwise<&of::softplus, &of::softplus_outf, Number, Number>;
  using Mish = Pointwise<&of::mish, &of::mish_outf>;
  using Elu = Pointwise<&of::elu, &of::elu_outf, Number, Number, Number>;
  m.impl("sigmoid", &Sigmoid::whole), m.impl("sigmoid_", &Sigmoid::in_place);
  m.impl("silu", &Silu::whole), m.impl("silu_", &Silu::in_place);
  m.impl("rsqrt", &Rsqrt::whole), m.impl("rsqrt_", &Rsqrt::in_place);
  m.impl("gelu", &Gelu::whole), m.impl("gelu_", &Gelu::in_place);
  m.impl("mish", &Mish::whole), m.impl("mish_", &Mish::in_place);
  m.impl("elu", &Elu::whole), m.impl("elu_", &Elu::in_place);
  m.impl("softplus", &Softplus::whole);
}

/// blocks and least: a Shape's for each Where; empty: off.
void set_batch_invariant(at::IntArrayRef blocks, at::IntArrayRef least) {
  const size_t count = blocks.size();
  TORCH_CHECK_VALUE((count == 0 || count == kWheres) && least.size() == count, "set_batch_invariant: expected ",
                    int(kWheres), " numbers each, got ", count, " and ", least.size());
  for (size_t i = 0; i < count; ++i)
    TORCH_CHECK_VALUE(blocks[i] >= 0 && least[i] >= 0, "set_batch_invariant: numbers of rows cannot be negative");
  const std::lock_guard lock(switching);
  on = count > 0;
  if (!on) return kernels.reset();
  for (size_t i = 0; i < count; ++i) shapes[i].block = blocks[i], shapes[i].least = least[i];
  if (kernels) return;
  kernels = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::BackendSelect, __FILE__,
                                             __LINE__);
  register_kernels(*kernels);
}

}  // namespace

bool is_batch_invariant() { return on; }

Tensor block_of_rows(const Tensor& t, int64_t first, int64_t count, int64_t block) {
  constexpr int64_t kAlike = 16;  // bytes
  const int64_t unit = std::max<int64_t>(kAlike / t.element_size(), 1);
  const Tensor rows = t.narrow(-2, first, count);
  const bool alike = rows.stride(-1) == 1 && rows.stride(-2) % unit == 0 &&
                     reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kAlike == 0;
  if (alike && count == block) return rows;
  auto shape = rows.sizes().vec();
  shape[shape.size() - 2] = block, shape.back() = (t.size(-1) + unit - 1) / unit * unit;
  const Tensor copy = at::empty(shape, t.options()).narrow(-1, 0, t.size(-1));
  copy.narrow(-2, 0, count).copy_(rows);
  if (count < block) copy.narrow(-2, count, block - count).zero_();
  return copy;
}

AsAsked::AsAsked() : before_(as_asked) { as_asked = true; }
AsAsked::~AsAsked() { as_asked = before_; }

TORCH_LIBRARY_FRAGMENT(liger, m) { m.def("set_batch_invariant(int[] blocks, int[] least) -> ()", set_batch_invariant); }

}  // namespace liger
