#pragma once
// From typed functions to operators: schemas, the bindings of CPU, CUDA, Meta and of backends that are plugged in, and
// the graph's nodes of those whose backward pass needs no more than what forward was given and returned.
#include <array>
#include <string_view>
#include "liger/core/torch/op.h"

namespace liger {

/// The name of a C++ type in a schema.
template <class T>
constexpr const char* schema_type() {
  using U = std::remove_cvref_t<T>;
  if constexpr (std::is_same_v<U, Tensor>) return "Tensor";
  else if constexpr (std::is_same_v<U, OptTensor>) return "Tensor?";
  else if constexpr (std::is_same_v<U, double>) return "float";
  else if constexpr (std::is_same_v<U, std::optional<double>>) return "float?";
  else if constexpr (std::is_same_v<U, bool>) return "bool";
  else if constexpr (std::is_same_v<U, int64_t>) return "int";
  else if constexpr (std::is_same_v<U, c10::SymInt>) return "SymInt";
  else if constexpr (std::is_same_v<U, at::ScalarType>) return "ScalarType";
  else if constexpr (std::is_same_v<U, c10::string_view>) return "str";
  else if constexpr (std::is_same_v<U, OptInts>) return "int[]?";
  else if constexpr (std::is_same_v<U, at::IntArrayRef>) return "int[]";
  else if constexpr (std::is_same_v<U, OptDoubles>) return "float[]?";
  else static_assert(!sizeof(U), "a schema has no such type");
}

using Names = std::vector<std::string>;

/// "name(Tensor x, float eps) -> (Tensor y, Tensor rstd)". A name may bring a default: "padding_idx=-1". One result has
/// no name.
template <class R, class... A>
std::string schema_of(const std::string& name, R (*)(A...), const Names& arguments, const Names& results) {
  TORCH_INTERNAL_ASSERT(arguments.size() == sizeof...(A), name, " has ", sizeof...(A), " arguments");
  std::string s = name + "(";
  size_t i = 0;
  ((s += std::string(i > 0 ? ", " : "") + schema_type<A>() + " " + arguments[i], ++i), ...);
  s += ") -> ";
  if (results.size() == 1) return s + "Tensor";
  for (i = 0; i < results.size(); ++i) s += (i > 0 ? ", Tensor " : "(Tensor ") + results[i];
  return s + ")";
}

/// What is done with an operator's description. The same function describes it each time (LIGER_OPERATORS).
class Registrar {
 public:
  enum class Pass { Schemas, Kernels, Autograd };
  Registrar(torch::Library& library, Pass pass) : library_(library), pass_(pass) {}

  /// An operator without a derivative: to ask for it is an error, not a zero.
  template <Name kName, auto kFunction>
  void add(Op<kName, kFunction>, const Names& arguments, const Names& results) {
    add<kName, kFunction>(schema_of(stem(kName.text), kFunction, arguments, results),
                          [] { return torch::autograd::autogradNotImplementedFallback(); });
  }

  /// The same with the rest of its schema spelt out, where an argument is written to.
  template <Name kName, auto kFunction>
  void add(Op<kName, kFunction>, const std::string& signature) {
    add<kName, kFunction>(stem(kName.text) + signature,
                          [] { return torch::autograd::autogradNotImplementedFallback(); });
  }

  /// One that Node differentiates by the first kInputs arguments (Differentiated).
  template <class Node, int kInputs, Name kName, auto kFunction>
  void add(Op<kName, kFunction> op, const Names& arguments, const Names& results) {
    add<kName, kFunction>(schema_of(stem(kName.text), kFunction, arguments, results),
                          [&] { return differentiated<Node, kInputs>(op); });
  }

 private:
  template <Name kName, auto kFunction, class Derivative>
  void add(const std::string& schema, Derivative derivative) {
    const char* name = stem(kName.text);
    if (pass_ == Pass::Schemas) library_.def(schema.c_str());
    else if (pass_ == Pass::Kernels) library_.impl(name, kFunction);
    else library_.impl(name, derivative());
  }
  static const char* stem(const char* name) { return name + std::string_view("liger::").size(); }

  torch::Library& library_;
  Pass pass_;
};

/// Describes the operators of a file to Registrar r, in the body that follows: once for each of its passes.
#define LIGER_OPERATORS(stem, r)                                             \
  static void stem##_describe(::liger::Registrar&);                          \
  TORCH_LIBRARY_FRAGMENT(liger, lib) {                                       \
    ::liger::Registrar of_schemas(lib, ::liger::Registrar::Pass::Schemas);   \
    stem##_describe(of_schemas);                                             \
  }                                                                          \
  LIGER_IMPL(stem, lib) {                                                    \
    ::liger::Registrar of_kernels(lib, ::liger::Registrar::Pass::Kernels);   \
    stem##_describe(of_kernels);                                             \
  }                                                                          \
  TORCH_LIBRARY_IMPL(liger, Autograd, lib) {                                 \
    ::liger::Registrar of_autograd(lib, ::liger::Registrar::Pass::Autograd); \
    stem##_describe(of_autograd);                                            \
  }                                                                          \
  static void stem##_describe(::liger::Registrar& r)

/// "liger::" + a + b.
template <size_t n, size_t m>
consteval auto qualified(const Name<n>& a, const char (&b)[m]) {
  char text[7 + n + m - 1]{};
  std::copy_n("liger::", 7, text);
  std::copy_n(a.text, n - 1, text + 7);
  std::copy_n(b, m, text + 7 + n - 1);
  return Name<7 + n + m - 1>(text);
}

/// An operator whose derivative needs no more than its own inputs and results. D has
///   kName
///   kInputs     the names of inputs
///   kAll        of all results
///   kSaved      of what backward is given of both
///   kGradients  of gradients
///   kResults    if it is not 1: how many of the results, the first ones, are the operator's
///   forward(inputs...)                         returns all results
///   backward(upstream..., saved..., flags...)  returns the gradients of the first inputs
/// backward gets one upstream gradient per result and, optionally, one flag per gradient, with_<gradient>: what is not
/// wanted is empty. There are three schemas: <name>, <name>_forward, whose results are all, and <name>_backward.
template <class D>
class Operator {
  template <class F>
  struct Signature;
  template <class R, class... A>
  struct Signature<R (*)(A...)> {
    using Arguments = std::tuple<std::remove_cvref_t<A>...>;
    static constexpr size_t kCount = sizeof...(A);
  };
  using Forward = Signature<decltype(+D::forward)>;
  using Backward = Signature<decltype(+D::backward)>;

  static constexpr size_t kResults = [] {
    if constexpr (requires { D::kResults; }) return size_t(D::kResults);
    else return size_t(1);
  }();
  static constexpr size_t kSaved = D::kSaved.size(), kGradients = D::kGradients.size(), kFlagsAt = kResults + kSaved;
  static constexpr bool kFlags = Backward::kCount == kFlagsAt + kGradients;
  static_assert(kFlags || Backward::kCount == kFlagsAt);

  /// A tuple, also of one.
  template <class... T>
  static std::tuple<T...> all(std::tuple<T...> t) {
    return t;
  }
  static std::tuple<Tensor> all(Tensor t) { return {std::move(t)}; }

  /// Where backward's saved argument i is: among the inputs or, from their count on, among all results.
  static constexpr size_t place(size_t i) {
    const std::string_view name = D::kSaved[i];
    for (size_t k = 0; k < D::kInputs.size(); ++k)
      if (name == D::kInputs[k]) return k;
    for (size_t k = 0; k < D::kAll.size(); ++k)
      if (name == D::kAll[k]) return D::kInputs.size() + k;
    throw "saved is what forward was given or returned";
  }
  template <size_t i>
  using SavedType = std::tuple_element_t<kResults + i, typename Backward::Arguments>;
  template <size_t i>
  static constexpr bool is_tensor = std::is_same_v<SavedType<i>, Tensor> || std::is_same_v<SavedType<i>, OptTensor>;
  /// How many tensors, or other values, are saved before i.
  template <bool kTensors, size_t i>
  static constexpr size_t before = []<size_t... k>(std::index_sequence<k...>) {
    return (size_t(is_tensor<k> == kTensors) + ... + size_t(0));
  }(std::make_index_sequence<i>());

  template <class... A>
  struct PublicOf;
  template <class... A>
  struct PublicOf<std::tuple<A...>> {
    static auto call(const A&... args) { return first(all(D::forward(args...)), std::make_index_sequence<kResults>()); }
    template <class... T, size_t... i>
    static auto first(std::tuple<T...> t, std::index_sequence<i...>) {
      if constexpr (kResults == 1) return std::get<0>(std::move(t));
      else return std::make_tuple(std::get<i>(t)...);
    }
  };

 public:
  static constexpr Op<qualified(D::kName, ""), &PublicOf<typename Forward::Arguments>::call> public_op{};
  static constexpr Op<qualified(D::kName, "_forward"), +D::forward> forward_op{};
  static constexpr Op<qualified(D::kName, "_backward"), +D::backward> backward_op{};

  template <class Inputs>
  struct NodeOf;
  template <class... A>
  struct NodeOf<std::tuple<A...>> {
    static auto forward(AutogradContext* ctx, const A&... inputs) {
      auto results = all(forward_op(inputs...));
      const auto known = std::tuple_cat(std::tie(inputs...), results);
      [&]<size_t... i>(std::index_sequence<i...>) {
        variable_list tensors;
        tensors.reserve(kSaved);
        (save<i>(tensors, std::get<place(i)>(known)), ...);
        ctx->save_for_backward(std::move(tensors));
        auto values = std::tuple_cat(value<i>(std::get<place(i)>(known))..., flags(std::tie(inputs...)));
        if constexpr (std::tuple_size_v<decltype(values)> > 0) ctx->saved_data["values"] = std::move(values);
      }(std::make_index_sequence<kSaved>());
      if constexpr (kResults == 1) return std::get<0>(std::move(results));
      else
        return [&]<size_t... i>(std::index_sequence<i...>) {
          return variable_list{std::get<i>(results)...};
        }(std::make_index_sequence<kResults>());
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
      const variable_list tensors = ctx->get_saved_variables();
      Values values;
      if constexpr (std::tuple_size_v<Values> > 0) values = ctx->saved_data["values"].template to<Values>();
      const auto flag = [&]<size_t i>(std::integral_constant<size_t, i>) -> bool {
        if constexpr (kFlags) return std::get<before<false, kSaved> + i>(values);
        else return true;
      };
      return [&]<size_t... g, size_t... i, size_t... f>(std::index_sequence<g...>, std::index_sequence<i...>,
                                                        std::index_sequence<f...>) {
        auto gradients = [&] {
          if constexpr (kFlags)
            return all(
                backward_op(upstream[g]..., load<i>(tensors, values)..., flag(std::integral_constant<size_t, f>())...));
          else return all(backward_op(upstream[g]..., load<i>(tensors, values)...));
        }();
        return variable_list{if_wanted(flag(std::integral_constant<size_t, f>()), std::get<f>(gradients))...};
      }(std::make_index_sequence<kResults>(), std::make_index_sequence<kSaved>(),
             std::make_index_sequence<kGradients>());
    }

   private:
    template <size_t i, class T>
    static auto value(const T& v) {
      if constexpr (is_tensor<i>) return std::tuple<>();
      else return std::tuple<SavedType<i>>(v);
    }
    template <size_t i, class T>
    static void save(variable_list& tensors, const T& v) {
      if constexpr (std::is_same_v<T, OptTensor>) tensors.push_back(value_or_undefined(v));
      else if constexpr (is_tensor<i>) tensors.push_back(v);
    }
    template <class Inputs>
    static auto flags(const Inputs& inputs) {
      return [&]<size_t... f>(std::index_sequence<f...>) {
        return std::make_tuple(wants_grad(std::get<f>(inputs))...);
      }(std::make_index_sequence<kFlags ? kGradients : 0>());
    }
    template <size_t... i>
    static auto values_of(std::index_sequence<i...>)
        -> decltype(std::tuple_cat(value<i>(std::declval<SavedType<i>>())...));
    template <size_t>
    using Flag = bool;
    template <size_t... f>
    static std::tuple<Flag<f>...> flags_of(std::index_sequence<f...>);
    using Values = decltype(std::tuple_cat(values_of(std::make_index_sequence<kSaved>()),
                                           flags_of(std::make_index_sequence<kFlags ? kGradients : 0>())));

    template <size_t i>
    static auto load(const variable_list& tensors, const Values& values) {
      if constexpr (!is_tensor<i>) return std::get<before<false, i>>(values);
      else if constexpr (std::is_same_v<SavedType<i>, OptTensor>) return optional(tensors[before<true, i>]);
      else return tensors[before<true, i>];
    }
  };

  using Node = NodeOf<typename Forward::Arguments>;

  static void describe(Registrar& r) {
    const Names inputs(D::kInputs.begin(), D::kInputs.end()), results(D::kAll.begin(), D::kAll.end()),
        gradients(D::kGradients.begin(), D::kGradients.end()), first(results.begin(), results.begin() + kResults);
    Names to_backward;
    for (const std::string& name : first) to_backward.push_back("d" + name);
    to_backward.insert(to_backward.end(), D::kSaved.begin(), D::kSaved.end());
    if (kFlags)
      for (const std::string& name : gradients) to_backward.push_back("with_" + name);
    r.template add<Node, int(kGradients)>(public_op, inputs, first);
    r.add(forward_op, inputs, results);
    r.add(backward_op, to_backward, gradients);
  }
};

/// An operator through the dispatcher.
template <class D, class... A>
auto call(const A&... args) {
  return Operator<D>::public_op(args...);
}

}  // namespace liger
