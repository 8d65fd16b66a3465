#include "liger/core/torch/batch_invariant.h"
#include "liger/core/torch/eight_bit.h"
#include "liger/core/torch/grouped.h"
#include "liger/core/torch/operator.h"
#include "liger/functions/experts.h"
#include "liger/ops/experts/experts.h"
#include "liger/ops/activation/activate.h"
#include "liger/ops/activation/gated_op.h"

namespace liger {
LIGER_OPTIONAL(grouped_gated);

namespace op::fused_experts {

/// Which tokens an expert gets (SortByExpert), of the rows that buffers of pairs have.
struct Routing {
  Tensor order;  // [rows] int32
  Tensor place;  // [tokens, k] int32
  Tensor ends;   // [experts] int32
};

/// The rows of buffers of pairs: all pairs', or most_rows where that is less.
c10::SymInt rows_of(const c10::SymInt& pairs, const ExpertsOptions& o) {
  return o.most_rows < 0 ? pairs : pairs.min(o.most_rows);
}

Routing sorted_by_expert(const Tensor& index_, int64_t experts, const ExpertsOptions& o) {
  TORCH_CHECK(experts > 0, "fused_experts: gate_up must hold an expert");
  const Tensor index = index_.to(at::kLong).contiguous();
  const auto ints = index.options().dtype(at::kInt);
  Routing r{at::empty({index.numel()}, ints), at::empty(index.sizes(), ints), at::empty({experts}, ints)};
  TORCH_CHECK(index.numel() <= std::numeric_limits<int>::max(), "fused_experts: index has ", index.numel(),
              " numbers, 2^31 - 1 at most");
  int64_t bytes = 0;
  SortByExpert a{.index = data<int64_t>(index),
                 .order = data<int>(r.order),
                 .place = data<int>(r.place),
                 .ends = data<int>(r.ends),
                 .scratch = nullptr,
                 .scratch_bytes = &bytes,
                 .pairs = index.numel(),
                 .experts = experts};
  run(sort_by_expert, index, a);
  const Tensor scratch = at::empty({bytes}, index.options().dtype(at::kByte));
  a.scratch = scratch.data_ptr();
  run(sort_by_expert, index, a);
  if (const int64_t rows = rows_of(index.numel(), o).expect_int(); rows < index.numel()) {
    // Before a kernel writes behind its buffer: on CUDA a device assertion, for which nobody waits.
    at::_assert_async(r.ends[-1].le(rows), "fused_experts: more pairs have an expert than most_rows");
    r.order = r.order.narrow(0, 0, rows);
  }
  return r;
}

/// The token's row of x, times the pair's weight where there are weights, for each sorted pair: rows [pairs, cols].
void spread(const Tensor& x_, const Routing& r, const Tensor& weights, const Tensor& rows) {
  const Tensor x = x_.contiguous();
  run(spread_tokens, x,
      {.x = data(x),
       .weights = numbers(weights),
       .place = data<int>(r.place),
       .rows = rows.data_ptr(),
       .tokens = x.size(0),
       .k = r.place.size(1),
       .cols = x.size(1),
       .dtype = dtype_of(x)});
}

Tensor spread(const Tensor& x, const Routing& r) {
  const Tensor rows = output(at::empty({r.order.numel(), x.size(1)}, x.options()));
  spread(x, r, {}, rows);
  return rows;
}

/// A matrix of every expert, its bias, and what adapters add to it: y = x matrix + bias + scale · (x aᵀ) bᵀ.
struct Matrix {
  Tensor of;       // [experts, in, out]
  OptTensor bias;  // [experts, out]
  Tensor a, b;     // [experts, rank, in], [experts, out, rank], undefined where there is no adapter
  double scale;

  Matrix(const Tensor& of, const OptTensor& bias, const OptTensor& a, const OptTensor& b, double scale)
      : of(of),
        bias(bias ? OptTensor(bias->contiguous()) : bias),
        a(value_or_undefined(a)),
        b(value_or_undefined(b)),
        scale(scale) {}

  /// scale · x aᵀ: [pairs, rank], undefined without an adapter.
  Tensor low(const Tensor& x, const Tensor& ends) const {
    return a.defined() ? scaled(grouped(x, a.transpose(1, 2), ends)) : Tensor();
  }
  /// scale · dy b, which a makes a gradient of x.
  Tensor low_of_gradient(const Tensor& dy, const Tensor& ends) const {
    return a.defined() ? scaled(grouped(dy, b, ends)) : Tensor();
  }

  /// What is added to x's product.
  GroupedTerms terms(const Tensor& x, const Tensor& ends) const {
    return {bias, low(x, ends), a.defined() ? b.transpose(1, 2) : Tensor()};
  }
  Tensor apply(const Tensor& x, const Tensor& ends) const { return grouped(x, of, ends, terms(x, ends)); }
  /// dx of dy, with low_of_gradient(dy).
  Tensor apply_transposed(const Tensor& dy, const Tensor& low, const Tensor& ends) const {
    return grouped(dy, of.transpose(1, 2), ends, {{}, low, a});
  }

 private:
  Tensor scaled(const Tensor& low) const { return scale == 1 ? low : multiplied(low, scale); }
};

Tensor combine(const Tensor& rows, const Routing& r, const Tensor& weights) {
  const Tensor y = output(at::empty({r.place.size(0), rows.size(1)}, rows.options()));
  run(combine_experts, y,
      {.rows = data(rows),
       .weights = numbers(weights),
       .place = data<int>(r.place),
       .y = y.data_ptr(),
       .tokens = y.size(0),
       .k = r.place.size(1),
       .cols = y.size(1),
       .dtype = dtype_of(y)});
  return y;
}

GateForm form(const char* op, const ExpertsOptions& o) {
  const bool of_gate = o.interleaved || o.gate.limit != 0 || o.gate.alpha != 1 || o.gate.up_offset != 0;
  TORCH_CHECK_VALUE(o.gated || !of_gate, op, ": limit, alpha, up_offset and interleaved are of experts with a gate");
  return gated::form(op, int64_t(o.activation), 1, o.gate, o.interleaved);
}

/// The numbers that an expert activates, of so many rows of its first matrix.
auto width_of(const ExpertsOptions& o, const auto& rows) { return o.gated ? rows / 2 : rows; }

Tensor activated(const ExpertsOptions& o, const Tensor& a) {
  const int64_t width = width_of(o, a.size(1));
  const Tensor h = output(at::empty({a.size(0), width}, a.options()));
  if (!o.gated)
    run(activate_forward, a,
        {.x = data(a), .y = h.data_ptr(), .count = a.numel(), .dtype = dtype_of(a), .activation = o.activation});
  else if (o.interleaved) gated::run_forward(a, h, h, form("fused_experts", o));
  else gated::run_forward(a.narrow(1, 0, width), a.narrow(1, width, width), h, form("fused_experts", o));
  return h;
}

/// What experts make of rows x of sorted pairs before their second matrix.
struct GatedRows {
  Tensor a, h;  // [pairs, rows of gate_up], undefined unless it is kept; what it is activated to [pairs, width]
};

/// By one kernel where there is one.
GatedRows gated_rows(const Tensor& x, const Matrix& gate_up, const Routing& r, const ExpertsOptions& o, bool keep) {
  const int64_t rows = gate_up.of.size(2), width = width_of(o, rows);
  GroupedTerms terms = gate_up.terms(x, r.ends);
  if (width % 8 == 0 && grouped_gated.has(Backend(x.device().type())))
    if (std::optional<GroupedRows> product = grouped_by_kernel(x, gate_up.of, r.ends, terms)) {
      const GatedRows out{keep ? output(at::empty({x.size(0), rows}, x.options())) : Tensor(),
                          output(at::empty({x.size(0), width}, x.options()))};
      if (keep) product->out = out.a.data_ptr();
      run(grouped_gated, x,
          {.product = *product, .h = out.h.data_ptr(), .form = form("fused_experts", o), .gated = o.gated});
      return out;
    }
  const Tensor a = grouped(x, gate_up.of, r.ends, terms);
  return {keep ? a : Tensor(), activated(o, a)};
}

/// Routing weights as kernels read them: in float where their dtype is none that kernels know.
Tensor as_numbers(const Tensor& weights) {
  return (has_dtype(weights.scalar_type()) ? weights : weights.to(at::kFloat)).contiguous();
}

/// w [experts, out, in], or transposed, as [experts, in, out] of x's dtype; in 8 bits, it has a scale per row.
Tensor inputs_first(const ExpertsOptions& o, const Tensor& w_, const OptTensor& scale, const Tensor& x) {
  const Tensor w = scale ? dequantised(w_, *scale, x.scalar_type()) : w_;
  return o.transposed ? w : w.transpose(1, 2);
}

}  // namespace op::fused_experts

namespace op {

struct FusedExperts {
  static constexpr Name kName = "fused_experts";
  using Options = ExpertsOptions;
  struct Operands {
    Tensor x, gate_up, down, weights;
    OptTensor gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b, gate_up_weight_scale, down_weight_scale;
    LIGER_FIELDS(x, gate_up, down, weights, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b,
                 gate_up_weight_scale, down_weight_scale)

    fused_experts::Matrix gate_up_of(const Options& o) const {
      return {fused_experts::inputs_first(o, gate_up, gate_up_weight_scale, x), gate_up_bias, gate_up_a, gate_up_b,
              o.gate_up_scale};
    }
    fused_experts::Matrix down_of(const Options& o) const {
      return {fused_experts::inputs_first(o, down, down_weight_scale, x), down_bias, down_a, down_b, o.down_scale};
    }
  };
  struct Inputs {
    Operands of;
    Tensor index;
    LIGER_FIELDS(of, index)
  };
  struct Record {
    bool keep;  // gate and up, for backward
    LIGER_FIELDS(keep)
  };
  struct Results {
    Tensor y, order, place, ends, kept;  // kept: gate and up, [pairs, rows of gate_up], or empty
    LIGER_FIELDS(y, order, place, ends, kept)
  };
  struct Saved {
    Operands of;
    Tensor order, place, ends, kept;
    LIGER_FIELDS(of, order, place, ends, kept)
  };
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dx, dgate_up, ddown, dweights, dgate_up_bias, ddown_bias, dgate_up_a, dgate_up_b, ddown_a, ddown_b;
    LIGER_FIELDS(dx, dgate_up, ddown, dweights, dgate_up_bias, ddown_bias, dgate_up_a, dgate_up_b, ddown_a, ddown_b)
  };

  /// The weights of experts, and the scales of matrices in 8 bits, stay as they are.
  static constexpr Autocast kAutocast = Autocast::Cast;
  static auto uncast(auto& in) { return refs(in.of.weights, in.of.gate_up_weight_scale, in.of.down_weight_scale); }

  static c10::SymInt rows_of_gate_up(const Options& o, const Operands& in) {
    return in.gate_up.sym_size(o.transposed ? 2 : 1);
  }

  static Arguments check(const char* op, const Options& o, const Operands& in, c10::SymIntArrayRef pairs) {
    const Arguments arguments(op, "x", in.x);
    TORCH_CHECK(in.x.dim() == 2 && in.gate_up.dim() == 3 && pairs.size() == 2, op,
                ": x must be [tokens, width], gate_up three-dimensional and index [tokens, k], got ", in.x.sym_sizes(),
                ", ", in.gate_up.sym_sizes(), " and ", pairs);
    const c10::SymInt experts = in.gate_up.sym_size(0), width = in.x.sym_size(1), rows = rows_of_gate_up(o, in),
                      inner = fused_experts::width_of(o, rows);
    TORCH_CHECK(!o.gated || rows % 2 == 0, op, ": gate_up must hold gate and up, got ", in.gate_up.sym_sizes());
    TORCH_CHECK(o.most_rows >= -1, op, ": most_rows must be -1, for no bound, or a number of pairs, got ", o.most_rows);
    const auto shaped = [&](const c10::SymInt& out, const c10::SymInt& in) {
      return o.transposed ? std::array{experts, in, out} : std::array{experts, out, in};
    };
    const auto matrix = [](const OptTensor& scale) { return scale ? Type::EightBit : Type::Same; };
    arguments.shaped("gate_up", in.gate_up, shaped(rows, width), matrix(in.gate_up_weight_scale))
        .shaped("down", in.down, shaped(width, inner), matrix(in.down_weight_scale))
        .shaped("gate_up_weight_scale", in.gate_up_weight_scale, std::array{experts, in.gate_up.sym_size(1)},
                Type::Float)
        .shaped("down_weight_scale", in.down_weight_scale, std::array{experts, in.down.sym_size(1)}, Type::Float)
        .shaped("weights", in.weights, pairs, Type::Floating)
        .shaped("gate_up_bias", in.gate_up_bias, std::array{experts, rows}, Type::Same)
        .shaped("down_bias", in.down_bias, std::array{experts, width}, Type::Same);
    const auto adapter = [&](const char* name_a, const OptTensor& a, const char* name_b, const OptTensor& b,
                             const c10::SymInt& in, const c10::SymInt& out) {
      TORCH_CHECK(a.has_value() == b.has_value(), op, ": ", name_a, " and ", name_b, " must be given together");
      if (!a) return;
      TORCH_CHECK(a->dim() == 3, op, ": ", name_a, " must be three-dimensional, got ", a->sym_sizes());
      const c10::SymInt rank = a->sym_size(1);
      arguments.shaped(name_a, a, std::array{experts, rank, in}, Type::Same)
          .shaped(name_b, b, std::array{experts, out, rank}, Type::Same);
    };
    adapter("gate_up_a", in.gate_up_a, "gate_up_b", in.gate_up_b, width, rows);
    adapter("down_a", in.down_a, "down_b", in.down_b, inner, width);
    fused_experts::form(op, o);
    return arguments;
  }

  static Record record(const Inputs&, const Options& o, const Gradients<bool>& wanted) {
    return {any(wanted) && !o.recompute};
  }

  static Results forward(const Inputs& in, const Record& record, const Options& o) {
    using namespace fused_experts;
    const Tensor &x_ = in.of.x, &gate_up = in.of.gate_up;
    check(kName.text, o, in.of, in.index.sym_sizes())
        .shaped("index", in.index, {x_.sym_size(0), in.index.sym_size(1)}, Type::Integer);
    const auto ints = x_.options().dtype(at::kInt);
    if (x_.is_meta()) {
      const c10::SymInt pairs = rows_of(in.index.sym_numel(), o);
      const c10::SymInt none = 0;
      return {
          at::empty_symint(x_.sym_sizes(), x_.options()), at::empty_symint({pairs}, ints),
          at::empty_symint(in.index.sym_sizes(), ints), at::empty_symint({gate_up.sym_size(0)}, ints),
          at::empty_symint({record.keep ? pairs : none, record.keep ? rows_of_gate_up(o, in.of) : none}, x_.options())};
    }
    const Routing r = sorted_by_expert(in.index, gate_up.size(0), o);
    // The rows of x are gone before those of the second product are there.
    const GatedRows gated = gated_rows(spread(x_, r), in.of.gate_up_of(o), r, o, record.keep);
    const Tensor outputs = in.of.down_of(o).apply(gated.h, r.ends);
    return {combine(outputs, r, as_numbers(in.of.weights)), r.order, r.place, r.ends,
            record.keep ? gated.a : at::empty({0, 0}, x_.options())};
  }

  static Saved save(const Inputs& in, const Results& out) { return {in.of, out.order, out.place, out.ends, out.kept}; }

  static void check_saved(const Upstream& up, const Saved& s, const Gradients<bool>& wanted, const Options& o) {
    TORCH_CHECK(!(wanted.dgate_up && s.of.gate_up_weight_scale) && !(wanted.ddown && s.of.down_weight_scale),
                "fused_experts: a weight in 8 bits has no gradient");
    const c10::SymInt pairs = fused_experts::rows_of(s.place.sym_numel(), o);
    const Arguments arguments = check("fused_experts_backward", o, s.of, s.place.sym_sizes());
    arguments.like("dy", up.dy)
        .shaped("place", s.place, {s.of.x.sym_size(0), s.place.sym_size(1)}, Type::Integer)
        .vector("order", s.order, pairs, Type::Integer)
        .vector("ends", s.ends, s.of.gate_up.sym_size(0), Type::Integer)
        .present("with_dgate_up_bias", wanted.dgate_up_bias, "gate_up_bias", s.of.gate_up_bias)
        .present("with_ddown_bias", wanted.ddown_bias, "down_bias", s.of.down_bias)
        .present("with_dgate_up_a", wanted.dgate_up_a, "gate_up_a", s.of.gate_up_a)
        .present("with_dgate_up_b", wanted.dgate_up_b, "gate_up_b", s.of.gate_up_b)
        .present("with_ddown_a", wanted.ddown_a, "down_a", s.of.down_a)
        .present("with_ddown_b", wanted.ddown_b, "down_b", s.of.down_b);
    if (s.kept.sym_numel() == 0) arguments.any("kept", s.kept, Type::Same);
    else arguments.shaped("kept", s.kept, {pairs, rows_of_gate_up(o, s.of)}, Type::Same);
  }

  /// What backward works on: sorted pairs of token and expert.
  struct Pairs {
    fused_experts::Routing r;
    Tensor x, dy;            // rows of each pair
    Tensor da, h, dweights;  // the gradient of gate and up, weight · activated, the gradient of weights
    Tensor low_dy, low_da;   // low_of_gradient of dy and da

    /// overwrite: da has the memory of what forward has kept.
    Pairs(const Upstream& up, const Saved& s, const fused_experts::Matrix& gate_up, const fused_experts::Matrix& down,
          const Options& o, bool overwrite)
        : r{s.order.to(at::kInt).contiguous(), s.place.to(at::kInt).contiguous(), s.ends.to(at::kInt).contiguous()},
          x(fused_experts::spread(s.of.x, r)),
          dy(fused_experts::spread(up.dy, r)) {
      using namespace fused_experts;
      const Tensor a = s.kept.numel() > 0 ? s.kept.contiguous() : gate_up.apply(x, r.ends);
      low_dy = down.low_of_gradient(dy, r.ends);
      h = down.apply_transposed(dy, low_dy, r.ends);  // and then weight · activated
      da = overwrite || s.kept.numel() == 0 ? a : output(at::empty(a.sizes(), a.options()));
      activate(s, o, a, down.bias);
      low_da = gate_up.low_of_gradient(da, r.ends);
    }

    /// da, h and dweights, from gate and up and from the gradient of their activation, which is in h.
    void activate(const Saved& s, const Options& o, const Tensor& a, const OptTensor& bias) {
      using namespace fused_experts;
      const Tensor weights = as_numbers(s.of.weights);
      const Tensor experts = bias ? groups_of_rows(r.ends, r.order.numel()) : Tensor();
      // The kernel writes those of the pairs that have a row.
      const auto floats = weights.options().dtype(at::kFloat);
      dweights =
          r.order.numel() < weights.numel() ? at::zeros(weights.sizes(), floats) : at::empty(weights.sizes(), floats);
      run(experts_backward, da,
          {.a = data(a),
           .da = da.data_ptr(),
           .dh = h.data_ptr(),
           .order = data<int>(r.order),
           .valid = data<int>(r.ends) + r.ends.numel() - 1,
           .weights = numbers(weights),
           .dweights = data<float>(dweights),
           .pairs = r.order.numel(),
           .cols = h.size(1),
           .dtype = dtype_of(da),
           .form = form("fused_experts_backward", o),
           .gated = o.gated,
           .dy = data(dy),
           .bias = bias ? bias->const_data_ptr() : nullptr,
           .experts = bias ? data<int>(experts) : nullptr,
           .width = dy.size(1)});
    }
  };

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted,
                                    const Options& o) {
    return run_backward(up, s, wanted, o, false);
  }
  static Gradients<Tensor> last_backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted,
                                         const Options& o) {
    s.kept.unsafeGetTensorImpl()->bump_version();
    return run_backward(up, s, wanted, o, true);
  }

  /// overwrite: the gradients of gate and up are written over what forward has kept of these.
  static Gradients<Tensor> run_backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted,
                                        const Options& o, bool overwrite) {
    using namespace fused_experts;
    check_saved(up, s, wanted, o);
    Gradients<Tensor> d;
    const Operands& of = s.of;
    if (of.x.is_meta()) {
      const auto like = [](bool wanted, const OptTensor& t) {
        return wanted ? at::empty_symint(t->sym_sizes(), t->options()) : Tensor();
      };
      return {like(wanted.dx, of.x),
              like(wanted.dgate_up, of.gate_up),
              like(wanted.ddown, of.down),
              like(wanted.dweights, of.weights),
              like(wanted.dgate_up_bias, of.gate_up_bias),
              like(wanted.ddown_bias, of.down_bias),
              like(wanted.dgate_up_a, of.gate_up_a),
              like(wanted.dgate_up_b, of.gate_up_b),
              like(wanted.ddown_a, of.down_a),
              like(wanted.ddown_b, of.down_b)};
    }
    Matrix gate_up = of.gate_up_of(o), down = of.down_of(o);
    if (!wanted.dweights) down.bias.reset();  // backward reads it for them alone
    Pairs p(up, s, gate_up, down, o, overwrite);
    down.of.reset();  // of 8 bits it was a copy
    const auto outer = [&](const Tensor& d_out, const Tensor& in) {
      return o.transposed ? grouped_outer(in, d_out, p.r.ends) : grouped_outer(d_out, in, p.r.ends);
    };
    const Tensor& ends = p.r.ends;
    // The second matrix first: what its gradients alone read makes room for those of the first, which are larger.
    if (wanted.dweights) d.dweights = p.dweights.to(of.weights.scalar_type());
    if (wanted.ddown) d.ddown = outer(p.dy, p.h);
    if (wanted.ddown_a) d.ddown_a = grouped_outer(p.low_dy, p.h, ends);
    if (wanted.ddown_b) d.ddown_b = grouped_outer(p.dy, down.low(p.h, ends), ends);
    if (wanted.ddown_bias) {
      spread(up.dy, p.r, as_numbers(of.weights), p.dy);
      d.ddown_bias = grouped_sum(p.dy, ends);
    }
    for (Tensor* read : {&p.dy, &p.h, &p.low_dy}) read->reset();
    if (wanted.dx) d.dx = combine(gate_up.apply_transposed(p.da, p.low_da, ends), p.r, {});
    gate_up.of.reset();
    if (wanted.dgate_up) d.dgate_up = outer(p.da, p.x);
    if (wanted.dgate_up_bias) d.dgate_up_bias = grouped_sum(p.da, ends);
    if (wanted.dgate_up_a) d.dgate_up_a = grouped_outer(p.low_da, p.x, ends);
    if (wanted.dgate_up_b) d.dgate_up_b = grouped_outer(p.da, gate_up.low(p.x, ends), ends);
    return d;
  }
};

}  // namespace op

Tensor fused_experts(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index,
                     const Tensor& weights, const ExpertsOptions& o, const OptTensor& gate_up_bias,
                     const OptTensor& down_bias, const ExpertsAdapters& of, const ExpertsScales& scales) {
  return Operator<op::FusedExperts>::public_op(x, gate_up, down, weights, gate_up_bias, down_bias, of.gate_up_a,
                                               of.gate_up_b, of.down_a, of.down_b, scales.gate_up, scales.down, index,
                                               o);
}

LIGER_OPERATORS(fused_experts, Operator<op::FusedExperts>)

}  // namespace liger
