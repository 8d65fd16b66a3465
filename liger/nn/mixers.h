#pragma once
#include <torch/nn.h>
#include "liger/nn/lora.h"
#include "liger/nn/module.h"
#include "liger/nn/norm.h"

namespace liger::nn {

struct ShortConvolutionOptions {
  ShortConvolutionOptions(int64_t channels, int64_t width = 4) : channels_(channels), width_(width) {}
  TORCH_ARG(int64_t, channels);
  TORCH_ARG(int64_t, width);
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(bool, silu) = true;
};

/// liger::causal_conv1d of x [batch, time, channels], as layers hand it on, with its own weight: [channels, 1, width],
/// that of a torch::nn::Conv1d with as many groups as channels.
struct ShortConvolutionImpl : torch::nn::Cloneable<ShortConvolutionImpl> {
  explicit ShortConvolutionImpl(ShortConvolutionOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    const double bound = 1 / std::sqrt(double(options.width()));
    weight =
        register_parameter("weight", torch::empty({options.channels(), 1, options.width()}).uniform_(-bound, bound));
    if (options.bias()) bias = register_parameter("bias", torch::zeros({options.channels()}));
  }

  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

  /// starts [batch, time], int32, as causal_conv1d takes them.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& starts = {}) {
    return causal_conv1d(x.transpose(1, 2), weight.squeeze(1), given(bias), options.silu(), given(starts))
        .transpose(1, 2);
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "channels", options.channels(), "width", options.width(), "bias", options.bias(), "silu",
          options.silu());
  }

  ShortConvolutionOptions options;
  at::Tensor weight, bias;
};
TORCH_MODULE(ShortConvolution);

struct GatedDeltaNetOptions {
  GatedDeltaNetOptions(int64_t hidden_size) : hidden_size_(hidden_size) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(int64_t, key_heads) = 16;
  TORCH_ARG(int64_t, heads) = 32;  // of values, a multiple of key_heads
  TORCH_ARG(int64_t, key_dim) = 128;
  TORCH_ARG(int64_t, value_dim) = 128;
  TORCH_ARG(int64_t, width) = 4;  // of the convolution
  TORCH_ARG(double, eps) = 1e-6;  // of the norm
};

/// What a mixer keeps of the tokens so far, to go on from them. Undefined: there are none.
struct MixerState {
  at::Tensor tokens;     // [batch, width - 1, channels], the last ones that the convolution has seen
  at::Tensor recurrent;  // [batch, heads, K, V], float
};

/// The convolution of tokens that come after those of a state, which becomes that after them; without one of x alone.
inline at::Tensor convolved(ShortConvolution& convolution, const at::Tensor& x, const at::Tensor& starts,
                            MixerState* state) {
  TORCH_CHECK(!state || !starts.defined(), "documents within rows that go on from a state are not known");
  if (!state) return convolution(x, starts);
  const int64_t kept = convolution->options.width() - 1;
  const at::Tensor before =
      state->tokens.defined() ? state->tokens : at::zeros({x.size(0), kept, x.size(2)}, x.options());
  const at::Tensor all = at::cat({before, x}, 1);
  state->tokens = all.slice(1, x.size(1));
  return convolution(all).slice(1, kept);
}

/// A mixer with the gated delta rule (Yang et al. 2024, arXiv:2412.06464), as Qwen3.5 has it; parameters have the names
/// of its checkpoints. For x [batch, time, hidden_size], without the adapters that linear layers may have:
///   q, k, v = silu(conv1d(in_proj_qkv x))
///   beta    = sigmoid(in_proj_b x)
///   g       = -exp(A_log) softplus(in_proj_a x + dt_bias)
///   o       = gated_delta_rule(q, k, v, g, beta)
///   y       = out_proj(norm(o, in_proj_z x))
/// with a norm of each head, times silu of the gate. Linear is the class of the projections.
template <class Derived, class Linear>
struct GatedDeltaNetBase : torch::nn::Cloneable<Derived> {
  explicit GatedDeltaNetBase(GatedDeltaNetOptions o) : options(std::move(o)) { GatedDeltaNetBase::reset(); }

  /// A_log is the logarithm of a number that is drawn from [0.01, 16), dt_bias is 1.
  void reset() override {
    const GatedDeltaNetOptions& o = options;
    TORCH_CHECK_VALUE(o.key_heads() > 0 && o.heads() % o.key_heads() == 0, "heads ", o.heads(),
                      " are no multiple of key_heads ", o.key_heads());
    const int64_t hidden = o.hidden_size(), values = o.heads() * o.value_dim();
    in_proj_qkv = this->register_module("in_proj_qkv", make(hidden, channels()));
    in_proj_z = this->register_module("in_proj_z", make(hidden, values));
    in_proj_b = this->register_module("in_proj_b", make(hidden, o.heads()));
    in_proj_a = this->register_module("in_proj_a", make(hidden, o.heads()));
    conv1d = this->register_module("conv1d", ShortConvolution(ShortConvolutionOptions(channels(), o.width())));
    dt_bias = this->register_parameter("dt_bias", torch::ones({o.heads()}));
    A_log = this->register_parameter("A_log", torch::empty({o.heads()}).uniform_(0.01, 16).log_());
    norm = this->register_module("norm", RMSNormGated(RMSNormGatedOptions(o.value_dim()).eps(o.eps())));
    out_proj = this->register_module("out_proj", make(values, hidden));
  }

  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

  /// starts [batch, time], int32, says where documents begin, as gated_delta_rule takes it.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& starts = {}) { return mix(x, starts, nullptr); }

  /// The same of tokens that come after those of a state, which becomes that after them. It has no gradients of its
  /// own, and is of one document. Raises c10::Error for starts beside a state.
  at::Tensor mix(const at::Tensor& x, const at::Tensor& starts, MixerState* state) {
    const GatedDeltaNetOptions& o = options;
    const int64_t batch = x.size(0), time = x.size(1), keys = o.key_heads() * o.key_dim();
    const at::Tensor qkv = convolved(conv1d, in_proj_qkv(x), starts, state);
    const auto heads = [&](int64_t from, int64_t n, int64_t width) {
      return qkv.narrow(-1, from, n * width).view({batch, time, n, width});
    };
    const auto [g, beta] = delta_gates(in_proj_a(x), A_log, dt_bias, in_proj_b(x));
    const auto [y, last] = gated_delta_rule(
        heads(0, o.key_heads(), o.key_dim()), heads(keys, o.key_heads(), o.key_dim()),
        heads(2 * keys, o.heads(), o.value_dim()), g, beta, state ? given(state->recurrent) : std::nullopt,
        given(starts), {}, /*eps=*/1e-6, /*delta=*/true, /*final_state=*/state != nullptr);
    if (state) state->recurrent = last;
    return out_proj(norm(y, in_proj_z(x).view_as(y)).flatten(-2));
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "hidden_size", options.hidden_size(), "key_heads", options.key_heads(), "heads", options.heads(),
          "key_dim", options.key_dim(), "value_dim", options.value_dim(), "width", options.width(), "eps",
          options.eps());
  }

  GatedDeltaNetOptions options;
  Linear in_proj_qkv{nullptr}, in_proj_z{nullptr}, in_proj_b{nullptr}, in_proj_a{nullptr}, out_proj{nullptr};
  ShortConvolution conv1d{nullptr};
  RMSNormGated norm{nullptr};
  at::Tensor A_log, dt_bias;  // [heads]

 private:
  int64_t channels() const {
    return 2 * options.key_heads() * options.key_dim() + options.heads() * options.value_dim();
  }

  static Linear make(int64_t in, int64_t out) { return Linear(LoRALinearOptions(in, out).rank(0).bias(false)); }
};

struct GatedDeltaNetImpl : GatedDeltaNetBase<GatedDeltaNetImpl, LoRALinear> {
  using GatedDeltaNetBase::GatedDeltaNetBase;
};
TORCH_MODULE(GatedDeltaNet);

struct KimiDeltaAttentionOptions {
  KimiDeltaAttentionOptions(int64_t hidden_size) : hidden_size_(hidden_size) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(int64_t, heads) = 32;
  TORCH_ARG(int64_t, head_dim) = 128;  // of keys and values
  TORCH_ARG(int64_t, width) = 4;       // of the convolution
  TORCH_ARG(double, eps) = 1e-5;       // of the norm
};

/// The gates of KimiDeltaAttention, [batch, time, heads, head_dim] in float.
struct KimiForgetGateImpl : torch::nn::Cloneable<KimiForgetGateImpl> {
  explicit KimiForgetGateImpl(KimiDeltaAttentionOptions o) : options(std::move(o)) { reset(); }

  /// A_log is the logarithm of a number that is drawn from [1, 16), and dt_bias such that a gate without input is drawn
  /// from 0.001 to 0.1, its logarithm uniformly.
  void reset() override {
    const int64_t D = options.head_dim(), all = options.heads() * D;
    f_a_proj = register_module("f_a_proj", LoRALinear(LoRALinearOptions(options.hidden_size(), D).rank(0).bias(false)));
    f_b_proj = register_module("f_b_proj", LoRALinear(LoRALinearOptions(D, all).rank(0).bias(false)));
    const at::Tensor dt = torch::exp(torch::empty({all}).uniform_(std::log(1e-3), std::log(0.1)));
    dt_bias = register_parameter("dt_bias", dt + torch::log(-torch::expm1(-dt)));
    A_log = register_parameter("A_log", torch::empty({1, 1, options.heads(), 1}).uniform_(1, 16).log_());
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor g = channel_gates(f_b_proj(f_a_proj(x)), A_log.flatten(), dt_bias);
    return g.view({x.size(0), x.size(1), options.heads(), options.head_dim()});
  }

  KimiDeltaAttentionOptions options;
  LoRALinear f_a_proj{nullptr}, f_b_proj{nullptr};
  at::Tensor A_log, dt_bias;  // [1, 1, heads, 1], [heads head_dim]
};
TORCH_MODULE(KimiForgetGate);

/// Kimi delta attention (Kimi Team 2025, arXiv:2510.26692); parameters have the names of transformers' checkpoints. For
/// x [batch, time, hidden_size], without the adapters that linear layers may have:
///   q, k, v = silu(conv1d(q_proj x, k_proj x, v_proj x))
///   beta    = sigmoid(b_proj x)
///   g       = -exp(A_log) softplus(f_b_proj f_a_proj x + dt_bias)
///   o       = gated_delta_rule(q, k, v, g, beta)
///   y       = o_proj(o_norm(o, g_b_proj g_a_proj x))
/// with a gate g for each channel, and a norm of each head, times the sigmoid of the output gate.
struct KimiDeltaAttentionImpl : torch::nn::Cloneable<KimiDeltaAttentionImpl> {
  explicit KimiDeltaAttentionImpl(KimiDeltaAttentionOptions o) : options(std::move(o)) { reset(); }

  void reset() override {
    const KimiDeltaAttentionOptions& o = options;
    const int64_t hidden = o.hidden_size(), D = o.head_dim(), all = o.heads() * D;
    const auto projection = [&](const char* name, int64_t in, int64_t out) {
      return register_module(name, LoRALinear(LoRALinearOptions(in, out).rank(0).bias(false)));
    };
    q_proj = projection("q_proj", hidden, all), k_proj = projection("k_proj", hidden, all);
    v_proj = projection("v_proj", hidden, all), b_proj = projection("b_proj", hidden, o.heads());
    conv1d = register_module("conv1d", ShortConvolution(ShortConvolutionOptions(3 * all, o.width())));
    forget_gate = register_module("forget_gate", KimiForgetGate(o));
    g_a_proj = projection("g_a_proj", hidden, D), g_b_proj = projection("g_b_proj", D, all);
    const GatedNormOptions by_sigmoid{.activation = Gate::Sigmoid};
    o_norm = register_module("o_norm", RMSNormGated(RMSNormGatedOptions(D).eps(o.eps()).norm(by_sigmoid)));
    o_proj = projection("o_proj", all, hidden);
  }

  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

  /// starts [batch, time], int32, says where documents begin, as gated_delta_rule takes it.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& starts = {}) { return mix(x, starts, nullptr); }

  /// As GatedDeltaNetBase::mix.
  at::Tensor mix(const at::Tensor& x, const at::Tensor& starts, MixerState* state) {
    const int64_t heads = options.heads(), D = options.head_dim(), all = heads * D;
    const at::Tensor qkv = convolved(conv1d, at::cat({q_proj(x), k_proj(x), v_proj(x)}, -1), starts, state);
    const auto part = [&](int64_t i) { return qkv.narrow(-1, i * all, all).view({x.size(0), x.size(1), heads, D}); };
    const auto [y, last] = gated_delta_rule(part(0), part(1), part(2), forget_gate(x), at::sigmoid(b_proj(x)),
                                            state ? given(state->recurrent) : std::nullopt, given(starts), {},
                                            /*eps=*/1e-6, /*delta=*/true, /*final_state=*/state != nullptr);
    if (state) state->recurrent = last;
    return o_proj(o_norm(y, g_b_proj(g_a_proj(x)).view_as(y)).flatten(-2));
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "hidden_size", options.hidden_size(), "heads", options.heads(), "head_dim", options.head_dim(),
          "width", options.width(), "eps", options.eps());
  }

  KimiDeltaAttentionOptions options;
  LoRALinear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, b_proj{nullptr}, g_a_proj{nullptr}, g_b_proj{nullptr},
      o_proj{nullptr};
  ShortConvolution conv1d{nullptr};
  KimiForgetGate forget_gate{nullptr};
  RMSNormGated o_norm{nullptr};
};
TORCH_MODULE(KimiDeltaAttention);

struct Mamba2Options {
  Mamba2Options(int64_t hidden_size, int64_t heads) : hidden_size_(hidden_size), heads_(heads) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(int64_t, heads);
  TORCH_ARG(int64_t, head_dim) = 64;
  TORCH_ARG(int64_t, groups) = 1;  // of B, C and the norm; they divide the heads
  TORCH_ARG(int64_t, state_size) = 128;
  TORCH_ARG(int64_t, width) = 4;  // of the convolution
  TORCH_ARG(double, eps) = 1e-5;  // of the norm
  TORCH_ARG(bool, bias) = false;  // of the projections
  TORCH_ARG(bool, conv_bias) = true;
};

/// Mamba-2's mixer (Dao & Gu 2024, arXiv:2405.21060); parameters have the names of transformers' checkpoints. For x
/// [batch, time, hidden_size], without the adapters that linear layers may have:
///   z, u, d = in_proj x
///   v, B, C = silu(conv1d(u))
///   dt      = softplus(d + dt_bias)
///   S       = e^(-exp(A_log) dt) S + dt B vᵀ
///   y       = out_proj(norm((Sᵀ C + D v) silu(z)))
/// with S [state_size, head_dim] for each head and token, and a norm of each group of columns.
struct Mamba2Impl : torch::nn::Cloneable<Mamba2Impl> {
  explicit Mamba2Impl(Mamba2Options o) : options(std::move(o)) { reset(); }

  /// A_log is the logarithm of 1, 2, …, D is 1, and dt_bias such that dt without input is drawn from 0.001 to 0.1, its
  /// logarithm uniformly.
  void reset() override {
    const Mamba2Options& o = options;
    TORCH_CHECK_VALUE(o.groups() > 0 && o.heads() % o.groups() == 0, "heads ", o.heads(), " are no multiple of groups ",
                      o.groups());
    const int64_t inner = o.heads() * o.head_dim(), channels = inner + 2 * o.groups() * o.state_size();
    const auto projection = [&](int64_t in, int64_t out) {
      return LoRALinear(LoRALinearOptions(in, out).rank(0).bias(o.bias()));
    };
    in_proj = register_module("in_proj", projection(o.hidden_size(), inner + channels + o.heads()));
    conv1d =
        register_module("conv1d", ShortConvolution(ShortConvolutionOptions(channels, o.width()).bias(o.conv_bias())));
    const at::Tensor dt = torch::exp(torch::empty({o.heads()}).uniform_(std::log(1e-3), std::log(0.1)));
    dt_bias = register_parameter("dt_bias", dt + torch::log(-torch::expm1(-dt)));
    A_log = register_parameter("A_log", torch::arange(1, o.heads() + 1, at::kFloat).log_());
    D = register_parameter("D", torch::ones({o.heads()}));
    const GatedNormOptions gate_first{.norm_before_gate = false, .groups = o.groups(), .casting = Casting::Llama};
    norm = register_module("norm", RMSNormGated(RMSNormGatedOptions(inner).eps(o.eps()).norm(gate_first)));
    out_proj = register_module("out_proj", projection(inner, o.hidden_size()));
  }

  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

  /// starts [batch, time], int32, says where documents begin, as gated_delta_rule takes it.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& starts = {}) { return mix(x, starts, nullptr); }

  /// As GatedDeltaNetBase::mix.
  at::Tensor mix(const at::Tensor& x, const at::Tensor& starts, MixerState* state) {
    const Mamba2Options& o = options;
    const int64_t batch = x.size(0), time = x.size(1), inner = o.heads() * o.head_dim(),
                  of_groups = o.groups() * o.state_size();
    const auto projected = in_proj(x).split_with_sizes({inner, inner + 2 * of_groups, o.heads()}, -1);
    const at::Tensor u = convolved(conv1d, projected[1], starts, state);
    const auto part = [&](int64_t from, int64_t n, int64_t width) {
      return u.narrow(-1, from, n * width).view({batch, time, n, width});
    };
    const at::Tensor v = part(0, o.heads(), o.head_dim());
    const auto [g, dt] = delta_gates(projected[2], A_log, dt_bias);
    const auto [y, last] =
        gated_delta_rule(part(inner + of_groups, o.groups(), o.state_size()), part(inner, o.groups(), o.state_size()),
                         v, g, dt, state ? given(state->recurrent) : std::nullopt, given(starts), /*scale=*/1,
                         /*eps=*/-1, /*delta=*/false, /*final_state=*/state != nullptr, D);
    if (state) state->recurrent = last;
    return out_proj(norm(y.flatten(-2), projected[0]));
  }

  void pretty_print(std::ostream& to) const override {
    print(to, *this, "hidden_size", options.hidden_size(), "heads", options.heads(), "head_dim", options.head_dim(),
          "groups", options.groups(), "state_size", options.state_size(), "width", options.width(), "eps",
          options.eps(), "bias", options.bias(), "conv_bias", options.conv_bias());
  }

  Mamba2Options options;
  LoRALinear in_proj{nullptr}, out_proj{nullptr};
  ShortConvolution conv1d{nullptr};
  RMSNormGated norm{nullptr};
  at::Tensor A_log, dt_bias, D;  // [heads]
};
TORCH_MODULE(Mamba2);

}  // namespace liger::nn
