#pragma once
#include "liger/ops/activation/gated_op.h"
#include "liger/ops/linear/linear_op.h"

/// A layer whose input is an activation, or the product of a gated one: the last one of an MLP. Backward makes its
/// input again.
namespace liger::op::linear {

/// The rows of a chunk: of a tensor that has those of all chunks, or of a buffer for one.
inline Tensor part(const Tensor& t, int64_t begin, int64_t n) {
  return t.defined() && t.size(0) != n ? t.narrow(0, begin, n) : t;
}

/// How many tokens a product that is read in 8 bits is made of at once: a quarter, and not few.
inline int64_t part_of(int64_t tokens) { return std::min(tokens, std::max<int64_t>(256, ceil_div(tokens, 4))); }

/// The input of the layer for some tokens, in c, and what its adapter makes of that. Where the layer reads its input in
/// 8 bits, this returns it, and c has room for a part of it only: 16 bits are for the adapter alone. make(begin, n,
/// part of c, bytes) makes the input of n tokens, and returns whether it has written the bytes.
template <class F>
EightBitRows run_input(const Tensor& c, int64_t tokens, const Tensor& a, const Tensor& low,
                       std::optional<EightBit> format, F make) {
  const EightBitRows all = format ? empty_rows(tokens, c.size(1), *format, c) : EightBitRows();
  for_chunks(tokens, c.size(0), [&](int64_t begin, int64_t n) {
    const Tensor input = part(c, 0, n);
    const gated::Bytes bytes{format ? all.part(begin, n).to() : RowBytes()};
    const bool made = make(begin, n, input, format ? &bytes : nullptr);
    if (format && !made) write_bytes(bytes.to, input);
    Tensor of_low = part(low, begin, n);
    if (a.defined()) at::mm_out(of_low, input, a.t());
  });
  return all;
}

/// The same for the product of gate and up.
inline EightBitRows run_product(const Tensor& gate, const Tensor& up, const Tensor& c, const GateForm& form,
                                const Tensor& a, const Tensor& low, std::optional<EightBit> format) {
  return run_input(c, gate.size(0), a, low, format,
                   [&](int64_t begin, int64_t n, const Tensor& product, const gated::Bytes* bytes) {
                     return gated::run_forward(part(gate, begin, n), part(up, begin, n), product, form, bytes);
                   });
}

/// What backward of the layer has of some tokens: gate and up, and room for their gradients, whose rows are d_stride
/// elements apart and which may be gate and up.
struct GateAndUp {
  Tensor gate, up, dgate, dup;
  int64_t d_stride;
  GateForm form;
};

/// Which gradients such a layer has: of what its input is made of, and those for which it must see its input.
struct ActivatedWanted {
  bool inner, of_inputs;
  ActivatedWanted(bool inner, const LayerGradients<bool>& layer) : inner(inner), of_inputs(layer.weight || layer.a) {}
};

/// Adds the terms of the layer, and writes the gradients of what its input is made of. `input` is room for the input
/// and its gradient: make() writes the input there; gradients(c) reads the gradient there, writes those of what the
/// input is made of, and where c is defined the input into c, which may be `input`. With `apart`, the gradient stays
/// there, and the caller makes the others.
template <class Make, class Gradients>
void add_activated_layer(LayersBackward<1>& layer, const Tensor& dy, const Tensor& input, const Tensor& low,
                         const ActivatedWanted& wanted, bool apart, Make make, Gradients gradients) {
  // One kernel makes the gradients and recomputes the input, over the gradient that it has read.
  const bool at_once = wanted.inner && wanted.of_inputs && !apart;
  if (wanted.of_inputs && !at_once) make();
  const Tensor dinput = wanted.inner ? input : Tensor();
  std::function<void()> make_input;
  if (at_once) make_input = [&] { gradients(input); };
  layer.add({dy}, input, input, low, dinput, dinput, {}, make_input);
  if (wanted.inner && !at_once && !apart) gradients(Tensor());
}

/// The same for the product of gate and up.
inline void add_gated_layer(LayersBackward<1>& layer, const Tensor& dy, const Tensor& product, const Tensor& low,
                            const GateAndUp& of, const ActivatedWanted& wanted, bool apart = false) {
  add_activated_layer(
      layer, dy, product, low, wanted, apart, [&] { gated::run_forward(of.gate, of.up, product, of.form); },
      [&](const Tensor& c) {
        gated::run_backward(product, of.gate, of.up, of.dgate, of.dup, of.d_stride, of.form, nullptr, c);
      });
}

}  // namespace liger::op::linear
