#pragma once
#include <sstream>
#include "liger/core/torch/op.h"
#include "liger/options.h"

// Operators whose options are a struct (liger/options.h). A schema is flat, so that torch.compile and torch.export see
// numbers; what is written is not:
//
//     Results forward(const Options& options, const Tensor& x, bool wanted);
//     constexpr Op<"liger::name", flat<forward>> op;
//     // name(Tensor x, bool wanted, float temperature=1, ...) -> Tensor y
//     m.def(schema<Options>("name(Tensor x, bool wanted", "Tensor y"));
//     m.impl("name", flat<forward>);
//     with_options(op, options, x, wanted);

namespace liger {

template <class O>
using OptionValues = decltype(std::declval<const O&>().option_values());

template <class O>
O make_options(const OptionValues<O>& values) {
  return std::apply([](const auto&... v) { return O{v...}; }, values);
}

namespace detail {

/// A function of its options and other arguments as one of those arguments and the options' fields; kBefore: what
/// stands before the options and stays first.
template <auto kFunction>
struct Flat;

template <class R, class O, class... A, R (*kFunction)(const O&, A...)>
struct Flat<kFunction> {
  template <class Values>
  struct With;
  template <class... F>
  struct With<std::tuple<F...>> {
    static R call(A... args, F... fields) { return kFunction(O{fields...}, args...); }
  };
  static constexpr auto value = &With<OptionValues<O>>::call;
};

/// Likewise the forward pass of a node, whose context comes first and whose results come last.
template <class R, class O, class... A, variable_list (*kFunction)(AutogradContext*, R*, const O&, A...)>
struct Flat<kFunction> {
  template <class Values>
  struct With;
  template <class... F>
  struct With<std::tuple<F...>> {
    static variable_list call(AutogradContext* ctx, A... args, F... fields, R* results) {
      return kFunction(ctx, results, O{fields...}, args...);
    }
  };
  static constexpr auto value = &With<OptionValues<O>>::call;
};

/// And of one whose only result is what it returns.
template <class R, class O, class... A, R (*kFunction)(AutogradContext*, const O&, A...)>
struct Flat<kFunction> {
  template <class Values>
  struct With;
  template <class... F>
  struct With<std::tuple<F...>> {
    static R call(AutogradContext* ctx, A... args, F... fields) { return kFunction(ctx, O{fields...}, args...); }
  };
  static constexpr auto value = &With<OptionValues<O>>::call;
};

inline std::string option_text(double v) {
  std::ostringstream s;
  s << "float %=" << std::showpoint << v;
  return s.str();
}
inline std::string option_text(int64_t v) { return "int %=" + std::to_string(v); }
inline std::string option_text(bool v) { return std::string("bool %=") + (v ? "True" : "False"); }
std::string option_schema(const char* names, const std::vector<std::string>& texts);

}  // namespace detail

template <auto kFunction>
inline constexpr auto flat = detail::Flat<kFunction>::value;

/// "before, options) -> (results)" as a schema: the options come last, with their defaults.
template <class O>
c10::FunctionSchema schema(const std::string& before, const std::string& results) {
  std::vector<std::string> texts;
  std::apply([&](const auto&... v) { (texts.push_back(detail::option_text(v)), ...); }, O{}.option_values());
  return torch::schema((before + detail::option_schema(O::option_names(), texts) + ") -> (" + results + ")").c_str());
}

/// Calls an operator with its options.
template <class Op, class O, class... A>
auto with_options(const Op& op, const O& options, const A&... args) {
  return std::apply([&](const auto&... fields) { return op(args..., fields...); }, options.option_values());
}

/// A node whose forward pass takes the options as a struct: forward(ctx, Results*, options, arguments...).
template <class Node>
struct OptionsNode {
  static constexpr auto forward = flat<Node::forward>;
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return Node::backward(ctx, std::move(grads));
  }
};

template <class O>
void save_options(AutogradContext* ctx, const O& options) {
  ctx->saved_data["options"] = options.option_values();
}
template <class O>
O load_options(AutogradContext* ctx) {
  return make_options<O>(ctx->saved_data["options"].template to<OptionValues<O>>());
}

}  // namespace liger
