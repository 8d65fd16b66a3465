#include "liger/ops/research/connections/attention_residuals.h"
#include "liger/core/torch/operator.h"
#include "liger/research.h"

namespace liger {
namespace op {

struct AttentionResiduals {
  static constexpr Name kName = "attention_residuals";
  struct Inputs {
    Tensor blocks, query, weight;
    double eps;
    LIGER_FIELDS(blocks, query, weight, eps)
  };
  struct Results {
    Tensor h, alpha, rstd;  // [...], float [..., blocks]
    LIGER_FIELDS(h, alpha, rstd)
  };
  struct Saved {
    Tensor blocks, query, weight, alpha, rstd;
    LIGER_FIELDS(blocks, query, weight, alpha, rstd)
  };
  struct Upstream {
    Tensor dh;
    LIGER_FIELDS(dh)
  };
  template <class T>
  struct Gradients {
    T dblocks, dquery, dweight;
    LIGER_FIELDS(dblocks, dquery, dweight)
  };

  static Arguments check(const char* op, const auto& in) {
    const Arguments arguments(op, "blocks", in.blocks);
    constexpr int kMost = liger::AttentionResiduals::kMostBlocks;
    TORCH_CHECK(in.blocks.dim() >= 2 && in.blocks.size(0) >= 1 && in.blocks.size(0) <= kMost, op,
                ": blocks must be [n, ..., width] for n from 1 to ", kMost, ", got ", in.blocks.sym_sizes());
    const auto width = in.blocks.sym_size(-1);
    return arguments.vector("query", in.query, width).vector("weight", in.weight, width);
  }

  /// Both in one dtype.
  static std::pair<Tensor, Tensor> weights(const auto& in) {
    if (in.query.scalar_type() == in.weight.scalar_type()) return {in.query.contiguous(), in.weight.contiguous()};
    return {in.query.to(at::kFloat).contiguous(), in.weight.to(at::kFloat).contiguous()};
  }

  static Results forward(const Inputs& in) {
    check("attention_residuals", in);
    const Tensor v = in.blocks.contiguous(), h = output(at::empty_symint(v.sym_sizes().slice(1), v.options())),
                 alpha = empty_stat(h, v.size(0)), rstd = empty_stat(h, v.size(0));
    if (v.is_meta() || rows(h) == 0) return {h, alpha, rstd};
    const auto [query, weight] = weights(in);
    run(attention_residuals_forward, v,
        {.v = data(v),
         .query = data(query),
         .weight = data(weight),
         .h = h.data_ptr(),
         .alpha = data<float>(alpha),
         .rstd = data<float>(rstd),
         .rows = rows(h),
         .cols = cols(h),
         .blocks = int(v.size(0)),
         .dtype = dtype_of(v),
         .weight_dtype = dtype_of(weight),
         .eps = float(in.eps)});
    return {h, alpha, rstd};
  }

  static Saved save(const Inputs& in, const Results& out) {
    return {in.blocks, in.query, in.weight, out.alpha, out.rstd};
  }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted) {
    const char* op = "attention_residuals_backward";
    const auto stats = s.blocks.sym_size(0) * c10::multiply_integers(s.blocks.sym_sizes().slice(1, s.blocks.dim() - 2));
    check(op, s)
        .shaped("dh", up.dh, s.blocks.sym_sizes().slice(1), Type::Same)
        .count("alpha", s.alpha, stats)
        .count("rstd", s.rstd, stats);
    const Tensor v = s.blocks.contiguous(), dh = up.dh.contiguous(), alpha = s.alpha.contiguous(),
                 rstd = s.rstd.contiguous(),
                 dv = wanted.dblocks ? output(at::empty_symint(v.sym_sizes(), v.options())) : Tensor();
    if (v.is_meta() || rows(dh) == 0) return {dv, zeros_if(wanted.dquery, s.query), zeros_if(wanted.dweight, s.weight)};
    const auto [query, weight] = weights(s);
    const int64_t partials = partial_count(dh);
    const Tensor g = empty_partials(dh, partials, cols(dh));
    run(attention_residuals_backward, v,
        {.dh = data(dh),
         .v = data(v),
         .query = data(query),
         .weight = data(weight),
         .alpha = data<float>(alpha),
         .rstd = data<float>(rstd),
         .dv = data<void>(dv),
         .g = data<float>(g),
         .rows = rows(dh),
         .cols = cols(dh),
         .partials = partials,
         .blocks = int(v.size(0)),
         .dtype = dtype_of(v),
         .weight_dtype = dtype_of(weight)});
    Totals totals;
    const auto of = [&](bool flag, const Tensor& like, const Tensor& other) {
      return flag ? totals.of(g, like, other) : Tensor();
    };
    const Gradients<Tensor> d{dv, of(wanted.dquery, s.query, weight), of(wanted.dweight, s.weight, query)};
    totals.run();
    return d;
  }
};

}  // namespace op

Tensor attention_residuals(const Tensor& blocks, const Tensor& query, const Tensor& weight, double eps) {
  return Operator<op::AttentionResiduals>::public_op(blocks, query, weight, eps);
}

LIGER_OPERATORS(attention_residuals, Operator<op::AttentionResiduals>)

}  // namespace liger
