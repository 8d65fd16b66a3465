#include "liger/ops/router/expert_load.h"
#include "liger/core/torch/operator.h"
#include "liger/functions/router.h"

namespace liger {
namespace op {

struct ExpertLoad {
  static constexpr Name kName = "expert_load";
  struct Inputs {
    Tensor logits;
    OptTensor mask;
    int64_t top_k;
    LIGER_FIELDS(logits, mask, top_k)
  };
  struct Results {
    Tensor load, counts;
    LIGER_FIELDS(load, counts)
  };
  struct Upstream {
    Tensor dload;
    LIGER_FIELDS(dload)
  };
  struct Saved {
    Tensor logits;
    OptTensor mask;
    LIGER_FIELDS(logits, mask)
  };
  template <class T>
  struct Gradients {
    T dlogits;
    LIGER_FIELDS(dlogits)
  };
  static constexpr int kResults = 2;

  static Arguments check(const char* op, const auto& in) {
    const Arguments arguments(op, "logits", in.logits);
    arguments.shaped("mask", in.mask, in.logits.sym_sizes().slice(0, in.logits.dim() - 1), Type::Bool);
    return arguments;
  }

  static Results forward(const Inputs& in) {
    check(kName.text, in);
    const int64_t experts = in.logits.sym_size(-1).guard_int(__FILE__, __LINE__);
    TORCH_CHECK_VALUE(in.top_k >= 1 && in.top_k <= experts, kName.text, ": top_k must be 1 to ", experts, ", got ",
                      in.top_k);
    const auto options = in.logits.options();
    const Tensor counts = at::empty({experts}, options.dtype(at::kInt));
    if (in.logits.is_meta()) return {at::empty({experts}, options.dtype(at::kFloat)), counts};
    const Tensor mask = contiguous(in.mask);
    const Rows z(in.logits);
    const int64_t partials = partial_count(in.logits);
    const Tensor sums = empty_partials(in.logits, partials, experts);
    run(expert_load_forward, in.logits,
        {.z = data(z.tensor),
         .mask = data<bool>(mask),
         .load = data<float>(sums),
         .counts = data<int>(counts),
         .tokens = rows(in.logits),
         .experts = experts,
         .k = in.top_k,
         .stride = z.stride,
         .partials = partials,
         .dtype = dtype_of(in.logits)});
    Totals totals;
    const Tensor load = totals.of(sums, sums.select(1, 0).select(0, 0));
    totals.run();
    return {load, counts};
  }

  static Saved save(const Inputs& in, const Results&) { return {in.logits, in.mask}; }

  static Tensor backward(const Upstream& up, const Saved& s) {
    check("expert_load_backward", s).vector("dload", up.dload, s.logits.sym_size(-1), Type::Floating);
    const Tensor dz = output(at::empty_symint(s.logits.sym_sizes(), s.logits.options()));
    if (dz.is_meta() || dz.numel() == 0) return dz;
    const Rows z(s.logits);
    const Tensor mask = contiguous(s.mask), dload = up.dload.to(at::kFloat).contiguous();
    run(expert_load_backward, dz,
        {.z = data(z.tensor),
         .mask = data<bool>(mask),
         .dload = data<float>(dload),
         .dz = dz.data_ptr(),
         .tokens = rows(dz),
         .experts = cols(dz),
         .stride = z.stride,
         .dtype = dtype_of(dz)});
    return dz;
  }
};

}  // namespace op

std::tuple<Tensor, Tensor> expert_load(const Tensor& logits, int64_t top_k, const OptTensor& mask) {
  return Operator<op::ExpertLoad>::public_op(logits, mask, top_k);
}

Tensor load_balancing_loss(at::TensorList logits, int64_t top_k, const OptTensor& mask) {
  TORCH_CHECK(!logits.empty(), "load_balancing_loss: there must be logits of a layer");
  Tensor load, counts;
  int64_t tokens = 0;
  for (const Tensor& of_layer : logits) {
    const auto [p, n] = expert_load(of_layer, top_k, mask);
    load = load.defined() ? load + p : p;
    counts = counts.defined() ? counts + n : n;
    tokens += rows(of_layer);
  }
  const Tensor share = counts * double(load.numel());
  if (!mask) return load.dot(share.to(at::kFloat)) / (double(tokens) * double(tokens));
  const Tensor counted = mask->sum().to(at::kFloat) * double(logits.size());
  return load.dot(share.to(at::kFloat)) / (counted * counted);
}

LIGER_OPERATORS(expert_load, Operator<op::ExpertLoad>)

}  // namespace liger
