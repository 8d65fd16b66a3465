#include "liger/ops/rope/rope_op.h"
#include "liger/functions/rope.h"

namespace liger {
namespace op::rope {

int64_t rotated_columns(const Tensor& cos, bool interleaved, int64_t asked) {
  return asked >= 0 ? asked : cos.size(-1) * (interleaved ? 2 : 1);
}

void check_tables(const char* op, const Arguments& arguments, const Tensor& cos, const Tensor& sin,
                  const c10::SymInt& batch, const c10::SymInt& seq, const c10::SymInt& dim, bool interleaved,
                  at::IntArrayRef sections, int64_t rotary_dim) {
  arguments.any("cos", cos, Type::Kernels).shaped("sin", sin, cos.sym_sizes(), Type::Kernels);
  const bool planes = !sections.empty(),
             batched = cos.dim() >= 3 && (cos.sym_size(-3) == 1 || cos.sym_size(-3) == batch);
  TORCH_CHECK(
      (planes ? cos.dim() == 4 && cos.size(0) == 3 && batched : cos.dim() == 2 || (cos.dim() == 3 && batched)) &&
          cos.sym_size(-2) == seq,
      op, ": cos and sin must be ", planes ? "[3, batch, seq, d]" : "[seq, d], [1, seq, d] or [batch, seq, d]",
      " with batch ", batch, " and seq ", seq, ", got ", cos.sym_sizes());
  const c10::SymInt given = cos.sym_size(-1),
                    width = rotary_dim >= 0 ? c10::SymInt(rotary_dim) : given * (interleaved ? 2 : 1);
  TORCH_CHECK(width <= dim && width % 2 == 0, op, ": the columns that are rotated must be an even number of the ", dim,
              " of a head, got ", width);
  TORCH_CHECK(given * 2 == width || (given == width && !interleaved), op, ": cos and sin must have ",
              interleaved ? "half of " : "all or half of ", "the ", width, " columns that are rotated, got ", given);
  if (!planes) return;
  TORCH_CHECK_VALUE(!interleaved, op, ": sections are of halves, not of interleaved pairs");
  TORCH_CHECK_VALUE(sections.size() == 3 && std::min({sections[0], sections[1], sections[2]}) >= 0 &&
                        width / 2 == sections[0] + sections[1] + sections[2],
                    op, ": sections must be 3 numbers whose sum is ", width / 2, ", got ", sections);
}

void check(const char* op, const Arguments& arguments, const Tensor& q, const Tensor& k, const Tensor& cos,
           const Tensor& sin, bool interleaved, at::IntArrayRef sections, int64_t rotary_dim) {
  arguments.any("k", k, Type::Same);
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4, op, ": q and k must be [batch, heads, seq, dim], got ", q.sym_sizes(),
              " and ", k.sym_sizes());
  TORCH_CHECK(q.sym_size(0) == k.sym_size(0) && q.sym_size(2) == k.sym_size(2) && q.sym_size(3) == k.sym_size(3), op,
              ": q and k differ in more than heads: ", q.sym_sizes(), " and ", k.sym_sizes());
  check_tables(op, arguments, cos, sin, q.sym_size(0), q.sym_size(2), q.sym_size(3), interleaved, sections, rotary_dim);
}

Tensor empty_heads(const Tensor& t) {
  return output(at::empty_symint({t.sym_size(0), t.sym_size(2), t.sym_size(1), t.sym_size(3)}, t.options()))
      .transpose(1, 2);
}

Tensor with_unit_stride(const Tensor& t) { return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous(); }

Tensor table_like(const Tensor& table, const Tensor& x) {
  return table.scalar_type() == x.scalar_type() ? table : table.to(at::kFloat);
}

RopeTensor describe(const Tensor& in, const Tensor& out) {
  const auto strides = [](const Tensor& t) { return RopeTensor::Strides{t.stride(0), t.stride(1), t.stride(2)}; };
  return {.in = data(in),
          .out = out.data_ptr(),
          .heads = in.size(1),
          .in_strides = strides(in),
          .out_strides = strides(out)};
}

/// cos and sin as the real and imaginary parts of one tensor of complex numbers; a copy only where they are not that
/// already.
std::tuple<Tensor, Tensor> as_complex(const Tensor& cos, const Tensor& sin) {
  const bool joined = cos.stride(-1) == 2 && cos.strides() == sin.strides() && cos.stride(-2) >= 2 * cos.size(-1) &&
                      static_cast<const char*>(data(sin)) == static_cast<const char*>(data(cos)) + cos.element_size();
  if (joined) return {cos, sin};
  auto shape = cos.sizes().vec();
  shape.push_back(2);
  const Tensor both = at::empty(shape, cos.options()), re = both.select(-1, 0), im = both.select(-1, 1);
  re.copy_(cos), im.copy_(sin);  // at::stack would follow autocast, which refuses the other type of 16 bits
  return {re, im};
}

void rotate(const RopeTensor& q, const RopeTensor& k, const RopeTensor& v, const Tensor& x, const Tensor& cos_,
            const Tensor& sin_, bool inverse, bool interleaved, at::IntArrayRef sections, int64_t rotary_dim) {
  const auto table = [&](const Tensor& t) { return table_like(t, x); };
  const auto [cos, sin] = interleaved ? as_complex(table(cos_), table(sin_))
                                      : std::make_tuple(table(cos_).contiguous(), table(sin_).contiguous());
  const int64_t rotary = rotated_columns(cos, interleaved, rotary_dim), half = rotary / 2;
  const bool planes = !sections.empty();
  run(rope_kernel, x,
      {.q = q,
       .k = k,
       .v = v,
       .cos = data(cos),
       .sin = data(sin),
       .table_plane_stride = planes ? cos.stride(0) : 0,
       .table_batch_stride = cos.dim() >= 3 && cos.size(-3) > 1 ? cos.stride(-3) : 0,
       .table_seq_stride = cos.stride(-2),
       .batch = x.size(0),
       .seq = x.size(2),
       .dim = x.size(3),
       .rotary = rotary,
       .section_ends = {planes ? sections[0] : half, planes ? sections[0] + sections[1] : half},
       .pairs = planes        ? RopePairs::Sections
                : interleaved ? RopePairs::Interleaved
                              : RopePairs::Halves,
       .dtype = dtype_of(x),
       .table_dtype = dtype_of(cos),
       .direction = inverse ? -1.f : 1.f});
}

}  // namespace op::rope

namespace op {

/// The rotation is linear: its gradient is the rotation back, differentiable in turn.
struct Rope {
  static constexpr Name kName = "rope";
  static constexpr bool kDifferentiableTwice = true;
  struct Inputs {
    Tensor q, k, cos, sin;
    bool inverse;
    LIGER_FIELDS(q, k, cos, sin, inverse)
  };
  struct Options {
    bool interleaved = false;
    Ints sections;
    int64_t rotary_dim = -1;
    LIGER_OPTIONS(interleaved, sections, rotary_dim)
  };
  struct Results {
    Tensor q_out, k_out;
    LIGER_FIELDS(q_out, k_out)
  };
  struct Saved {
    Tensor cos, sin;
    bool inverse;
    LIGER_FIELDS(cos, sin, inverse)
  };
  template <class T>
  struct Gradients {
    T dq, dk;
    LIGER_FIELDS(dq, dk)
  };
  using Upstream = Gradients<Tensor>;

  static Results forward(const Inputs& in, const Options& o) {
    const at::IntArrayRef sections = o.sections ? at::IntArrayRef(*o.sections) : at::IntArrayRef();
    rope::check("rope", Arguments("rope", "q", in.q), in.q, in.k, in.cos, in.sin, o.interleaved, sections,
                o.rotary_dim);
    const Results out{rope::empty_heads(in.q), rope::empty_heads(in.k)};
    if (in.q.is_meta()) return out;
    const Tensor q = rope::with_unit_stride(in.q), k = rope::with_unit_stride(in.k);
    rope::rotate(rope::describe(q, out.q_out), rope::describe(k, out.k_out), {}, q, in.cos, in.sin, in.inverse,
                 o.interleaved, sections, o.rotary_dim);
    return out;
  }

  static Saved save(const Inputs& in, const Results&) { return {in.cos, in.sin, in.inverse}; }

  static Gradients<Tensor> differentiate(const Upstream& up, const Saved& s, const Options& o) {
    return as_fields<Gradients<Tensor>>(Operator<Rope>::public_op(up.dq, up.dk, s.cos, s.sin, !s.inverse, o));
  }
};

struct RopePacked {
  static constexpr Name kName = "rope_packed";
  static constexpr bool kDifferentiableTwice = true;
  struct Heads {
    int64_t heads, k_heads;
    bool inverse;
    LIGER_FIELDS(heads, k_heads, inverse)
  };
  struct Inputs {
    Tensor qkv, cos, sin;
    Heads of;
    LIGER_FIELDS(qkv, cos, sin, of)
  };
  struct Saved {
    Tensor cos, sin;
    Heads of;
    LIGER_FIELDS(cos, sin, of)
  };
  using Upstream = Dy;
  template <class T>
  using Gradients = Dx<T>;

  static Tensor forward(const Inputs& inputs) {
    const auto [heads, k_heads, inverse] = inputs.of;
    const Tensor &qkv = inputs.qkv, &cos = inputs.cos, &sin = inputs.sin;
    const Arguments arguments("rope_packed", "qkv", qkv);
    TORCH_CHECK_VALUE(heads >= 0 && k_heads >= 0 && heads + k_heads > 0,
                      "rope_packed: the numbers of heads must be positive, got ", heads, " and ", k_heads);
    const int64_t all = heads + 2 * k_heads;
    TORCH_CHECK(qkv.dim() == 3 && qkv.sym_size(2) % all == 0, "rope_packed: qkv must be [batch, seq, ", all,
                " heads], got ", qkv.sym_sizes());
    rope::check_tables("rope_packed", arguments, cos, sin, qkv.sym_size(0), qkv.sym_size(1), qkv.sym_size(2) / all,
                       false, {}, -1);
    const Tensor out = output(at::empty_symint(qkv.sym_sizes(), qkv.options()));
    if (out.is_meta()) return out;
    const auto by_heads = [&](const Tensor& t) { return t.unflatten(2, {all, t.size(2) / all}).transpose(1, 2); };
    const Tensor in = by_heads(rope::with_unit_stride(qkv)), turned = by_heads(out);
    const auto part = [&](int64_t begin, int64_t n) {
      return rope::describe(in.narrow(1, begin, n), turned.narrow(1, begin, n));
    };
    rope::rotate(part(0, heads), part(heads, k_heads), part(heads + k_heads, k_heads), in, cos, sin, inverse, false, {},
                 -1);
    return out;
  }

  static Saved save(const Inputs& in, const Tensor&) { return {in.cos, in.sin, in.of}; }

  static Gradients<Tensor> differentiate(const Upstream& up, const Saved& s) {
    return {Operator<RopePacked>::public_op(up.dy, s.cos, s.sin, s.of.heads, s.of.k_heads, !s.of.inverse)};
  }
};

}  // namespace op

std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool inverse,
                                bool interleaved, at::IntArrayRef sections, int64_t rotary_dim) {
  return Operator<op::Rope>::public_op(q, k, cos, sin, inverse, interleaved, at::OptionalIntArrayRef(sections),
                                       rotary_dim);
}

Tensor rope_packed(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t heads, int64_t k_heads,
                   bool inverse) {
  return Operator<op::RopePacked>::public_op(qkv, cos, sin, heads, k_heads, inverse);
}

LIGER_OPERATORS(rope, Operator<op::Rope>, Operator<op::RopePacked>)

}  // namespace liger
