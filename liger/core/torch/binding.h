#pragma once
// From a function of structs to an operator: its schema, its binding and calls of it.
#include "liger/core/torch/fields.h"

namespace liger {

/// A schema's name as a template argument.
template <size_t n>
struct Name {
  char text[n];
  consteval Name(const char (&s)[n]) { std::copy_n(s, n, text); }
};

/// "liger::" + a + b.
template <size_t n, size_t m>
consteval auto qualified(const Name<n>& a, const char (&b)[m]) {
  char text[7 + n + m - 1]{};
  std::copy_n("liger::", 7, text);
  std::copy_n(a.text, n - 1, text + 7);
  std::copy_n(b, m, text + 7 + n - 1);
  return Name<7 + n + m - 1>(text);
}

/// Makes undefined results empty tensors: torch.export and AOTInductor have no value for an undefined one.
template <class R>
R complete(R results, const Tensor& like) {
  leaves(results).apply([&](auto&... t) { ((t.defined() ? void() : void(t = at::empty({0}, like.options()))), ...); });
  return results;
}

/// f(integral_constant i) for i < n.
template <size_t n, class F>
void for_each_index(F&& f) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    (f(std::integral_constant<size_t, i>()), ...);
  }(std::make_index_sequence<n>());
}

/// The first n results, as the dispatcher returns them: a tensor, or a tuple of them.
template <size_t n, class R>
auto first_results(R& all) {
  const auto results = leaves(all);
  return [&]<size_t... i>(std::index_sequence<i...>) {
    if constexpr (n == 1) return Tensor(std::move(get<0>(results)));
    else return std::make_tuple(Tensor(std::move(get<i>(results)))...);
  }(std::make_index_sequence<n>());
}

/// The first tensor among leaves.
template <class... T>
const Tensor& first_tensor(const Refs<T...>& leaves) {
  constexpr bool tensors[] = {std::is_same_v<std::remove_const_t<T>, Tensor>...};
  return get<size_t(std::find(std::begin(tensors), std::end(tensors), true) - std::begin(tensors))>(leaves);
}

/// A function of structs as the dispatcher's function of their leaves.
template <auto kFunction>
struct Flat;
template <class R, class... S, R (*kFunction)(S...)>
struct Flat<kFunction> {
  using Result = R;
  using Parameters = std::tuple<std::remove_cvref_t<S>...>;

  template <class L>
  struct Of;
  template <class... L>
  struct Of<Refs<L...>> {
    static auto call(typename Argument<L>::Type... args) {
      Parameters structs;
      const auto all = std::apply([](auto&... s) { return leaves(s...); }, structs);
      set_fields(all, args...);
      if constexpr (std::is_void_v<R>) {
        std::apply(kFunction, structs);
      } else {
        R results = complete(std::apply(kFunction, structs), first_tensor(all));
        return first_results<kLeaves<R>>(results);
      }
    }
  };
  static constexpr auto call = &Of<Leaves<std::remove_cvref_t<S>...>>::call;

  /// "name(Tensor x, float eps) -> (Tensor y, Tensor rstd)".
  static std::string schema(const std::string& name) {
    return schema_text(name, argument_names<std::remove_cvref_t<S>...>(), result_names<R>());
  }
};

/// The schema kName, which kFunction implements, as a function that goes through the dispatcher. It takes the
/// arguments, or structs of them. Where nothing is recorded it starts below autograd, whose refusal of a derivative
/// would be a boxed call that has nothing to refuse.
template <Name kName, auto kFunction>
struct Op {
  template <class... S>
  auto operator()(const S&... structs) const {
    return leaves(structs...).apply([](const auto&... leaf) { return call(as_argument(leaf)...); });
  }

 private:
  template <class... A>
  static auto call(const A&... args) {
    using Signature = std::remove_pointer_t<decltype(kFunction)>;
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow(kName.text, "").template typed<Signature>();
    int position = 0;
    (check_defined(handle, position++, args), ...);
    if (at::GradMode::is_enabled()) return handle.call(args...);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return handle.call(args...);
  }

  /// The dispatcher's own message for an undefined tensor is a table of kernels.
  template <class Handle, class T>
  static void check_defined(const Handle& handle, int position, const T& arg) {
    if constexpr (std::is_same_v<T, Tensor>)
      TORCH_CHECK(arg.defined(), handle.schema().name().substr(7), ": ", handle.schema().arguments()[position].name(),
                  " is an undefined tensor");
  }
};

/// f(those of `all`, a tuple of references to structs, that kFunction takes).
template <auto kFunction, class F, class All>
auto call_as(const F& f, const All& all) {
  return [&]<class... S>(std::type_identity<std::tuple<S...>>) {
    return f(std::get<const S&>(all)...);
  }(std::type_identity<typename Flat<kFunction>::Parameters>());
}

/// What is registered of an operator; LIGER_OPERATORS does it once for each of these.
enum class Registered { Schema, Kernel, Autograd, AutocastCUDA, AutocastCPU };

class Registrar {
 public:
  Registrar(torch::Library& library, Registered what) : library_(library), what_(what) {}

  /// kernel and, if it is not null, autocast<device>() are functions of the schema's arguments. Without `autograd` a
  /// derivative is an error, not a zero.
  template <class Kernel, class Autograd = std::nullptr_t, class Autocast = std::nullptr_t>
  void add(const std::string& schema, Kernel kernel, Autograd autograd = nullptr, Autocast on_cuda = nullptr,
           Autocast on_cpu = nullptr) {
    const std::string name = schema.substr(0, schema.find('('));
    if (what_ == Registered::Schema) library_.def(schema.c_str());
    else if (what_ == Registered::Kernel) library_.impl(name.c_str(), kernel);
    else if (what_ == Registered::Autograd) {
      if constexpr (std::is_null_pointer_v<Autograd>)
        library_.impl(name.c_str(), torch::autograd::autogradNotImplementedFallback());
      else library_.impl(name.c_str(), autograd);
    } else if constexpr (!std::is_null_pointer_v<Autocast>) {
      library_.impl(name.c_str(), what_ == Registered::AutocastCUDA ? on_cuda : on_cpu);
    }
  }

 private:
  torch::Library& library_;
  Registered what_;
};

/// An operator without a derivative, of a function of structs. kWrites: the arguments that it writes to, with their
/// alias annotations in the schema: "y(a!)".
template <Name kName, auto kFunction, Name kWrites = "">
struct Undifferentiated {
  static constexpr Op<qualified(kName, ""), Flat<kFunction>::call> op{};
  static void describe(Registrar& r) {
    r.add(with_writes(Flat<kFunction>::schema(kName.text), kWrites.text), Flat<kFunction>::call);
  }
};

/// Defines an operator without kernels: what ATen's operators make of a function of structs, on any device, and
/// differentiated through them.
template <auto kFunction>
void def_composite(torch::Library& library, const char* name) {
  library.def(Flat<kFunction>::schema(name).c_str(), Flat<kFunction>::call);
}

template <class... Operators>
void describe(torch::Library& library, Registered what) {
  Registrar r(library, what);
  (Operators::describe(r), ...);
}

/// Registers the operators of a file: Operator<D>, Operator<GradientInForward<D>> or Undifferentiated.
#define LIGER_OPERATORS(stem, ...)                                                                   \
  TORCH_LIBRARY_FRAGMENT(liger, m) { describe<__VA_ARGS__>(m, Registered::Schema); }                 \
  LIGER_IMPL(stem, m) { describe<__VA_ARGS__>(m, Registered::Kernel); }                              \
  TORCH_LIBRARY_IMPL(liger, Autograd, m) { describe<__VA_ARGS__>(m, Registered::Autograd); }         \
  TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { describe<__VA_ARGS__>(m, Registered::AutocastCUDA); } \
  TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) { describe<__VA_ARGS__>(m, Registered::AutocastCPU); }

}  // namespace liger
