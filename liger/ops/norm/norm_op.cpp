#include "liger/ops/norm/norm_op.h"
#include "liger/core/torch/eight_bit.h"

namespace liger {

LIGER_OPTIONAL(norm_forward_bytes);

namespace op::norm {
namespace {

Casting parse(const char* name, int64_t casting) {
  TORCH_CHECK_VALUE(casting >= -1 && casting <= 1, name, ": casting is -1 (none), 0 (llama) or 1 (gemma), not ",
                    casting);
  return Casting(casting);
}

void check_modulation(const char* name, const char* what, const Tensor& m, const Tensor& x,
                      const Arguments& arguments) {
  arguments.any(what, m, Type::SameOrFloat);
  TORCH_CHECK(m.dim() > 0 && (m.sym_numel() > 0 || x.sym_numel() == 0) && m.sym_size(-1) == x.sym_size(-1), name, ": ",
              what, " must be [..., ", x.sym_size(-1), "], got ", m.sym_sizes());
  TORCH_CHECK(x.sym_numel() == 0 || x.sym_numel() % m.sym_numel() == 0, name, ": the rows of ", what,
              " must divide the input's, got ", m.sym_sizes(), " for ", x.sym_sizes());
}

/// The inputs as kernels read them, checked.
struct Operands {
  Arguments arguments;
  Tensor x, w, b, residual, scale, shift;
  bool centred;

  Operands(const char* name, const Inputs& in) : arguments(name, in.x_name, in.x), centred(in.centred) {
    arguments.vector("weight", in.w, in.x.sym_size(-1))
        .vector("bias", in.b, in.x.sym_size(-1))
        .like("residual", in.residual);
    x = in.x.contiguous();
    w = contiguous(in.w);
    b = contiguous(in.b);
    residual = contiguous(in.residual);
    scale = contiguous(in.scale);
    shift = contiguous(in.shift);
    if (w.defined() && b.defined() && w.scalar_type() != b.scalar_type()) {
      w = w.to(at::kFloat);
      b = b.to(at::kFloat);
    }
    if (scale.defined()) check_modulation(name, "scale", scale, x, arguments);
    if (shift.defined()) {
      arguments.any("shift", shift, Type::SameOrFloat);
      TORCH_CHECK(shift.sym_numel() == scale.sym_numel(), name, ": shift must be as large as scale, ",
                  scale.sym_sizes(), ", got ", shift.sym_sizes());
      shift = shift.to(scale.scalar_type());
    }
  }

  /// The fields that the two kernels share; the others are zero.
  template <class Args>
  Args describe() const {
    const int64_t n = rows(x), m = scale.defined() ? rows(scale) : 1;
    const Tensor& affine = w.defined() ? w : b.defined() ? b : x;
    return {.centred = centred,
            .x = data(x),
            .w = data(w),
            .scale = data(scale),
            .rows = n,
            .cols = cols(x),
            .modulations = m,
            .per_modulation = n / std::max<int64_t>(1, m),
            .dtype = dtype_of(x),
            .w_dtype = dtype_of(affine),
            .modulation_dtype = dtype_of(scale.defined() ? scale : x),
            .inv_cols = 1.f / std::max<int64_t>(1, cols(x))};
  }
};

}  // namespace

Outputs forward(const char* name, const Inputs& inputs, double eps, Rounding rounding, ReadIn read_in) {
  const Operands in(name, inputs);
  const Casting casting = parse(name, rounding.casting);
  TORCH_CHECK_VALUE(read_in.eight_bit >= -1 && read_in.eight_bit <= 1, name,
                    ": eight_bit is -1 (none), 0 (e4m3) or 1 (int8), not ", read_in.eight_bit);
  const auto like_x = [&] { return output(at::empty_symint(inputs.x.sym_sizes(), in.x.options())); };
  Outputs out{.y = like_x(),
              .s = in.residual.defined() ? like_x() : Tensor(),
              .mean = inputs.centred ? empty_stat(in.x) : Tensor(),
              .rstd = empty_stat(in.x)};
  if (in.x.is_meta() || rows(in.x) == 0) return out;
  auto a = in.describe<NormForward>();
  a.b = data(in.b), a.residual = data(in.residual), a.shift = data(in.shift);
  a.y = out.y.data_ptr(), a.s = data<void>(out.s), a.mean = data<float>(out.mean), a.rstd = data<float>(out.rstd);
  a.eps = float(eps), a.offset = float(rounding.offset), a.casting = casting;
  if (read_in.eight_bit >= 0 && norm_forward_bytes.has(Backend(in.x.device().type())) &&
      has_byte_products(in.x, EightBit(read_in.eight_bit)) &&
      rows_fit_bytes(in.x, {a.x, a.residual, a.w, a.s, a.y}, {})) {
    const auto bytes = empty_rows(a.rows, a.cols, EightBit(read_in.eight_bit), in.x);
    run(norm_forward_bytes, in.x, {a, bytes.to()});
    attach_rows(out.y, bytes);
  } else {
    run(norm_forward, in.x, a);
  }
  return out;
}

Gradients backward(const char* name, const Tensor& dy_, const OptTensor& ds_, const Inputs& inputs, const Tensor& mean_,
                   const Tensor& rstd_, Wants wants, Rounding rounding) {
  const Operands in(name, inputs);
  in.arguments.like("dy", dy_)
      .like("ds", ds_)
      .present("with_dw", wants.w, "weight", inputs.w)
      .present("with_db", wants.b, "bias", inputs.b)
      .present("with_dshift", wants.shift, "shift", inputs.shift);
  if (mean_.defined()) in.arguments.count("mean", mean_, sym_rows(inputs.x));
  if (rstd_.defined()) in.arguments.count("rstd", rstd_, sym_rows(inputs.x));
  const Tensor dy = dy_.contiguous(), ds = contiguous(ds_), mean = contiguous(optional(mean_)),
               rstd = contiguous(optional(rstd_));
  Gradients d;
  if (wants.x) d.x = output(at::empty_symint(inputs.x.sym_sizes(), in.x.options()));
  if (in.x.is_meta() || rows(in.x) == 0)
    return {d.x, zeros_if(wants.w, inputs.w), zeros_if(wants.b, inputs.b), zeros_if(wants.scale, inputs.scale),
            zeros_if(wants.shift, inputs.shift)};
  auto a = in.describe<NormBackward>();
  const bool own = a.own_modulation(), shared = a.shared_modulation();
  const int64_t sets = shared ? a.modulations : 1;
  a.partials = sets * partial_count(in.x, sets);
  const auto sums = [&](bool wanted, int64_t cols) {
    return wanted ? empty_partials(in.x, a.partials, cols) : Tensor();
  };
  const auto like_scale = [&](bool wanted) {
    return own && wanted ? at::empty(in.scale.sizes(), in.scale.options()) : Tensor();
  };
  const Tensor dw = sums(wants.w || (shared && wants.scale), a.cols),
               db = sums(wants.b || (shared && wants.shift), a.cols);
  d.scale = like_scale(wants.scale), d.shift = like_scale(wants.shift);
  a.dy = data(dy), a.ds = data(ds), a.mean = data<float>(mean), a.rstd = data<float>(rstd), a.dx = data<void>(d.x);
  a.dw = data<float>(dw), a.db = data<float>(db), a.dscale = data<void>(d.scale), a.dshift = data<void>(d.shift);
  a.offset = float(rounding.offset), a.casting = parse(name, rounding.casting);
  run(norm_backward, in.x, a);
  Totals totals;
  if (wants.w) d.w = totals.of(dw, *inputs.w, shared ? in.scale : Tensor(), 1);
  if (wants.b) d.b = totals.of(db, *inputs.b);
  const auto of_sets = [&](const Tensor& sums) { return sums.view({sets, -1, a.cols}); };
  if (shared && wants.scale) d.scale = totals.of(of_sets(dw), *inputs.scale, in.w, rounding.offset);
  if (shared && wants.shift) d.shift = totals.of(of_sets(db), *inputs.shift);
  totals.run();
  if (own && wants.shift) d.shift = d.shift.to(inputs.shift->scalar_type()).view(inputs.shift->sizes());
  return d;
}

}  // namespace op::norm
}  // namespace liger
