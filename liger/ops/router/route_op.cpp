#include "liger/ops/router/route.h"
#include "liger/core/torch/operator.h"
#include "liger/functions/router.h"

namespace liger {
namespace op {

struct Route {
  static constexpr Name kName = "route";
  using Options = RouteOptions;
  struct Inputs {
    Tensor logits;
    OptTensor bias, index;
    int64_t top_k;
    LIGER_FIELDS(logits, bias, index, top_k)
  };
  struct Results {
    Tensor weights, index, counts;
    LIGER_FIELDS(weights, index, counts)
  };
  struct Upstream {
    Tensor dweights;
    LIGER_FIELDS(dweights)
  };
  struct Saved {
    Tensor logits, index;
    LIGER_FIELDS(logits, index)
  };
  template <class T>
  struct Gradients {
    T dlogits;
    LIGER_FIELDS(dlogits)
  };
  static constexpr int kResults = 3;

  static RouterForm form(const char* op, const Options& o) {
    TORCH_CHECK_VALUE(o.score >= RouterScore::Softmax && o.score <= RouterScore::SqrtSoftplus, op,
                      ": score is 0 (softmax), 1 (sigmoid) or 2 (square root of softplus), not ", int64_t(o.score));
    TORCH_CHECK_VALUE(o.epsilon >= 0 && o.least_sum >= 0, op, ": epsilon and least_sum must not be negative, got ",
                      o.epsilon, " and ", o.least_sum);
    return {.score = o.score,
            .normalise = o.normalise,
            .epsilon = float(o.epsilon),
            .least_sum = float(o.least_sum),
            .scale = float(o.scale)};
  }

  static void check(const char* op, const Inputs& in, const Options& o) {
    c10::SymDimVector chosen(in.logits.sym_sizes());
    if (!chosen.empty()) chosen.back() = in.top_k;
    Arguments(op, "logits", in.logits)
        .shaped("bias", in.bias, {in.logits.sym_sizes().slice(in.logits.dim() - 1)}, Type::Floating)
        .shaped("index", in.index, chosen, Type::Integer);
    const int64_t experts = in.logits.sym_size(-1).guard_int(__FILE__, __LINE__);
    TORCH_CHECK_VALUE(o.groups >= 1 && o.groups <= RouteForward::kMostGroups && experts % o.groups == 0, op,
                      ": groups must divide the ", experts, " experts of logits and be ", RouteForward::kMostGroups,
                      " at most, got ", o.groups);
    TORCH_CHECK_VALUE(o.kept_groups >= 1 && o.kept_groups <= o.groups, op, ": kept_groups must be 1 to groups (",
                      o.groups, "), got ", o.kept_groups);
    const int64_t size = experts / o.groups;
    TORCH_CHECK_VALUE(o.groups == 1 || o.group_best == 1 || (o.group_best == 2 && size >= 2), op,
                      ": group_best must be 1, or 2 of groups of at least two experts, got ", o.group_best);
    TORCH_CHECK_VALUE(in.top_k >= 1 && in.top_k <= size * o.kept_groups, op, ": top_k must be 1 to ",
                      size * o.kept_groups, ", the experts that take part, got ", in.top_k);
  }

  /// `index` as it is, or as int64 where it has a width that GivenExperts does not read.
  static Tensor readable(const Tensor& index) {
    const auto type = index.scalar_type();
    return type == at::kUInt32 || type == at::kUInt64 ? index.to(at::kLong) : index;
  }

  static Results forward(const Inputs& in, const Options& o) {
    check(kName.text, in, o);
    const RouterForm form = Route::form(kName.text, o);
    const at::ScalarType dtype = o.dtype.value_or(at::kFloat);
    TORCH_CHECK_TYPE(has_dtype(dtype), kName.text, ": dtype must be float32, float16 or bfloat16, got ", dtype);
    c10::SymDimVector chosen(in.logits.sym_sizes());
    chosen.back() = in.top_k;
    const auto& options = in.logits.options();
    Results out{at::empty_symint(chosen, options.dtype(dtype)), at::empty_symint(chosen, options.dtype(at::kLong)),
                at::empty_symint({in.logits.sym_size(-1)}, options.dtype(at::kInt))};
    if (in.logits.is_meta()) return out;
    if (in.logits.numel() == 0) return out.counts.zero_(), out;
    const Rows z(in.logits);
    const Tensor bias = in.bias ? in.bias->to(at::kFloat).contiguous() : Tensor();
    std::optional<Rows> given;
    if (in.index) given.emplace(readable(*in.index));
    run(route_forward, in.logits,
        {.z = data(z.tensor),
         .bias = data<float>(bias),
         .given = given ? GivenExperts{.of = data(given->tensor),
                                       .stride = given->stride,
                                       .bytes = int8_t(given->tensor.element_size()),
                                       .is_signed = at::isSignedType(given->tensor.scalar_type())}
                        : GivenExperts{},
         .weights = out.weights.data_ptr(),
         .index = data<int64_t>(out.index),
         .counts = data<int>(out.counts),
         .tokens = rows(in.logits),
         .experts = cols(in.logits),
         .k = in.top_k,
         .stride = z.stride,
         .groups = o.groups,
         .kept_groups = o.kept_groups,
         .group_best = o.group_best,
         .dtype = dtype_of(in.logits),
         .weights_dtype = dtype_of(out.weights),
         .form = form});
    return out;
  }

  static Saved save(const Inputs& in, const Results& out) { return {in.logits, out.index}; }

  static Tensor backward(const Upstream& up, const Saved& s, const Options& o) {
    constexpr const char* kOp = "route_backward";
    Arguments(kOp, "logits", s.logits)
        .shaped("dweights", up.dweights, s.index.sym_sizes(), Type::Floating)
        .count("index", s.index, sym_rows(s.logits) * s.index.sym_size(-1), Type::Integer);
    const RouterForm form = Route::form(kOp, o);
    const Tensor dz = output(at::empty_symint(s.logits.sym_sizes(), s.logits.options()));
    if (dz.is_meta() || dz.numel() == 0) return dz;
    const Rows z(s.logits);
    const Tensor index = s.index.to(at::kLong).contiguous(),
                 dweights =
                     (has_dtype(up.dweights.scalar_type()) ? up.dweights : up.dweights.to(at::kFloat)).contiguous();
    run(route_backward, dz,
        {.z = data(z.tensor),
         .index = data<int64_t>(index),
         .dweights = numbers(dweights),
         .dz = dz.data_ptr(),
         .tokens = rows(dz),
         .experts = cols(dz),
         .k = index.size(-1),
         .stride = z.stride,
         .dtype = dtype_of(dz),
         .form = form});
    return dz;
  }
};

}  // namespace op

Routed route(const Tensor& logits, int64_t top_k, const RouteOptions& options, const OptTensor& bias,
             const OptTensor& given) {
  const auto [weights, index, counts] = Operator<op::Route>::public_op(logits, bias, given, top_k, options);
  return {weights, index, counts};
}

LIGER_OPERATORS(route, Operator<op::Route>)

}  // namespace liger
