#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/nn.h>
#include <cmath>
#include "liger/nn/module.h"

namespace liger::nn {

namespace experts {

using Group = c10::intrusive_ptr<c10d::Backend>;

/// [n, ...] of each rank to [ranks · n, ...].
inline at::Tensor gathered(const at::Tensor& t_, const Group& group) {
  at::Tensor t = t_.contiguous();
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes[0] *= group->getSize();
  at::Tensor all = at::empty(sizes, t.options());
  if (t.numel() > 0) group->_allgather_base(all, t)->wait();
  return all;
}

/// The sums over the ranks of [ranks · n, ...], to each rank its own n rows; each is rounded once.
inline at::Tensor summed(const at::Tensor& t_, const Group& group) {
  at::Tensor t = t_.contiguous(), received = at::empty_like(t);
  std::vector<int64_t> equal, sizes = t.sizes().vec();
  if (t.numel() > 0) group->alltoall_base(received, t, equal, equal)->wait();
  sizes[0] /= group->getSize();
  sizes.insert(sizes.begin(), group->getSize());
  return received.view(sizes).sum(0);
}

/// gathered, or summed; each is the other's step back.
struct Move : torch::autograd::Function<Move> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& t, const Group& group,
                            bool gather) {
    ctx->saved_data["gather"] = gather;
    ctx->saved_data["group"] = c10::IValue::make_capsule(group);
    return gather ? gathered(t, group) : summed(t, group);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list upstream) {
    const auto held = ctx->saved_data["group"].toCapsule();
    const Group group = Group::reclaim_copy(static_cast<c10d::Backend*>(held.get()));
    const bool gather = ctx->saved_data["gather"].toBool();
    return {gather ? summed(upstream[0], group) : gathered(upstream[0], group), {}, {}};
  }
};

}  // namespace experts

struct ExpertsOptions {
  ExpertsOptions(int64_t hidden_size, int64_t width, int64_t experts)
      : hidden_size_(hidden_size), width_(width), experts_(experts) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(int64_t, width);
  TORCH_ARG(int64_t, experts);  // of all ranks together
  TORCH_ARG(liger::ExpertsOptions, compute);
};

/// The experts of a mixture, of which each rank of a process group holds equally many, in the order of the ranks:
///   y[t]   = Σ_k weights[t, k] · E_e(x[t])
///   e      = index[t, k]
///   E_e(x) = down_e (act(gate_e x) · up_e x)  or, not gated, down_e act(up_e x)
/// by liger::fused_experts. x [tokens, hidden_size], index [tokens, k] integers, of which those that are no expert add
/// nothing, weights [tokens, k], floating. The tokens of all ranks, which have equally many, are gathered; each rank
/// runs its own experts, and the ranks' results are summed in float on the rank that has the token.
/// A parameter's gradient is that of all ranks' tokens: of a mean over the ranks, divide it by their number. The group
/// is one of c10d, such as ProcessGroupNCCL or ProcessGroupGloo; without one, all experts are here.
struct ExpertsImpl : torch::nn::Cloneable<ExpertsImpl> {
  explicit ExpertsImpl(ExpertsOptions o, experts::Group group = {}) : options(std::move(o)), group(std::move(group)) {
    reset();
  }

  /// The number of experts here. Raises c10::Error where the ranks cannot share them equally.
  int64_t local() const {
    const int64_t ranks = group ? group->getSize() : 1;
    TORCH_CHECK(options.experts() % ranks == 0, "Experts: ", ranks, " ranks cannot share ", options.experts(),
                " experts equally");
    return options.experts() / ranks;
  }

  void reset() override {
    const int64_t n = options.hidden_size(), width = options.width();
    TORCH_CHECK(!options.compute().transposed, "Experts: weights are not transposed");
    const bool gated = options.compute().gated;
    gate_up = register_parameter(gated ? "gate_up_proj" : "up_proj", torch::empty({local(), (1 + gated) * width, n}));
    down = register_parameter("down_proj", torch::empty({local(), n, width}));
    torch::NoGradGuard no_grad;
    for (at::Tensor& w : {std::ref(gate_up), std::ref(down)}) {
      const double bound = 1 / std::sqrt(double(w.size(2)));  // as torch::nn::Linear
      w.uniform_(-bound, bound);
    }
  }

  at::Tensor forward(const at::Tensor& x, const at::Tensor& index, const at::Tensor& weights) {
    const auto& compute = options.compute();
    if (!group || group->getSize() == 1) return liger::fused_experts(x, gate_up, down, index, weights, compute);
    const at::Tensor ids = experts::gathered(index.to(at::kLong), group) - group->getRank() * local();
    const at::Tensor part = liger::fused_experts(experts::Move::apply(x, group, true), gate_up, down, ids,
                                                 experts::Move::apply(weights, group, true), compute);
    return experts::Move::apply(part, group, false);
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "hidden_size", options.hidden_size(), "width", options.width(), "experts", options.experts(),
          "activation", options.compute().activation, "gated", options.compute().gated);
  }

  ExpertsOptions options;
  experts::Group group;
  at::Tensor gate_up, down;
};
TORCH_MODULE(Experts);

}  // namespace liger::nn
