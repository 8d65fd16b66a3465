#pragma once
#include <functional>
#include "liger/core/torch/operator.h"
#include "liger/functions/linear.h"
#include "liger/ops/linear/adapter_casts_op.h"
#include "liger/ops/linear/eight_bit_op.h"

/// What the operators of linear layers share.
namespace liger::op::linear {

/// Layers that share their input.
template <size_t n>
using Layers = std::array<const AdaptedLinear*, n>;

/// A number per gradient of a layer, or whether it is wanted.
template <class T>
struct LayerGradients {
  T weight, bias, a, b;
};

inline c10::SymInt rank(const AdaptedLinear& layer) { return layer.a ? layer.a->sym_size(0) : c10::SymInt(0); }

/// Checks a layer whose input has `in` columns; `name` is that of its weight, `stem` what precedes those of the rest.
void check(const Arguments& arguments, const AdaptedLinear& layer, const std::string& name, const std::string& stem,
           const c10::SymInt& in);

/// Checks that a layer has what gradients are wanted of.
inline void check(const Arguments& arguments, const AdaptedLinear& layer, const LayerGradients<bool>& wanted,
                  const std::string& stem) {
  TORCH_CHECK(!wanted.weight || !layer.weight_scale, arguments.op(), ": a weight in 8 bits has no gradient");
  const auto present = [&](const char* what, bool flag, const OptTensor& t) {
    arguments.present(("with_" + stem + what).c_str(), flag, (stem + what).c_str(), t);
  };
  present("bias", wanted.bias, layer.bias), present("a", wanted.a, layer.a), present("b", wanted.b, layer.b);
}

/// Tokens x columns; either may be 0.
inline Tensor matrix(const Tensor& t) {
  if (t.dim() == 2) return t;
  return t.reshape({c10::multiply_integers(t.sizes().slice(0, t.dim() - 1)), t.size(-1)});
}

/// x's shape with another last dimension.
inline c10::SymDimVector with_columns(const Tensor& x, const c10::SymInt& columns) {
  c10::SymDimVector shape(x.sym_sizes());
  shape.back() = columns;
  return shape;
}

/// The adapters of some layers in the input's type: one GEMM reads the input for all A, which lie one below the other.
template <size_t n>
struct Adapters {
  Tensor a;                 // [Σ rank, in]; undefined where there is no adapter
  std::array<Tensor, n> b;  // [out, rank] each
  Tensor cast;              // what both are parts of, for backward; empty where the adapters have the input's type

  /// `made` is what an earlier one was cast to, if anything.
  Adapters(const Layers<n>& layers, const Tensor& x, const Tensor& made = {}) : cast(made) {
    std::vector<Tensor> given;
    for (const AdaptedLinear* layer : layers)
      if (layer->a) given.push_back(*layer->a);
    const int64_t numbers = cast_size(layers, x.scalar_type()).expect_int();
    if (numbers == 0) {
      if (!cast.defined()) cast = at::empty({numbers}, x.options());
      if (!given.empty()) a = given.size() == 1 ? given[0] : at::cat(given);
      for (size_t i = 0; i < n; ++i) b[i] = value_or_undefined(layers[i]->b);
      return;
    }
    for (const AdaptedLinear* layer : layers)
      if (layer->b) given.push_back(*layer->b);
    if (!cast.defined()) cast = held_cast(given, x);
    const bool copies = !cast.defined();
    if (copies) cast = at::empty({numbers}, x.options());
    const int64_t rows = ranks(layers).expect_int();
    a = cast.narrow(0, 0, rows * x.size(-1)).view({rows, x.size(-1)});
    int64_t row = 0, begin = a.numel();
    std::vector<Tensor> to;
    for (const AdaptedLinear* layer : layers)
      if (copies && layer->a) to.push_back(a.narrow(0, row, layer->a->size(0))), row += layer->a->size(0);
    for (size_t i = 0; i < n; ++i) {
      if (!layers[i]->b) continue;
      b[i] = cast.narrow(0, begin, layers[i]->b->numel()).view(layers[i]->b->sizes()), begin += b[i].numel();
      to.push_back(b[i]);
    }
    if (copies) at::_foreach_copy_(to, given);  // one launch for all
  }

  static c10::SymInt ranks(const Layers<n>& layers) {
    c10::SymInt all = 0;
    for (const AdaptedLinear* layer : layers) all += rank(*layer);
    return all;
  }

  /// How many numbers `cast` has.
  static c10::SymInt cast_size(const Layers<n>& layers, at::ScalarType dtype) {
    c10::SymInt numbers = 0;
    bool same = true;
    for (const AdaptedLinear* layer : layers) {
      if (!layer->a) continue;
      numbers += layer->a->sym_numel() + layer->b->sym_numel();
      same = same && layer->a->scalar_type() == dtype && layer->b->scalar_type() == dtype;
    }
    return same ? c10::SymInt(0) : numbers;
  }
  static Tensor empty_cast(const Layers<n>& layers, const Tensor& x) {
    return at::empty_symint({cast_size(layers, x.scalar_type())}, x.options());
  }

  /// x Aᵀ of all layers side by side [tokens, Σ rank].
  Tensor low_rank(const Tensor& x) const { return a.defined() ? x.mm(a.t()) : at::empty({x.size(0), 0}, x.options()); }
  static Tensor empty_low_rank(const Layers<n>& layers, const Tensor& x) {
    return at::empty_symint({sym_rows(x), ranks(layers)}, x.options());
  }

  /// Checks what forward has kept for backward.
  static void check(const Arguments& arguments, const Layers<n>& layers, const Tensor& x, const char* low_name,
                    const Tensor& low, const char* cast_name, const Tensor& cast) {
    arguments.shaped(low_name, low, {sym_rows(x), ranks(layers)}, Type::Same)
        .shaped(cast_name, cast, {cast_size(layers, x.scalar_type())}, Type::Same);
  }

  /// The columns of layer i in what low_rank gives; undefined where it has no adapter.
  static Tensor columns_of(const Tensor& low, const Layers<n>& layers, size_t i) {
    if (!layers[i]->a) return {};
    int64_t begin = 0;
    for (size_t k = 0; k < i; ++k) begin += layers[k]->a ? layers[k]->a->size(0) : 0;
    return low.narrow(1, begin, layers[i]->a->size(0));
  }
};

/// y = x weightᵀ + bias + scale · low bᵀ. The low-rank term comes first: the GEMM of the weight adds it in float and
/// rounds the sum once, and what it reads for that hides behind its arithmetic.
void run_forward(Tensor y, const Factor& x, const Tensor& low, const AdaptedLinear& layer, const Tensor& b);

/// out = factor · aᵀ b, or out + that unless it is the `first` term; in out's type: that of a and b, or float.
void product_of_rows(Tensor out, const Tensor& a, const Tensor& b, double factor, bool first = true);

/// The gradients of layers that share their input, of one chunk of tokens after another. Sums over chunks are in float;
/// one chunk needs no accumulator: its GEMM sums in float and rounds once.
template <size_t n>
class LayersBackward {
 public:
  LayersBackward(const Layers<n>& layers, const Adapters<n>& adapters,
                 const std::array<LayerGradients<bool>, n>& wanted, bool in_chunks = false)
      : layers_(layers), adapters_(adapters), wanted_(wanted), in_chunks_(in_chunks) {}

  /// Adds the terms of tokens whose input is x and whose adapters saw `seen`: x, or x after a dropout. dx and dseen are
  /// written where they are defined, after the last use of x and seen; where both are the same, the result is the sum.
  /// `made`: as multiply_transposed takes it. With make_x, dx comes first, and then that makes x and seen of it.
  void add(const std::array<Tensor, n>& dy, const Tensor& x, const Tensor& seen, const Tensor& low, const Tensor& dx,
           const Tensor& dseen, const EightBitRows& made = {}, const std::function<void()>& make_x = {}) {
    const Tensor& a = adapters_.a;
    bool wants_a = false;
    for (size_t i = 0; i < n; ++i) wants_a = wants_a || wanted_[i].a;
    Tensor dlow;  // scale · dy b of all layers side by side
    if (a.defined() && (wants_a || dseen.defined())) dlow = at::empty_like(low);
    for (size_t i = 0; i < n && dlow.defined(); ++i) {
      if (!layers_[i]->a) continue;
      Tensor out = Adapters<n>::columns_of(dlow, layers_, i);
      at::addmm_out(out, out, dy[i], adapters_.b[i], 0, layers_[i]->scale);
    }
    if (make_x) write_inputs(dy, dlow, dx, dseen, made), make_x();
    for (size_t i = 0; i < n; ++i) {
      const AdaptedLinear& layer = *layers_[i];
      LayerGradients<Tensor>& d = gradients_[i];
      if (wanted_[i].b)
        add_product(d.b, *layer.b, in_chunks_, dy[i], Adapters<n>::columns_of(low, layers_, i), layer.scale);
      if (wanted_[i].weight) add_product(d.weight, layer.weight, in_chunks_, dy[i], x);
      if (!wanted_[i].bias) continue;
      const Tensor sum = dy[i].sum(0, false, at::kFloat);
      if (d.bias.defined()) d.bias.add_(sum);
      else d.bias = sum;
    }
    if (wants_a) add_product(da_, a, in_chunks_ || has_float_adapter(), dlow, seen);
    if (!make_x) write_inputs(dy, dlow, dx, dseen, made);
  }

  /// The sums, in the types of what they are the gradients of.
  std::array<LayerGradients<Tensor>, n> gradients() {
    int64_t begin = 0;
    for (size_t i = 0; i < n; ++i) {
      const AdaptedLinear& layer = *layers_[i];
      LayerGradients<Tensor>& d = gradients_[i];
      if (d.bias.defined()) d.bias = d.bias.to(layer.bias->scalar_type());
      if (in_chunks_ && d.weight.defined()) d.weight = d.weight.to(layer.weight.scalar_type());
      if (in_chunks_ && d.b.defined()) d.b = d.b.to(layer.b->scalar_type());
      if (!layer.a) continue;
      const int64_t rows = layer.a->size(0);
      if (wanted_[i].a) d.a = da_.narrow(0, begin, rows).to(layer.a->scalar_type());
      begin += rows;
    }
    return std::move(gradients_);
  }

 private:
  /// The gradients of x and of seen.
  void write_inputs(const std::array<Tensor, n>& dy, const Tensor& dlow, Tensor dx, Tensor dseen,
                    const EightBitRows& made) const {
    const Tensor& a = adapters_.a;
    const bool together = a.defined() && dx.defined() && dx.is_same(dseen);
    const bool all = dx.defined() && multiply_transposed(dx, dy, layers_, together ? dlow : Tensor(), a, made);
    if (dseen.defined() && a.defined() && !(all && together)) at::mm_out(dseen, dlow, a);
    bool first = !together;
    for (size_t i = 0; i < n && dx.defined() && !all; ++i, first = false) {
      const Tensor weight = whole(*layers_[i], dx.scalar_type());
      first ? at::mm_out(dx, dy[i], weight) : at::addmm_out(dx, dx, dy[i], weight);
    }
  }

  bool has_float_adapter() const {
    for (const AdaptedLinear* layer : layers_)
      if (layer->a && layer->a->scalar_type() == at::kFloat) return true;
    return false;
  }

  /// sum += factor · aᵀ b, where an undefined sum is 0; as large as `like`, and in its type or in float.
  static void add_product(Tensor& sum, const Tensor& like, bool in_float, const Tensor& a, const Tensor& b,
                          double factor = 1) {
    const bool first = !sum.defined();
    if (first) sum = at::empty(like.sizes(), in_float ? like.options().dtype(at::kFloat) : like.options());
    product_of_rows(sum, a, b, factor, first);
  }

  const Layers<n>& layers_;
  const Adapters<n>& adapters_;
  const std::array<LayerGradients<bool>, n> wanted_;
  const bool in_chunks_;
  std::array<LayerGradients<Tensor>, n> gradients_;
  Tensor da_;  // of all a, which lie one below the other
};

/// Room for a gradient of x, if it is wanted.
inline Tensor room(bool wanted, const Tensor& x) {
  // Contiguous, whatever x is: a GEMM must write to it and not to a copy.
  return wanted ? output(at::empty(x.sizes(), x.options())) : Tensor();
}

/// A gradient where there is nothing to compute: its shape, or zeros where there are no rows; undefined if not wanted.
inline Tensor nothing(bool wanted, const OptTensor& like) {
  if (!wanted) return {};
  const Tensor t = at::empty_symint(like->sym_sizes(), like->options());
  return t.is_meta() ? t : t.zero_();
}
inline LayerGradients<Tensor> nothing(const LayerGradients<bool>& wanted, const AdaptedLinear& layer) {
  return {nothing(wanted.weight, layer.weight), nothing(wanted.bias, layer.bias), nothing(wanted.a, layer.a),
          nothing(wanted.b, layer.b)};
}

inline bool is_nothing(const Tensor& x) {
  return x.is_meta() || c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)) == 0;
}

}  // namespace liger::op::linear
