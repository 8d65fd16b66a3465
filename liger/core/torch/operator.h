#pragma once
// One struct describes an operator; its schemas, the bindings of CPU, CUDA, Meta and of backends that are plugged in,
// autocast and the graph's node follow from it.
#include "liger/core/torch/binding.h"

namespace liger {

/// What an operator with GEMMs does under autocast: it casts its tensors, as the linear layers do that it replaces, or
/// takes them as they are and the dtype to compute in as `dtype`, so that a weight's gradient comes back in float, not
/// rounded on the way.
enum class Autocast { None, Cast, Compute };

namespace detail {

template <class D>
struct OptionsOf {
  using Type = NoFields;
};
template <class D>
  requires requires { typename D::Options; }
struct OptionsOf<D> {
  using Type = typename D::Options;
};

template <class T>
inline constexpr bool is_optional_struct = false;
template <Fields S>
inline constexpr bool is_optional_struct<std::optional<S>> = true;

/// Values that compiled autograd lifts out of the graph, which it cannot do inside of a tuple.
template <class T>
inline constexpr bool is_lifted = std::is_same_v<T, Untracked> || std::is_same_v<T, c10::SymInt>;

/// What a node keeps: tensors as saved variables, the rest as values. Of a struct that may be absent it keeps first
/// whether it is there.
class State {
 public:
  template <class... S>
  static void save(AutogradContext* ctx, S&... structs) {
    State state{ctx};
    constexpr size_t kTensors = []<class... T>(std::type_identity<Refs<T...>>) {
      return (size_t(is_tensor<T>) + ... + 0);
    }(std::type_identity<Leaves<S...>>());
    state.tensors_.reserve(kTensors), state.values_.reserve(Leaves<S...>::kSize - kTensors);
    (state.save_leaf(structs), ...);
    ctx->save_for_backward(std::move(state.tensors_));
    if (!state.values_.empty()) ctx->saved_data["values"] = c10::ivalue::Tuple::create(std::move(state.values_));
  }

  template <class... S>
  static void load(AutogradContext* ctx, S&... structs) {
    State state{ctx};
    state.tensors_ = ctx->get_saved_variables();
    if (const auto found = ctx->saved_data.find("values"); found != ctx->saved_data.end())
      state.values_ = found->second.toTupleRef().elements().vec();
    (state.load_leaf(structs), ...);
  }

 private:
  explicit State(AutogradContext* ctx) : ctx_(ctx) {}

  template <class T>
  void save_leaf(T& leaf) {
    if constexpr (Fields<T>) {
      leaf.fields().apply([&](auto&... field) { (save_leaf(field), ...); });
    } else if constexpr (is_optional_struct<T>) {
      values_.push_back(leaf.has_value());
      if (leaf) save_leaf(*leaf);
    } else if constexpr (std::is_same_v<T, Tensor>) {
      tensors_.push_back(std::move(leaf));
    } else if constexpr (std::is_same_v<T, OptTensor>) {
      tensors_.push_back(value_or_undefined(leaf));
    } else if constexpr (is_lifted<T>) {
      ctx_->saved_data[next_key()] = as_argument(leaf);
    } else {
      values_.push_back(as_value(leaf));
    }
  }

  template <class T>
  void load_leaf(T& leaf) {
    if constexpr (Fields<T>) {
      leaf.fields().apply([&](auto&... field) { (load_leaf(field), ...); });
    } else if constexpr (is_optional_struct<T>) {
      if (values_[value_++].toBool()) load_leaf(leaf.emplace());
    } else if constexpr (std::is_same_v<T, Tensor>) {
      leaf = std::move(tensors_[tensor_++]);
    } else if constexpr (std::is_same_v<T, OptTensor>) {
      leaf = optional(tensors_[tensor_++]);
    } else if constexpr (std::is_same_v<T, c10::SymInt>) {
      leaf = ctx_->saved_data[next_key()].toSymInt();
    } else if constexpr (std::is_same_v<T, Untracked>) {
      leaf = ctx_->saved_data[next_key()].template to<OptTensor>();
    } else {
      set_value(leaf, values_[value_++]);
    }
  }

  std::string next_key() { return "lifted" + std::to_string(lifted_++); }

  AutogradContext* ctx_;
  variable_list tensors_;
  std::vector<c10::IValue> values_;
  size_t tensor_ = 0, value_ = 0;
  int lifted_ = 0;
};

}  // namespace detail

/// An operator that is described by a struct D. D has
///   kName
///   Inputs         the arguments, those that are differentiated first
///   Upstream       the gradients of the first results; absent ones are zeros, unless one of them is optional
///   Saved          what the graph keeps for backward, besides Options
///   Gradients<T>   one T per gradient
///   forward(...)   returns all results: a tensor, or a struct of them
///   save(const Inputs&, const Results&), or with const Options& last
///   backward(...)  returns Gradients<Tensor>, or the tensor where there is one; undefined where not wanted
/// forward takes any of (Inputs, Record, Options), and backward any of (Upstream, Saved, Gradients<bool>, Options); the
/// flags say which gradients are wanted. The order of their parameters is that of their schemas. There are three
/// schemas: <name>, <name>_forward and <name>_backward. Optional are
///   Options               arguments with defaults, which come last
///   kResults              how many of forward's results the operator returns, if more than Upstream has
///   kGradientOf           for each of the first inputs, the index of its gradient; −1: none
///   kAutocast             with Autocast::Cast also uncast(Inputs&): references to the tensors that stay
///   kDifferentiableTwice  a second derivative is not refused
///   start, finish         forward in two parts: all but the first results, which are only allocated, and
///                         finish(const Inputs&, Results&), or with const Options& last, which computes those
/// Of a forward in two parts, the graph's node keeps what it keeps before `finish` runs: where gradient checkpointing
/// runs a layer again for what its nodes keep, and this operator is its last, it stops there.
///   record(Inputs&, Options&, const Gradients<bool>&)
///                         returns Record, what forward is told about backward; in inference, nothing is wanted
///   differentiate(...)    takes what backward may take; replaces the node's call of <name>_backward
///   last_backward(...)    as backward, of plain tensors of a graph that is run no more: it may overwrite what forward
///                         made and the graph alone has
template <class D>
class Operator {
 public:
  using Inputs = typename D::Inputs;
  using Options = typename detail::OptionsOf<D>::Type;
  using Upstream = typename D::Upstream;
  using Saved = typename D::Saved;
  using Gradients = typename D::template Gradients<Tensor>;
  using Wanted = typename D::template Gradients<bool>;
  using Results = typename Flat<&D::forward>::Result;

 private:
  static constexpr size_t kUpstream = kLeaves<Upstream>, kResults = [] {
    if constexpr (requires { D::kResults; }) return size_t(D::kResults);
    else return kUpstream;
  }();
  static constexpr auto kGradientOf = [] {
    if constexpr (requires { D::kGradientOf; }) {
      return D::kGradientOf;
    } else {
      std::array<int, kLeaves<Gradients>> each{};
      for (size_t i = 0; i < each.size(); ++i) each[i] = int(i);
      return each;
    }
  }();

  static constexpr bool kInTwoParts = requires { &D::finish; };
  /// Where nobody is to see the operator below autograd as one call.
  static bool in_two_parts(const Inputs& in) {
    return kInTwoParts && is_plain(first_tensor(leaves(in))) && !c10::impl::TorchDispatchModeTLS::any_modes_set();
  }

  /// Whether nobody but autograd looks at what is done to the tensors of some structs: a node then calls the functions
  /// below it as they are, without the dispatcher.
  template <class... S>
  static bool unseen(const S&... structs) {
    const auto plain = []<class T>(const T& leaf) {
      if constexpr (std::is_same_v<T, Tensor>) return !leaf.defined() || is_plain(leaf);
      else if constexpr (std::is_same_v<T, OptTensor>) return !leaf || is_plain(*leaf);
      else return !detail::is_optional_struct<T>;
    };
    return leaves(structs...).apply([&](const auto&... leaf) { return (plain(leaf) && ...); }) &&
           !c10::impl::TorchDispatchModeTLS::any_modes_set();
  }

  static auto record(Inputs& in, Options& options, const Wanted& wanted) {
    if constexpr (requires { D::record(in, options, wanted); }) return D::record(in, options, wanted);
    else return NoFields{};
  }

  static Wanted wants(const Inputs& in) {
    Wanted wanted{};
    for_each_index<kGradientOf.size()>([&](auto i) {
      if constexpr (constexpr int k = kGradientOf[i]; k >= 0)
        get<size_t(k)>(leaves(wanted)) |= wants_grad(get<i>(leaves(in)));
    });
    return wanted;
  }

  template <class L>
  struct Of;
  /// The functions of the operator's flat arguments.
  template <class... L>
  struct Of<Refs<L...>> {
    using Public = decltype(first_results<kResults>(std::declval<Results&>()));

    static Public kernel(typename Argument<L>::Type... args) {
      auto [in, options] = structs(args...);
      const auto of_record = record(in, options, Wanted{});
      const auto given = std::tie(std::as_const(in), of_record, std::as_const(options));
      Results all = complete(call_as<&D::forward>(&D::forward, given), first_tensor(leaves(in)));
      return first_results<kResults>(all);
    }

    /// The operator below autograd, or the graph's node where an input that has a gradient is to be differentiated. A
    /// tangent of forward-mode differentiation is refused.
    static Public differentiated(typename Argument<L>::Type... args) {
      TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(args) || ...), public_op_name(), " has no forward-mode derivative");
      if (!at::GradMode::is_enabled() || !any_wants_grad(std::index_sequence_for<L...>(), args...)) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        return public_op(args...);
      }
      check_no_transform(public_op_name());
      Results all;
      const auto recorded = apply(std::index_sequence_for<L...>(), &all, args...);
      if constexpr (kInTwoParts) {
        const auto [in, options] = structs(args...);
        if (in_two_parts(in)) {
          const at::AutoDispatchBelowADInplaceOrView below_autograd;
          if constexpr (requires { D::finish(in, all, options); }) D::finish(in, all, options);
          else D::finish(in, all);
        }
      }
      for_each_index<kUpstream>([&](auto i) {
        if constexpr (kUpstream == 1) get<i>(leaves(all)) = recorded;
        else get<i>(leaves(all)) = recorded[i];
      });
      return first_results<kResults>(all);
    }

    template <c10::DeviceType kDevice>
    static Public autocast(typename Argument<L>::Type... args) {
      const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
      const auto dtype = at::autocast::get_autocast_dtype(kDevice);
      auto [in, options] = structs(args...);
      if constexpr (D::kAutocast == Autocast::Compute) {
        if (!in.dtype) in.dtype = dtype;
      } else {
        const auto stays = [&](const auto& t) {
          if constexpr (requires { D::uncast(in); })
            return D::uncast(in).apply([&](auto&... of) { return ((static_cast<const void*>(&of) == &t) || ...); });
          else return false;
        };
        for_each_index<kLeaves<Inputs>>([&](auto i) {
          auto& t = get<i>(leaves(in));
          if constexpr (is_tensor<std::remove_cvref_t<decltype(t)>>)
            if (!stays(t)) t = at::autocast::cached_cast(dtype, t, kDevice);
        });
      }
      return public_op(in, options);
    }

   private:
    static std::tuple<Inputs, Options> structs(const std::remove_cvref_t<typename Argument<L>::Type>&... args) {
      std::tuple<Inputs, Options> both;
      set_fields(leaves(std::get<0>(both), std::get<1>(both)), args...);
      return both;
    }
    template <size_t... i, class... A>
    static bool any_wants_grad(std::index_sequence<i...>, const A&... args) {
      return ((i < kGradientOf.size() && wants_grad(args)) || ...);
    }
    template <size_t... i, class... A>
    static auto apply(std::index_sequence<i...>, Results* all, const A&... args) {
      return Node::apply(detached<(i >= kGradientOf.size())>(args)..., all);
    }
    /// The node does not see that an input without a gradient could have one.
    template <bool kDetach, class T>
    static T detached(const T& t) {
      if constexpr (kDetach && std::is_same_v<T, Tensor>) {
        if (wants_grad(t)) return t.detach();
      } else if constexpr (kDetach && std::is_same_v<T, OptTensor>) {
        if (wants_grad(t)) return t->detach();
      }
      return t;
    }
    template <class T>
    static bool has_tangent(const T& t) {
      if constexpr (is_tensor<T>) return torch::autograd::isFwGradDefined(t);
      else return false;
    }

    struct Node : torch::autograd::Function<Node> {
      static auto forward(AutogradContext* ctx, const std::remove_cvref_t<typename Argument<L>::Type>&... args,
                          Results* all) {
        auto [in, options] = structs(args...);
        Wanted wanted = wants(in);
        const auto of_record = record(in, options, wanted);
        const at::AutoDispatchBelowADInplaceOrView below_autograd;  // which would look at each tensor for nothing
        if (in_two_parts(in)) {
          if constexpr (kInTwoParts) {
            const auto given = std::tie(std::as_const(in), std::as_const(options));
            *all = complete(call_as<&D::start>(&D::start, given), first_tensor(leaves(in)));
          }
        } else {
          const auto given = std::tie(std::as_const(in), of_record, std::as_const(options));
          if (unseen(std::as_const(in)))
            *all = complete(call_as<&D::forward>(&D::forward, given), first_tensor(leaves(in)));
          else *all = as_fields<Results>(call_as<&D::forward>(forward_op, given));
        }
        Saved saved = [&]() -> Saved {
          if constexpr (requires { D::save(std::as_const(in), *all, options); }) {
            return D::save(std::as_const(in), *all, options);
          } else {
            return D::save(std::as_const(in), *all);
          }
        }();
        if constexpr (kLeaves<Wanted> > 1) detail::State::save(ctx, saved, options, wanted);
        else detail::State::save(ctx, saved, options);  // the node is there because its one gradient is wanted
        if constexpr (kMayBeAbsent) ctx->set_materialize_grads(false);
        return [&]<size_t... i>(std::index_sequence<i...>) {
          if constexpr (kUpstream == 1) return Tensor(get<0>(leaves(*all)));
          else return variable_list{get<i>(leaves(*all))...};
        }(std::make_index_sequence<kUpstream>());
      }

      static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
        Upstream g;
        Saved saved;
        Options options;
        Wanted wanted;
        if constexpr (kLeaves<Wanted> > 1) detail::State::load(ctx, saved, options, wanted);
        else get<0>(leaves(wanted)) = true, detail::State::load(ctx, saved, options);
        for_each_index<kUpstream>([&](auto i) {
          auto& d = get<i>(leaves(g));
          if constexpr (std::is_same_v<std::remove_cvref_t<decltype(d)>, OptTensor>) d = optional(upstream[i]);
          else d = upstream[i];
        });
        const auto given =
            std::tie(std::as_const(g), std::as_const(saved), std::as_const(wanted), std::as_const(options));
        const Gradients gradients = [&] {
          std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
          if (!at::GradMode::is_enabled()) below_autograd.emplace();
          if constexpr (requires { &D::differentiate; }) {
            return call_as<&D::differentiate>(&D::differentiate, given);
          } else {
            if (below_autograd && unseen(std::as_const(g), std::as_const(saved))) {
              if constexpr (requires { &D::last_backward; })
                if (!torch::autograd::get_current_graph_task_keep_graph())
                  return as_gradients(call_as<&D::last_backward>(&D::last_backward, given));
              return as_gradients(call_as<&D::backward>(&D::backward, given));
            }
            return as_fields<Gradients>(call_as<&D::backward>(backward_op, given));
          }
        }();
        variable_list of_inputs(sizeof...(L) + 1);
        for_each_index<kGradientOf.size()>([&](auto i) {
          if constexpr (constexpr int k = kGradientOf[i]; k >= 0)
            if (get<size_t(k)>(leaves(wanted))) of_inputs[i] = get<size_t(k)>(leaves(gradients));
        });
        if constexpr (requires { D::kDifferentiableTwice; }) return of_inputs;
        else return refuse_second_derivative(public_op_name(), upstream, std::move(of_inputs));
      }

     private:
      static Gradients as_gradients(Gradients gradients) { return gradients; }
      template <class T>
        requires(std::is_same_v<T, Tensor> && !std::is_same_v<Gradients, Tensor>)
      static Gradients as_gradients(T gradient) {
        return as_fields<Gradients>(std::move(gradient));
      }

      static constexpr bool kMayBeAbsent = []<class... T>(std::type_identity<Refs<T...>>) {
        return (std::is_same_v<T, OptTensor> || ...);
      }(std::type_identity<Leaves<Upstream>>());
    };
  };
  using Functions = Of<Leaves<Inputs, Options>>;

  static constexpr auto kQualified = qualified(D::kName, "");
  static const char* public_op_name() { return kQualified.text; }

 public:
  static constexpr Op<kQualified, &Functions::kernel> public_op{};
  static constexpr Op<qualified(D::kName, "_forward"), Flat<&D::forward>::call> forward_op{};
  static constexpr auto backward_op = [] {
    if constexpr (requires { &D::backward; }) return Op<qualified(D::kName, "_backward"), Flat<&D::backward>::call>{};
    else return nullptr;
  }();

  static void describe(Registrar& r) {
    const std::string name = D::kName.text;
    auto results = result_names<Results>();
    results.resize(kResults);
    const auto schema = schema_text(D::kName.text, argument_names<Inputs, Options>(), results);
    if constexpr (requires { D::kAutocast; })
      r.add(schema, &Functions::kernel, &Functions::differentiated,
            &Functions::template autocast<c10::DeviceType::CUDA>, &Functions::template autocast<c10::DeviceType::CPU>);
    else r.add(schema, &Functions::kernel, &Functions::differentiated);
    r.add(Flat<&D::forward>::schema(name + "_forward"), Flat<&D::forward>::call);
    if constexpr (requires { &D::backward; })
      r.add(Flat<&D::backward>::schema(name + "_backward"), Flat<&D::backward>::call);
  }
};

/// Whether any of Gradients<bool> is wanted.
template <class G>
bool any(const G& wanted) {
  return wanted.fields().apply([](const auto&... flag) { return (flag || ...); });
}

/// What most operators have: one result y, and the gradient of one input.
struct Dy {
  Tensor dy;
  LIGER_FIELDS(dy)
};
template <class T>
struct Dx {
  T dx;
  LIGER_FIELDS(dx)
};

}  // namespace liger
