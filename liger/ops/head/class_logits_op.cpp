#include "liger/core/torch/operator.h"
#include "liger/functions/head.h"
#include "liger/ops/head/class_logits.h"
#include "liger/ops/head/head_op.h"

namespace liger {
namespace op {

struct ClassLogits {
  static constexpr Name kName = "class_logits";
  static constexpr Autocast kAutocast = Autocast::Cast;
  struct Inputs {
    Tensor hidden, weight;
    OptTensor bias;
    Tensor class_ids;
    LIGER_FIELDS(hidden, weight, bias, class_ids)
  };
  using Saved = Inputs;
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dhidden, dweight, dbias;
    LIGER_FIELDS(dhidden, dweight, dbias)
  };

  static void check(const char* op, const Inputs& in) {
    const Arguments arguments(op, "hidden", in.hidden);
    TORCH_CHECK(in.weight.dim() == 2, op, ": weight must be [classes, width], got ", in.weight.sym_sizes());
    const c10::SymInt classes = in.weight.sym_size(0);
    arguments.shaped("weight", in.weight, {classes, in.hidden.sym_size(-1)}, Type::Same)
        .vector("bias", in.bias, classes, Type::Same);
    head::check_class_ids(op, arguments, in.hidden, in.class_ids);
  }

  /// The operands as rows, contiguous.
  struct Flat {
    Tensor hidden, weight, bias, ids;
    int64_t rows, count, cols;
    explicit Flat(const Inputs& in)
        : hidden(in.hidden.reshape({-1, in.hidden.size(-1)}).contiguous()),
          weight(in.weight.contiguous()),
          bias(in.bias ? in.bias->contiguous() : Tensor()),
          ids(in.class_ids.reshape({hidden.size(0), in.class_ids.size(-1)}).to(at::kLong).contiguous()),
          rows(hidden.size(0)),
          count(ids.size(1)),
          cols(hidden.size(1)) {}
  };

  static Tensor forward(const Inputs& in) {
    check("class_logits", in);
    const Tensor y = output(at::empty_symint(in.class_ids.sym_sizes(), in.hidden.options().dtype(at::kFloat)));
    if (y.is_meta() || y.numel() == 0) return y;
    const Flat of(in);
    int64_t bad_class = -1;
    run(class_logits_forward, of.hidden,
        {.x = data(of.hidden),
         .w = data(of.weight),
         .bias = of.bias.defined() ? data(of.bias) : nullptr,
         .ids = data<int64_t>(of.ids),
         .y = data<float>(y),
         .bad_class = &bad_class,
         .rows = of.rows,
         .count = of.count,
         .cols = of.cols,
         .classes = of.weight.size(0),
         .dtype = dtype_of(of.hidden)});
    TORCH_CHECK_INDEX(bad_class == -1, "class_logits: class ", bad_class, " is out of bounds: it is outside [0, ",
                      of.weight.size(0), ") and not -1, for none");
    return y;
  }

  static Saved save(const Inputs& in, const Tensor&) { return in; }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted) {
    constexpr auto op = "class_logits_backward";
    check(op, s);
    Arguments(op, "dy", up.dy).shaped("class_ids", s.class_ids, up.dy.sym_sizes(), Type::Integer);
    const auto like = [](bool wanted, const Tensor& t) {
      return wanted ? output(at::empty_symint(t.sym_sizes(), t.options())) : Tensor();
    };
    Gradients<Tensor> d{like(wanted.dhidden, s.hidden), {}, {}};
    if (s.hidden.is_meta()) {
      d.dweight = like(wanted.dweight, s.weight);
      if (s.bias) d.dbias = like(wanted.dbias, *s.bias);
      return d;
    }
    const Flat of(s);
    const Tensor dy = up.dy.to(at::kFloat).contiguous();
    if (wanted.dhidden && d.dhidden.numel() > 0)
      run(class_logits_dx, of.hidden,
          {.dy = data<float>(dy),
           .w = data(of.weight),
           .ids = data<int64_t>(of.ids),
           .dx = d.dhidden.data_ptr(),
           .rows = of.rows,
           .count = of.count,
           .cols = of.cols,
           .dtype = dtype_of(of.hidden)});
    if (!wanted.dweight && !(wanted.dbias && s.bias)) return d;
    if (wanted.dweight) d.dweight = output(at::zeros_like(of.weight));
    const bool with_bias = wanted.dbias && s.bias;
    const Tensor db = with_bias ? at::zeros({of.weight.size(0)}, dy.options()) : Tensor();
    if (dy.numel() > 0) {
      const auto [sorted, from] = of.ids.view(-1).sort(true, 0, false);  // stable: in the order of the tokens
      run(class_logits_dw, of.hidden,
          {.dy = data<float>(dy),
           .x = data(of.hidden),
           .ids = data<int64_t>(sorted),
           .from = data<int64_t>(from),
           .dw = wanted.dweight ? d.dweight.data_ptr() : nullptr,
           .db = with_bias ? data<float>(db) : nullptr,
           .pairs = dy.numel(),
           .count = of.count,
           .cols = of.cols,
           .dtype = dtype_of(of.hidden)});
    }
    if (with_bias) d.dbias = db.to(s.bias->scalar_type());
    return d;
  }
};

}  // namespace op

Tensor class_logits(const Tensor& hidden, const Tensor& weight, const Tensor& class_ids, const OptTensor& bias) {
  return Operator<op::ClassLogits>::public_op(hidden, weight, bias, class_ids);
}

LIGER_OPERATORS(class_logits, Operator<op::ClassLogits>)

}  // namespace liger
