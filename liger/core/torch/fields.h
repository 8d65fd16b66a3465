#pragma once
#include <algorithm>
#include <limits>
#include <sstream>
#include "liger/core/torch/op.h"
#include "liger/options.h"

// What is derived from a struct that lists its fields (LIGER_FIELDS in liger/options.h): its leaves, which are the
// fields with those of nested structs in their place, and how a schema and the dispatcher's functions have them.

namespace liger {

template <class S>
concept Fields = requires { S::field_names(); };

struct NoFields {
  LIGER_FIELDS()
};

/// The leaves of structs; anything else is one leaf.
template <class T, class... S>
auto leaves(T& first, S&... others);
template <class T>
auto leaves(T& t) {
  if constexpr (Fields<std::remove_const_t<T>>)
    return t.fields().apply([]<class... F>(F&... field) {
      if constexpr ((Fields<std::remove_const_t<F>> || ...)) return leaves(field...);
      else return refs(field...);
    });
  else return refs(t);
}
template <class T, class... S>
auto leaves(T& first, S&... others) {
  return leaves(first).apply(
      [&](auto&... a) { return leaves(others...).apply([&](auto&... b) { return refs(a..., b...); }); });
}
template <class... S>
using Leaves = decltype(leaves(std::declval<S&>()...));
template <class S>
inline constexpr size_t kLeaves = Leaves<S>::kSize;

/// A tensor that backward writes to: autograd is not asked whether it has changed.
struct Untracked : OptTensor {
  Untracked() = default;
  Untracked(OptTensor t) : OptTensor(std::move(t)) {}
};
template <class T>
inline constexpr bool is_tensor = std::is_same_v<T, Tensor> || std::is_same_v<T, OptTensor>;

/// The dtypes that a schema has as "ScalarType?", and its lists: seen, where a struct lives no longer than the call, or
/// owned.
using OptDtype = std::optional<at::ScalarType>;
using Tensors = std::vector<Tensor>;
using IntsRef = at::OptionalIntArrayRef;
using Ints = std::optional<std::vector<int64_t>>;

/// A field as the dispatcher passes it: the argument's type in C++, and in a schema.
template <class T>
struct Argument {
  using Type = T;
};
#define LIGER_ARGUMENT(T, CppType, name) \
  template <>                            \
  struct Argument<T> {                   \
    using Type = CppType;                \
    static constexpr auto kName = name;  \
  };
LIGER_ARGUMENT(Tensor, const Tensor&, "Tensor")
LIGER_ARGUMENT(OptTensor, const OptTensor&, "Tensor?")
LIGER_ARGUMENT(Untracked, const OptTensor&, "Tensor?")
LIGER_ARGUMENT(Tensors, at::TensorList, "Tensor[]")
LIGER_ARGUMENT(bool, bool, "bool")
LIGER_ARGUMENT(int64_t, int64_t, "int")
LIGER_ARGUMENT(c10::SymInt, c10::SymInt, "SymInt")
LIGER_ARGUMENT(float, double, "float")
LIGER_ARGUMENT(double, double, "float")
LIGER_ARGUMENT(std::optional<double>, std::optional<double>, "float?")
LIGER_ARGUMENT(at::ScalarType, at::ScalarType, "ScalarType")
LIGER_ARGUMENT(OptDtype, OptDtype, "ScalarType?")
LIGER_ARGUMENT(IntsRef, IntsRef, "int[]?")
LIGER_ARGUMENT(Ints, IntsRef, "int[]?")
LIGER_ARGUMENT(std::string, c10::string_view, "str")
#undef LIGER_ARGUMENT
template <class T>
  requires std::is_enum_v<T>
struct Argument<T> : Argument<int64_t> {};

template <class T>
decltype(auto) as_argument(const T& t) {
  if constexpr (std::is_enum_v<T> && !std::is_same_v<T, at::ScalarType>) return int64_t(t);
  else if constexpr (std::is_same_v<T, Ints>) return t ? IntsRef(*t) : IntsRef();
  else if constexpr (std::is_same_v<T, std::string>) return c10::string_view(t);
  else if constexpr (std::is_same_v<T, Tensors>) return at::TensorList(t);
  else if constexpr (std::is_same_v<T, Untracked>) return static_cast<const OptTensor&>(t);
  else return (t);
}

template <class T, class A>
void set_field(T& field, A&& from) {
  if constexpr (std::is_enum_v<T> && !std::is_same_v<T, at::ScalarType>) {
    // A number that is too large for the type must not become a valid one.
    using Limits = std::numeric_limits<std::underlying_type_t<T>>;
    field = T(std::clamp<int64_t>(from, Limits::min(), Limits::max()));
  } else if constexpr (std::is_same_v<T, Ints>) {
    if (from) field = from->vec();
    else field.reset();
  } else if constexpr (std::is_same_v<T, std::string>) {
    field = std::string(from);
  } else if constexpr (std::is_same_v<T, Tensors>) {
    field = from.vec();
  } else {
    field = std::forward<A>(from);
  }
}

/// Sets leaves to as many arguments.
template <class Leaves, class... A>
void set_fields(const Leaves& leaves, A&&... args) {
  leaves.apply([&](auto&... field) { (set_field(field, std::forward<A>(args)), ...); });
}

/// A leaf among what a node keeps. A list is a tuple there: compiled autograd cannot keep a list.
template <class T>
c10::IValue as_value(const T& t) {
  if constexpr (std::is_enum_v<T>) return int64_t(t);
  else if constexpr (std::is_same_v<T, OptDtype>) return t ? c10::IValue(int64_t(*t)) : c10::IValue();
  else if constexpr (std::is_same_v<T, Ints>)
    return t ? c10::IValue(c10::ivalue::Tuple::create(std::vector<c10::IValue>(t->begin(), t->end()))) : c10::IValue();
  else return t;
}
template <class T>
void set_value(T& to, const c10::IValue& from) {
  if constexpr (std::is_enum_v<T>) {
    to = T(from.toInt());
  } else if constexpr (std::is_same_v<T, OptDtype>) {
    to = from.isNone() ? OptDtype() : at::ScalarType(from.toInt());
  } else if constexpr (std::is_same_v<T, Ints>) {
    if (from.isNone()) return to.reset();
    to.emplace();
    for (const c10::IValue& v : from.toTupleRef().elements()) to->push_back(v.toInt());
  } else {
    to = from.to<T>();
  }
}

/// What an operator returned, a tensor or a tuple of them, as a struct.
template <class S>
S as_fields(Tensor t) {
  S s;
  get<0>(leaves(s)) = std::move(t);
  return s;
}
template <class S, class... T>
S as_fields(std::tuple<T...> t) {
  S s;
  leaves(s).apply([&](auto&... leaf) { std::tie(leaf...) = std::move(t); });
  return s;
}

/// The flags that say which gradients are wanted are with_<gradient> in a schema.
template <class S>
inline constexpr const char* kPrefix = "";
template <template <class> class Gradients>
inline constexpr const char* kPrefix<Gradients<bool>> = "with_";

/// The names of a struct's fields. A schema has the field student.scale of a nested struct as student_scale.
std::vector<std::string> split_names(const char* names);

template <class T>
std::string default_text(const T& v) {
  std::ostringstream s;
  if constexpr (std::is_same_v<T, bool>) s << (v ? "True" : "False");
  else if constexpr (std::is_floating_point_v<T>) s << std::showpoint << v;
  else if constexpr (std::is_enum_v<T>) s << int64_t(v);
  else if constexpr (std::is_integral_v<T>) s << v;
  else s << "None";
  return s.str();
}

/// Adds a struct's leaves as a schema has its arguments: "float eps", or "float eps=1e-6" in LIGER_OPTIONS.
template <class S>
void add_arguments(std::vector<std::string>& to) {
  const auto names = split_names(S::field_names());
  if constexpr (requires { typename S::KeywordOnly; }) to.push_back("*");
  const S defaults{};
  size_t i = 0;
  const auto add = [&]<class T>(const T& field) {
    const std::string& name = names[i++];
    if constexpr (Fields<T>) add_arguments<T>(to);
    else if constexpr (requires { typename S::Defaults; })
      to.push_back(std::string(Argument<T>::kName) + " " + name + "=" + default_text(field));
    else to.push_back(std::string(Argument<T>::kName) + " " + kPrefix<S> + name);
  };
  defaults.fields().apply([&](const auto&... field) { (add(field), ...); });
}

template <class... S>
std::vector<std::string> argument_names() {
  std::vector<std::string> names;
  (add_arguments<S>(names), ...);
  return names;
}

/// The names of results, of which a single one has none.
template <class R>
std::vector<std::string> result_names() {
  std::vector<std::string> arguments;
  if constexpr (Fields<R>) add_arguments<R>(arguments);
  else if constexpr (!std::is_void_v<R>) arguments.push_back("Tensor");
  return arguments;
}

/// "name(arguments) -> (results)".
std::string schema_text(const std::string& name, const std::vector<std::string>& arguments,
                        const std::vector<std::string>& results);

/// The schema of an operator that writes to some arguments: "y(a!)" makes "Tensor y" to "Tensor(a!) y".
std::string with_writes(std::string schema, const char* writes);

}  // namespace liger
