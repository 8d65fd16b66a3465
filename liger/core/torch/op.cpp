#include "liger/core/torch/operator.h"

#include <ATen/FuncTorchTLS.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace liger {

void check_no_transform(const char* name) {
  const auto& functorch = at::functorch::functorchTLSAccessor();
  if (!functorch) return;
  try {
    functorch->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, name,
                                " has no derivative under transforms of torch.func (grad, vjp, jacrev, vmap of these)");
  }
}

Tensor output(Tensor t) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  if (t.is_cpu() && t.key_set().has_backend(c10::BackendComponent::CPUBit) && t.nbytes() >= 4 * kPage &&
      t.has_storage()) {
    const auto first = reinterpret_cast<uintptr_t>(t.data_ptr()), begin = round_up(first, kPage);
    const auto end = (first + t.nbytes()) / kPage * kPage;
    // A hint: refusal is no error.
    madvise(static_cast<char*>(t.data_ptr()) + (begin - first), end - begin, MADV_HUGEPAGE);
  }
#endif
  return t;
}

Rows::Rows(const Tensor& t) : tensor(t), stride(cols(t)) {
  if (t.is_contiguous()) return;
  bool one_stride = t.dim() > 1 && t.stride(-1) == 1 && t.stride(-2) >= cols(t);
  for (int64_t d = t.dim() - 2; d > 0; --d) one_stride &= t.stride(d - 1) == t.stride(d) * t.size(d);
  if (one_stride) stride = t.stride(-2);
  else tensor = t.contiguous();
}

int64_t partial_count(const Tensor& x, int64_t groups, int64_t rows, int64_t cols) {
  int64_t count;
  run(row_partials, x, {.device = x.device().index(), .groups = groups, .rows = rows, .cols = cols, .count = &count});
  return count;
}

int64_t partial_count(const Tensor& x, int64_t groups) { return partial_count(x, groups, rows(x) / groups, cols(x)); }

int64_t element_partial_count(const Tensor& x) {
  constexpr int64_t kRow = 1024;  // elements that stand for a row
  return partial_count(x, 1, ceil_div(x.numel(), kRow), kRow);
}

Tensor empty_partials(const Tensor& x, int64_t partials, int64_t cols) {
  return at::empty({1, partials, cols}, x.options().dtype(at::kFloat));
}

Tensor Totals::of(const Tensor& partials, const Tensor& like, const Tensor& factor, double plus) {
  const Tensor out = at::empty(like.sizes(), partials.options().dtype(like.scalar_type()));
  const int64_t count = partials.size(0) * partials.size(1);
  TORCH_INTERNAL_ASSERT(args_.count < AddPartials::kMost);
  args_.sums[args_.count++] = {.part = data<float>(partials),
                               .factor = numbers(factor),
                               .out = out.data_ptr(),
                               .groups = partials.size(0),
                               .partials = partials.size(1),
                               .cols = partials.size(2),
                               .per_factor = factor.defined() ? count / rows(factor) : count,
                               .plus = float(plus),
                               .dtype = dtype_of(out)};
  first_ = partials;
  return out;
}

void Totals::run() {
  if (args_.count > 0) liger::run(add_partials, first_, args_);
}

void project(Tensor out, const Tensor& x, const Tensor& w, const Tensor& bias) {
  if (out.scalar_type() != x.scalar_type()) {
    at::mm_out(out, x, w.t(), out.scalar_type());
    if (bias.defined()) out.add_(bias);
  } else if (bias.defined()) {
    at::addmm_out(out, bias, x, w.t());
  } else {
    at::mm_out(out, x, w.t());
  }
}

void accumulate(Tensor& sum, const Tensor& a, const Tensor& b, bool first) {
  if (sum.scalar_type() != a.scalar_type() && a.is_cpu())
    return accumulate(sum, a.to(sum.scalar_type()), b.to(sum.scalar_type()), first);
  if (sum.scalar_type() == a.scalar_type()) first ? at::mm_out(sum, a.t(), b) : at::addmm_out(sum, sum, a.t(), b);
  else first ? at::mm_out(sum, a.t(), b, sum.scalar_type()) : at::addmm_out(sum, sum, a.t(), b, sum.scalar_type());
}

namespace {

struct ScaleInputs {
  Tensor saved, g;
  LIGER_FIELDS(saved, g)
};

void check_scale(const ScaleInputs& in) {
  Arguments("scale_backward", "saved", in.saved)
      .count("g", in.g, in.g.dim() > 0 ? sym_rows(in.saved) : 1, Type::Number);
}

void scale_backward_(const ScaleInputs& in) {
  check_scale(in);
  const auto& [saved, g] = in;
  if (saved.is_meta() || saved.numel() == 0) return;
  const Tensor factor = (has_dtype(g.scalar_type()) ? g : g.to(at::kFloat)).contiguous();
  run(scale_rows, saved,
      {.x = saved.data_ptr(),
       .g = numbers(factor),
       .rows = rows(saved),
       .cols = cols(saved),
       .per_row = g.dim() > 0,
       .dtype = dtype_of(saved)});
}

/// Not ATen's product, which takes a g of no dimensions in the type of a float16 `saved`: there it may be 0.
Tensor scale_backward(const ScaleInputs& in) {
  Tensor out = in.saved.clone(at::MemoryFormat::Contiguous);
  scale_backward_({out, in.g});
  return out;
}

using ScaleBackward = Undifferentiated<"scale_backward", scale_backward>;
using ScaleBackwardInPlace = Undifferentiated<"scale_backward_", scale_backward_, "saved(a!)">;

}  // namespace

bool is_plain(const Tensor& t) {
  const auto keys = t.key_set() - c10::autograd_dispatch_keyset - c10::autocast_dispatch_keyset -
                    c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
  return keys.highestFunctionalityKey() == c10::DispatchKey::Dense && !t.is_meta();
}

Tensor scaled(const Tensor& saved, const Tensor& g) {
  if (!saved.defined() || saved.sym_numel() == 0) return saved;
  if (torch::autograd::get_current_graph_task_keep_graph() || !is_plain(saved) || !is_plain(g) ||
      !saved.is_contiguous())
    return ScaleBackward::op(saved, g);
  ScaleBackwardInPlace::op(saved, g);
  return saved;
}

LIGER_OPERATORS(scale, ScaleBackward, ScaleBackwardInPlace)

namespace {

struct NoSecondDerivative : torch::autograd::Node {
  NoSecondDerivative(std::string op, torch::autograd::edge_list&& edges) : Node(std::move(edges)), op(std::move(op)) {}
  variable_list apply(variable_list&&) override { TORCH_CHECK_NOT_IMPLEMENTED(false, op, " has no second derivative"); }
  std::string op;
};

/// A node's owner: a std::shared_ptr until torch 2.12, a c10::intrusive_ptr from then on.
template <class Pointer>
Pointer make_node(torch::autograd::Node* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) return Pointer(node);
  else return Pointer::unsafe_steal_from_new(node);
}

}  // namespace

variable_list refuse_second_derivative(const char* op, const variable_list& upstream, variable_list gradients) {
  const auto node = torch::autograd::get_current_node();
  if (!at::GradMode::is_enabled() || !node) return gradients;
  auto edges = node->next_edges();
  for (const Tensor& g : upstream)
    if (wants_grad(g)) edges.push_back(torch::autograd::impl::gradient_edge(g));
  const auto refusal =
      make_node<decltype(torch::autograd::get_current_node())>(new NoSecondDerivative(op, std::move(edges)));
  for (Tensor& d : gradients) {
    if (!d.defined()) continue;
    d = d.detach();
    torch::autograd::set_history(d, refusal);
  }
  return gradients;
}

namespace {

std::string listed(c10::SymIntArrayRef shape) {
  std::ostringstream out;
  out << shape;
  return out.str();
}

bool accepts(Type type, at::ScalarType t, at::ScalarType first) {
  switch (type) {
    case Type::Same: return t == first;
    case Type::SameOrFloat: return t == first || t == at::kFloat;
    case Type::Float: return t == at::kFloat;
    case Type::Kernels: return has_dtype(t);
    case Type::Floating: return at::isFloatingType(t);
    case Type::Bool: return t == at::kBool;
    case Type::EightBit: return t == at::kChar || t == at::kByte;
    case Type::Integer: return at::isIntegralType(t, false);
    case Type::Number: return at::isFloatingType(t) || at::isIntegralType(t, false);
  }
  return false;
}

/// As Python calls it.
std::string named(at::ScalarType t) {
  switch (t) {
    case at::kFloat: return "float32";
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kDouble: return "float64";
    case at::kLong: return "int64";
    case at::kInt: return "int32";
    case at::kBool: return "bool";
    default: return c10::toString(t);
  }
}

std::string described(Type type, at::ScalarType first) {
  std::string same = named(first);
  switch (type) {
    case Type::Same: return same;
    case Type::SameOrFloat: return first == at::kFloat ? same : same + " or float32";
    case Type::Float: return "float32";
    case Type::Kernels: return "float32, float16 or bfloat16";
    case Type::Floating: return "a floating-point type";
    case Type::Bool: return "bool";
    case Type::EightBit: return "int8 or uint8";
    case Type::Integer: return "an integer type";
    case Type::Number: return "a real type";
  }
  return {};
}

}  // namespace

Arguments::Arguments(const char* op, const char* name, const Tensor& x, Type type) : op_(op), x_(x) {
  if (!accepts(type, x.scalar_type(), x.scalar_type())) refuse(name, x, "a tensor", type, true);
  TORCH_CHECK(x.dim() >= 1, op, ": ", name, " must have at least one dimension, got a scalar");
}

void Arguments::refuse(const char* name, const Tensor& t, const std::string& expected, Type type,
                       bool wrong_type) const {
  const auto text =
      c10::str(op_, ": ", name, " must be ", expected, " of ", described(type, x_.scalar_type()), " on ", x_.device(),
               ", got ", listed(t.sym_sizes()), " of ", named(t.scalar_type()), " on ", t.device());
  TORCH_CHECK_TYPE(!wrong_type, text);
  TORCH_CHECK(false, text);
}

const Arguments& Arguments::shaped(const char* name, const Tensor& t, c10::SymIntArrayRef shape, Type type) const {
  const bool wrong_type = !accepts(type, t.scalar_type(), x_.scalar_type());
  if (wrong_type || t.device() != x_.device() || t.sym_sizes() != shape)
    refuse(name, t, listed(shape), type, wrong_type);
  return *this;
}

const Arguments& Arguments::count(const char* name, const Tensor& t, const c10::SymInt& n, Type type) const {
  const bool wrong_type = !accepts(type, t.scalar_type(), x_.scalar_type());
  if (wrong_type || t.device() != x_.device() || t.sym_numel() != n)
    refuse(name, t, n == 1 ? "one number" : c10::str(n, " numbers"), type, wrong_type);
  return *this;
}

const Arguments& Arguments::any(const char* name, const Tensor& t, Type type) const {
  const bool wrong_type = !accepts(type, t.scalar_type(), x_.scalar_type());
  if (wrong_type || t.device() != x_.device()) refuse(name, t, "a tensor", type, wrong_type);
  return *this;
}

const Arguments& Arguments::present(const char* wanted, bool flag, const char* name, const OptTensor& t) const {
  TORCH_CHECK(!flag || (t && t->defined()), op_, ": ", wanted, " asks for the gradient of ", name,
              ", which is not given");
  return *this;
}

std::vector<std::string> split_names(const char* names) {
  std::istringstream list(names);
  std::vector<std::string> all;
  for (std::string name; std::getline(list >> std::ws, name, ',');) {
    std::replace(name.begin(), name.end(), '.', '_');
    all.push_back(name);
  }
  return all;
}

std::string schema_text(const std::string& name, const std::vector<std::string>& arguments,
                        const std::vector<std::string>& results) {
  const auto listed = [](const std::vector<std::string>& parts) {
    std::string text;
    for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
    return "(" + text + ")";
  };
  return name + listed(arguments) + " -> " + (results.size() == 1 ? "Tensor" : listed(results));
}

std::string with_writes(std::string schema, const char* writes) {
  std::istringstream list(writes);
  for (std::string written; list >> written;) {
    const size_t mark = written.find('('), name = schema.find(" " + written.substr(0, mark));
    schema.insert(schema.rfind("Tensor", name) + std::string_view("Tensor").size(), written.substr(mark));
  }
  return schema;
}

}  // namespace liger
