#pragma once
#include "liger/ops/activation/gated_op.h"
#include "liger/ops/linear/linear_op.h"

/// A layer whose input is the product of a gated activation, as the last one of a gated MLP. Backward makes the product
/// again.
namespace liger::op::linear {

/// The rows of a chunk: of a tensor that has those of all chunks, or of a buffer for one.
inline Tensor part(const Tensor& t, int64_t begin, int64_t n) {
  return t.defined() && t.size(0) != n ? t.narrow(0, begin, n) : t;
}

/// How many tokens a product that is read in 8 bits is made of at once: a quarter, and not few.
inline int64_t part_of(int64_t tokens) { return std::min(tokens, std::max<int64_t>(256, ceil_div(tokens, 4))); }

/// The product of gate and up, in c, and what the adapter of the layer makes of it. Where the layer reads the product
/// in 8 bits, this returns it, and c has room for a part of it only: 16 bits are for the adapter alone.
inline EightBitRows run_product(const Tensor& gate, const Tensor& up, const Tensor& c, const GateForm& form,
                                const Tensor& a, const Tensor& low, std::optional<EightBit> format) {
  const int64_t tokens = gate.size(0);
  const EightBitRows all = format ? empty_rows(tokens, gate.size(1), *format, gate) : EightBitRows();
  for_chunks(tokens, c.size(0), [&](int64_t begin, int64_t n) {
    const Tensor product = part(c, 0, n);
    const gated::Bytes bytes{format ? all.part(begin, n).to() : RowBytes()};
    const bool made =
        gated::run_forward(part(gate, begin, n), part(up, begin, n), product, form, format ? &bytes : nullptr);
    if (format && !made) write_bytes(bytes.to, product);
    Tensor of_low = part(low, begin, n);
    if (a.defined()) at::mm_out(of_low, product, a.t());
  });
  return all;
}

/// What backward of the layer has of some tokens: gate and up, and room for their gradients, whose rows are d_stride
/// elements apart and which may be gate and up.
struct GateAndUp {
  Tensor gate, up, dgate, dup;
  int64_t d_stride;
  GateForm form;
};

/// Which gradients such a layer has: of gate and up, and those for which it must see the product.
struct GatedLayerWanted {
  bool inner, of_products;
  GatedLayerWanted(bool inner, const LayerGradients<bool>& layer)
      : inner(inner), of_products(layer.weight || layer.a) {}
};

/// Adds the terms of the layer, and writes the gradients of gate and up. `product` is room for the product and its
/// gradient. With `apart`, the gradient stays there, and the caller makes those of gate and up.
inline void add_gated_layer(LayersBackward<1>& layer, const Tensor& dy, const Tensor& product, const Tensor& low,
                            const GateAndUp& of, const GatedLayerWanted& wanted, bool apart = false) {
  const auto gradients = [&](const Tensor& c) {
    gated::run_backward(product, of.gate, of.up, of.dgate, of.dup, of.d_stride, of.form, nullptr, c);
  };
  // One kernel makes both gradients and recomputes the product, over the gradient that it has read.
  const bool at_once = wanted.inner && wanted.of_products && !apart;
  if (wanted.of_products && !at_once) gated::run_forward(of.gate, of.up, product, of.form);
  const Tensor dproduct = wanted.inner ? product : Tensor();
  std::function<void()> make_product;
  if (at_once) make_product = [&] { gradients(product); };
  layer.add({dy}, product, product, low, dproduct, dproduct, {}, make_product);
  if (wanted.inner && !at_once && !apart) gradients({});
}

}  // namespace liger::op::linear
