// Mixers of hybrid models against plain torch in double, token by token.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include "liger/nn/mixers.h"
#include "tests/cpp/compare.h"

using torch::Tensor;

namespace {

TEST(Mixers, ShortConvolution) {
  const auto x = torch::randn({2, 9, 16});
  liger::nn::ShortConvolution convolution(liger::nn::ShortConvolutionOptions(16, 3).bias(true));
  torch::nn::init::normal_(convolution->bias);
  const auto plain = [&](const Tensor& x) {
    const auto columns = torch::constant_pad_nd(x.transpose(1, 2), {2, 0});
    return torch::silu(torch::conv1d(columns, convolution->weight, convolution->bias, {1}, at::IntArrayRef{0}, {1}, 16))
        .transpose(1, 2);
  };
  expect_close({convolution(x)}, {plain(x)});
  const auto starts = torch::tensor({0, 0, 0, 0, 4, 4, 4, 4, 4}, torch::kInt).expand({2, 9});
  expect_close({convolution(x, starts)}, {torch::cat({plain(x.narrow(1, 0, 4)), plain(x.narrow(1, 4, 5))}, 1)});
}

/// A gated delta net token by token, in double.
Tensor plain_delta_net(const liger::nn::GatedDeltaNet& net, const Tensor& input) {
  const auto& o = net->options;
  const auto x = input.to(torch::kDouble);
  const auto weight = [](const auto& layer) { return layer->weight.to(torch::kDouble); };
  const auto columns = torch::constant_pad_nd(torch::matmul(x, weight(net->in_proj_qkv).t()).transpose(1, 2), {3, 0});
  const auto qkv =
      torch::silu(torch::conv1d(columns, weight(net->conv1d), {}, {1}, at::IntArrayRef{0}, {1}, columns.size(1)))
          .transpose(1, 2);
  const int64_t batch = x.size(0), times = x.size(1), K = o.key_dim(), V = o.value_dim(), keys = o.key_heads() * K;
  const auto heads = [&](int64_t from, int64_t n) {
    const auto y = qkv.narrow(2, from, n).reshape({batch, times, o.key_heads(), K});
    return (y / torch::sqrt(y.square().sum(-1, true) + 1e-6)).repeat_interleave(o.heads() / o.key_heads(), 2);
  };
  const auto q = heads(0, keys) / std::sqrt(double(K)), k = heads(keys, keys),
             v = qkv.slice(2, 2 * keys).reshape({batch, times, o.heads(), V});
  const auto beta = torch::sigmoid(torch::matmul(x, weight(net->in_proj_b).t()));
  const auto decay = torch::exp(-net->A_log.to(torch::kDouble).exp() *
                                torch::softplus(torch::matmul(x, weight(net->in_proj_a).t()) + net->dt_bias));
  auto S = torch::zeros({batch, o.heads(), K, V}, torch::kDouble);
  std::vector<Tensor> outputs;
  for (int64_t t = 0; t < times; ++t) {
    S = S * decay.select(1, t).unsqueeze(-1).unsqueeze(-1);
    const auto kt = k.select(1, t).unsqueeze(-1);
    const auto d = (v.select(1, t) - (S * kt).sum(2)) * beta.select(1, t).unsqueeze(-1);
    S = S + kt * d.unsqueeze(2);
    outputs.push_back((S * q.select(1, t).unsqueeze(-1)).sum(2));
  }
  const auto y = torch::stack(outputs, 1), z = torch::matmul(x, weight(net->in_proj_z).t()).view_as(y);
  const auto normed = y * torch::rsqrt(y.square().mean(-1, true) + o.eps()) * weight(net->norm) * torch::silu(z);
  return torch::matmul(normed.flatten(2), weight(net->out_proj).t());
}

/// Kimi delta attention token by token, in double.
Tensor plain_kimi(const liger::nn::KimiDeltaAttention& net, const Tensor& input) {
  const auto& o = net->options;
  const auto x = input.to(torch::kDouble);
  const auto apply = [](const auto& layer, const Tensor& x) { return torch::matmul(x, layer->weight.to(x).t()); };
  const int64_t batch = x.size(0), times = x.size(1), H = o.heads(), D = o.head_dim();
  const auto mixed = torch::cat({apply(net->q_proj, x), apply(net->k_proj, x), apply(net->v_proj, x)}, -1);
  const auto columns = torch::constant_pad_nd(mixed.transpose(1, 2), {o.width() - 1, 0});
  const auto qkv =
      torch::silu(torch::conv1d(columns, net->conv1d->weight.to(x), {}, {1}, at::IntArrayRef{0}, {1}, columns.size(1)))
          .transpose(1, 2)
          .reshape({batch, times, 3, H, D});
  const auto normed = [](const Tensor& t) { return t / torch::sqrt(t.square().sum(-1, true) + 1e-6); };
  const auto q = normed(qkv.select(2, 0)) / std::sqrt(double(D)), k = normed(qkv.select(2, 1)), v = qkv.select(2, 2);
  const auto& gate = net->forget_gate;
  const auto f = apply(gate->f_b_proj, apply(gate->f_a_proj, x)) + gate->dt_bias;
  const auto decay = torch::exp(-gate->A_log.to(x).exp() * torch::softplus(f).view({batch, times, H, D}));
  const auto beta = torch::sigmoid(apply(net->b_proj, x));
  auto S = torch::zeros({batch, H, D, D}, torch::kDouble);
  std::vector<Tensor> outputs;
  for (int64_t t = 0; t < times; ++t) {
    const auto key = k.select(1, t).unsqueeze(-1);
    S = S * decay.select(1, t).unsqueeze(-1);
    S = S + key * ((v.select(1, t) - (S * key).sum(2)) * beta.select(1, t).unsqueeze(-1)).unsqueeze(2);
    outputs.push_back((S * q.select(1, t).unsqueeze(-1)).sum(2));
  }
  const auto y = torch::stack(outputs, 1), z = apply(net->g_b_proj, apply(net->g_a_proj, x)).view_as(y);
  const auto norm = y * torch::rsqrt(y.square().mean(-1, true) + o.eps()) * net->o_norm->weight * torch::sigmoid(z);
  return apply(net->o_proj, norm.flatten(2));
}

/// Mamba-2 token by token, in double.
Tensor plain_mamba2(const liger::nn::Mamba2& net, const Tensor& input) {
  const auto& o = net->options;
  const auto x = input.to(torch::kDouble);
  const auto wide = [](const Tensor& t) { return t.to(torch::kDouble); };
  const int64_t batch = x.size(0), times = x.size(1), P = o.head_dim(), N = o.state_size(), inner = o.heads() * P,
                groups = o.groups() * N;
  const auto parts = torch::linear(x, wide(net->in_proj->weight), wide(net->in_proj->bias))
                         .split_with_sizes({inner, inner + 2 * groups, o.heads()}, -1);
  const auto columns = torch::constant_pad_nd(parts[1].transpose(1, 2), {o.width() - 1, 0});
  const auto u = torch::silu(torch::conv1d(columns, wide(net->conv1d->weight), wide(net->conv1d->bias), {1},
                                           at::IntArrayRef{0}, {1}, columns.size(1)))
                     .transpose(1, 2)
                     .split_with_sizes({inner, groups, groups}, -1);
  const auto grouped = [&](const Tensor& t) {
    return t.reshape({batch, times, o.groups(), N}).repeat_interleave(o.heads() / o.groups(), 2);
  };
  const auto v = u[0].reshape({batch, times, o.heads(), P}), B = grouped(u[1]), C = grouped(u[2]);
  const auto dt = torch::softplus(parts[2] + wide(net->dt_bias));
  const auto decay = torch::exp(-wide(net->A_log).exp() * dt);
  auto S = torch::zeros({batch, o.heads(), N, P}, torch::kDouble);
  std::vector<Tensor> outputs;
  for (int64_t t = 0; t < times; ++t) {
    const auto at = [&](const Tensor& of) { return of.select(1, t); };
    S = S * at(decay).unsqueeze(-1).unsqueeze(-1) + at(B).unsqueeze(-1) * (at(v) * at(dt).unsqueeze(-1)).unsqueeze(2);
    outputs.push_back((S * at(C).unsqueeze(-1)).sum(2) + wide(net->D).unsqueeze(-1) * at(v));
  }
  const auto gated = torch::stack(outputs, 1).flatten(2) * torch::silu(parts[0]);
  const auto each = gated.view({batch, times, o.groups(), -1});
  const auto normed =
      (each * torch::rsqrt(each.square().mean(-1, true) + o.eps())).flatten(2) * wide(net->norm->weight);
  return torch::linear(normed, wide(net->out_proj->weight), wide(net->out_proj->bias));
}

/// Values and gradients are those of the plain form; documents and states change nothing but where rows are cut.
template <class Net, class Plain>
void expect_mixes(Net net, Plain plain) {
  const auto x = torch::randn({2, 9, 16}).requires_grad_();
  const auto y = net(x), expected = plain(net, x);
  const auto toward = torch::randn_like(y);
  auto inputs = net->parameters();
  inputs.push_back(x);
  const auto got = torch::autograd::grad({y}, inputs, {toward}),
             want = torch::autograd::grad({expected}, inputs, {toward.to(torch::kDouble)});
  expect_close({y}, {expected.to(torch::kFloat)});
  for (size_t i = 0; i < got.size(); ++i) {  // sums over tokens, of which one element's rounding is that of the largest
    const double largest = want[i].abs().max().template item<double>();
    EXPECT_LE((got[i] - want[i]).abs().max().template item<double>(), 1e-4 * largest) << i;
  }

  const torch::NoGradGuard no_gradients;
  const auto starts = torch::tensor({0, 0, 0, 0, 4, 4, 4, 4, 4}, torch::kInt).expand({2, 9});
  expect_close({net(x, starts)}, {torch::cat({net(x.narrow(1, 0, 4)), net(x.narrow(1, 4, 5))}, 1)});
  liger::nn::MixerState state;
  std::vector<Tensor> parts;
  for (const auto& part : x.split_with_sizes({1, 4, 1, 3}, 1)) parts.push_back(net->mix(part, {}, &state));
  expect_close({torch::cat(parts, 1)}, {net(x)});
  EXPECT_THROW(net->mix(x, starts, &state), c10::Error);
}

TEST(Mixers, GatedDeltaNet) {
  liger::nn::GatedDeltaNet net(liger::nn::GatedDeltaNetOptions(16).key_heads(2).heads(4).key_dim(8).value_dim(6));
  torch::nn::init::normal_(net->dt_bias), torch::nn::init::normal_(net->norm->weight);
  expect_mixes(net, plain_delta_net);
  EXPECT_THROW(liger::nn::GatedDeltaNet(liger::nn::GatedDeltaNetOptions(16).key_heads(3).heads(4)), c10::ValueError);
}

TEST(Mixers, KimiDeltaAttention) {
  liger::nn::KimiDeltaAttention net(liger::nn::KimiDeltaAttentionOptions(16).heads(3).head_dim(8).width(3));
  torch::nn::init::normal_(net->forget_gate->dt_bias), torch::nn::init::normal_(net->o_norm->weight);
  expect_mixes(net, plain_kimi);
}

TEST(Mixers, Mamba2) {
  using Options = liger::nn::Mamba2Options;
  liger::nn::Mamba2 net(Options(16, 4).head_dim(6).groups(2).state_size(8).width(3).bias(true));
  for (auto& parameter : {net->D, net->norm->weight, net->conv1d->bias}) torch::nn::init::normal_(parameter);
  expect_mixes(net, plain_mamba2);
  EXPECT_THROW(liger::nn::Mamba2(Options(16, 4).groups(3)), c10::ValueError);
}

}  // namespace
