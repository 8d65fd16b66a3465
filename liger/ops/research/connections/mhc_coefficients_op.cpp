#include "liger/ops/research/connections/mhc_coefficients.h"
#include "liger/core/torch/operator.h"
#include "liger/research.h"

namespace liger {
LIGER_OPTIONAL(mhc_projection_backward);

namespace op {

struct MHCCoefficients {
  static constexpr Name kName = "mhc_coefficients";
  struct Inputs {
    Tensor x, phi, b, alpha_pre, alpha_post, alpha_res;
    LIGER_FIELDS(x, phi, b, alpha_pre, alpha_post, alpha_res)
  };
  using Options = MHCOptions;
  struct Results {
    Tensor pre, post, res, y, rstd;
    LIGER_FIELDS(pre, post, res, y, rstd)
  };
  struct Saved {
    Tensor x, phi, b, alpha_pre, alpha_post, alpha_res, y, rstd;
    LIGER_FIELDS(x, phi, b, alpha_pre, alpha_post, alpha_res, y, rstd)
  };
  struct Upstream {
    Tensor dpre, dpost, dres;
    LIGER_FIELDS(dpre, dpost, dres)
  };
  template <class T>
  struct Gradients {
    T dx, dphi, db, dalpha_pre, dalpha_post, dalpha_res;
    LIGER_FIELDS(dx, dphi, db, dalpha_pre, dalpha_post, dalpha_res)
  };

  /// The sizes of x.
  struct Sizes {
    c10::SymDimVector rows;  // [...]
    c10::SymInt count, cols;
    int64_t streams = 0, columns = 0;

    Tensor empty(const Tensor& x, std::initializer_list<int64_t> more) const {
      c10::SymDimVector shape(rows);
      shape.append(more.begin(), more.end());
      return at::empty_symint(shape, x.options().dtype(at::kFloat));
    }
    Tensor matrix(const Tensor& x) const { return at::empty_symint({count, columns}, x.options().dtype(at::kFloat)); }
    Tensor vector(const Tensor& x) const { return at::empty_symint({count}, x.options().dtype(at::kFloat)); }
  };

  static Arguments check(const char* op, const auto& in, const Options& options, Sizes& sizes) {
    const Arguments arguments(op, "x", in.x);
    constexpr int kMost = MHCCoefficientsForward::kMostStreams;
    TORCH_CHECK(in.x.dim() >= 2 && in.x.size(-2) >= 1 && in.x.size(-2) <= kMost, op,
                ": x must be [..., streams, width] for 1 to ", kMost, " streams, got ", in.x.sym_sizes());
    TORCH_CHECK_VALUE(options.iterations >= 1, op, ": iterations must be at least 1, not ", options.iterations);
    sizes.rows = in.x.sym_sizes().slice(0, in.x.dim() - 2);
    sizes.count = c10::multiply_integers(sizes.rows);
    sizes.streams = in.x.size(-2), sizes.columns = sizes.streams * (sizes.streams + 2);
    sizes.cols = in.x.sym_size(-1) * sizes.streams;
    const c10::SymInt of_phi[] = {sizes.cols, sizes.columns};
    return arguments.shaped("phi", in.phi, of_phi, Type::Kernels)
        .vector("b", in.b, sizes.columns, Type::Float)
        .count("alpha_pre", in.alpha_pre, 1)
        .count("alpha_post", in.alpha_post, 1)
        .count("alpha_res", in.alpha_res, 1);
  }

  /// f(first row, those of x in float) for so many rows at once that what is made of them stays in a GPU's cache.
  template <class F>
  static void for_float_rows(const Tensor& x, F f) {
    for_chunks(x.size(0), std::max<int64_t>(1, (int64_t(4) << 20) / cols(x)),
               [&](int64_t begin, int64_t n) { f(begin, x.narrow(0, begin, n).to(at::kFloat)); });
  }

  static Results forward(const Inputs& in, const Options& options) {
    Sizes sizes;
    check("mhc_coefficients", in, options, sizes);
    const int64_t s = sizes.streams;
    const Results out{sizes.empty(in.x, {s}), sizes.empty(in.x, {s}), sizes.empty(in.x, {s, s}), sizes.matrix(in.x),
                      sizes.vector(in.x)};
    if (in.x.is_meta() || out.rstd.numel() == 0) return out;
    const Tensor x = in.x.contiguous().view({out.rstd.size(0), sizes.cols.expect_int()}), b = in.b.contiguous();
    if (x.is_cuda() && x.scalar_type() == in.phi.scalar_type()) {
      project(out.y, x, in.phi.t(), {});
    } else {
      const Tensor phi = in.phi.to(at::kFloat);
      for_float_rows(x, [&](int64_t begin, const Tensor& rows) {
        Tensor y = out.y.narrow(0, begin, rows.size(0));
        at::mm_out(y, rows, phi);
      });
    }
    run(mhc_coefficients_forward, x,
        {.x = data(x),
         .y = data<float>(out.y),
         .b = data<float>(b),
         .alpha_pre = data<float>(in.alpha_pre),
         .alpha_post = data<float>(in.alpha_post),
         .alpha_res = data<float>(in.alpha_res),
         .pre = data<float>(out.pre),
         .post = data<float>(out.post),
         .res = data<float>(out.res),
         .rstd = data<float>(out.rstd),
         .rows = x.size(0),
         .cols = x.size(1),
         .iterations = options.iterations,
         .streams = int(s),
         .dtype = dtype_of(x),
         .rms_eps = float(options.rms_eps),
         .pre_eps = float(options.pre_eps),
         .sinkhorn_eps = float(options.sinkhorn_eps),
         .post_scale = float(options.post_scale)});
    return out;
  }

  static Saved save(const Inputs& in, const Results& out) {
    return {in.x, in.phi, in.b, in.alpha_pre, in.alpha_post, in.alpha_res, out.y, out.rstd};
  }

  static Gradients<Tensor> backward(const Upstream& up, const Saved& in, const Gradients<bool>& wanted,
                                    const Options& options) {
    Sizes sizes;
    const char* op = "mhc_coefficients_backward";
    const auto arguments = check(op, in, options, sizes);
    const int64_t s = sizes.streams;
    c10::SymDimVector of_pre(sizes.rows), of_res(sizes.rows);
    of_pre.push_back(s), of_res.append({s, s});
    arguments.shaped("dpre", up.dpre, of_pre, Type::Float)
        .shaped("dpost", up.dpost, of_pre, Type::Float)
        .shaped("dres", up.dres, of_res, Type::Float)
        .count("y", in.y, sizes.count * sizes.columns)
        .count("rstd", in.rstd, sizes.count);
    const Tensor dx = wanted.dx ? output(at::empty_symint(in.x.sym_sizes(), in.x.options())) : Tensor();
    if (in.x.is_meta() || in.rstd.numel() == 0)
      return {dx,
              zeros_if(wanted.dphi, in.phi),
              zeros_if(wanted.db, in.b),
              zeros_if(wanted.dalpha_pre, in.alpha_pre),
              zeros_if(wanted.dalpha_post, in.alpha_post),
              zeros_if(wanted.dalpha_res, in.alpha_res)};
    const Tensor x = in.x.contiguous().view({in.rstd.numel(), sizes.cols.expect_int()}), y = in.y.contiguous(),
                 rstd = in.rstd.contiguous(), b = in.b.contiguous(), dpre = up.dpre.contiguous(),
                 dpost = up.dpost.contiguous(), dres = up.dres.contiguous(), dy = sizes.matrix(x),
                 scale = sizes.vector(x), factors = at::empty({options.iterations, x.size(0), 2, s}, y.options());
    const int64_t partials = partial_count(dy);
    const Tensor db = empty_partials(x, partials, sizes.columns), dalpha = at::empty({3, 1, partials, 1}, y.options());
    run(mhc_coefficients_backward, x,
        {.dpre = data<float>(dpre),
         .dpost = data<float>(dpost),
         .dres = data<float>(dres),
         .y = data<float>(y),
         .b = data<float>(b),
         .alpha_pre = data<float>(in.alpha_pre),
         .alpha_post = data<float>(in.alpha_post),
         .alpha_res = data<float>(in.alpha_res),
         .rstd = data<float>(rstd),
         .factors = data<float>(factors),
         .dy = data<float>(dy),
         .scale = data<float>(scale),
         .db = data<float>(db),
         .dalpha = data<float>(dalpha),
         .rows = x.size(0),
         .cols = x.size(1),
         .iterations = options.iterations,
         .partials = partials,
         .streams = int(s),
         .sinkhorn_eps = float(options.sinkhorn_eps),
         .post_scale = float(options.post_scale)});
    Totals totals;
    const auto of = [&](bool flag, const Tensor& part, const Tensor& like) {
      return flag ? totals.of(part, like) : Tensor();
    };
    Gradients<Tensor> d{dx,
                        {},
                        of(wanted.db, db, in.b),
                        of(wanted.dalpha_pre, dalpha[0], in.alpha_pre),
                        of(wanted.dalpha_post, dalpha[1], in.alpha_post),
                        of(wanted.dalpha_res, dalpha[2], in.alpha_res)};
    totals.run();
    if (wanted.dx || wanted.dphi) d.dphi = backward_of_projection(x, in.phi, dy, scale, dx, wanted.dphi);
    return d;
  }

  /// dphi = xᵀ dy, where it is wanted, and into dx, where it is defined: dy phiᵀ + scale · x, of which scale is the
  /// norm's part.
  static Tensor backward_of_projection(const Tensor& x, const Tensor& phi, const Tensor& dy, const Tensor& scale,
                                       const Tensor& dx, bool wants_dphi) {
    if (mhc_projection_backward.has(Backend(x.device().type())) && dy.size(1) <= MHCProjectionBackward::kMostColumns)
      return backward_of_projection_by_kernel(x, phi.contiguous(), dy, scale, dx, wants_dphi);
    const Tensor phi_float = phi.to(at::kFloat);
    Tensor dphi = wants_dphi ? at::empty(phi.sizes(), dy.options()) : Tensor();
    for_float_rows(x, [&](int64_t begin, const Tensor& x_rows) {
      const int64_t n = x_rows.size(0);
      const Tensor dy_rows = dy.narrow(0, begin, n);
      if (wants_dphi) accumulate(dphi, x_rows, dy_rows, begin == 0);
      if (dx.defined())
        dx.view_as(x)
            .narrow(0, begin, n)
            .copy_(at::mm(dy_rows, phi_float.t()).addcmul_(x_rows, scale.narrow(0, begin, n).unsqueeze(1)));
    });
    return wants_dphi ? dphi.to(phi.scalar_type()) : dphi;
  }

  static Tensor backward_of_projection_by_kernel(const Tensor& x, const Tensor& phi, const Tensor& dy,
                                                 const Tensor& scale, const Tensor& dx, bool wants_dphi) {
    using Args = MHCProjectionBackward;
    const int64_t partials = std::min(Args::kMostPartials, ceil_div(x.size(0), Args::kLeastRows));
    const Tensor dphi_parts = wants_dphi ? empty_partials(x, partials, phi.numel()) : Tensor();
    run(mhc_projection_backward, x,
        {.x = data(x),
         .dy = data<float>(dy),
         .scale = data<float>(scale),
         .phi = {data(phi), dtype_of(phi)},
         .dx = dx.defined() ? dx.data_ptr() : nullptr,
         .dphi = wants_dphi ? data<float>(dphi_parts) : nullptr,
         .rows = x.size(0),
         .cols = x.size(1),
         .partials = partials,
         .columns = int(dy.size(1)),
         .dtype = dtype_of(x)});
    if (!wants_dphi) return {};
    Totals totals;
    const Tensor dphi = totals.of(dphi_parts, phi);
    totals.run();
    return dphi;
  }
};

}  // namespace op

std::tuple<Tensor, Tensor, Tensor> mhc_coefficients(const Tensor& x, const Tensor& phi, const Tensor& b,
                                                    const Tensor& alpha_pre, const Tensor& alpha_post,
                                                    const Tensor& alpha_res, const MHCOptions& options) {
  return Operator<op::MHCCoefficients>::public_op(
      op::MHCCoefficients::Inputs{x, phi, b, alpha_pre, alpha_post, alpha_res}, options);
}

LIGER_OPERATORS(mhc_coefficients, Operator<op::MHCCoefficients>)

}  // namespace liger
