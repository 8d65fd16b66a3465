#include "liger/ops/research/matmul/int2_matmul.h"
#include "liger/core/torch/operator.h"
#include "liger/research.h"

namespace liger {
namespace op::int2_matmul {

struct Factors {
  Tensor a, b;
  LIGER_FIELDS(a, b)
};

Tensor forward(const Factors& in) {
  const auto& [a_, b_] = in;
  TORCH_CHECK_TYPE(a_.scalar_type() == at::kChar && b_.scalar_type() == at::kByte,
                   "int2_matmul: a must be int8 and b uint8, got ", a_.scalar_type(), " and ", b_.scalar_type());
  TORCH_CHECK(a_.dim() == 2 && b_.dim() == 2 && a_.sym_size(1) == 4 * b_.sym_size(0),
              "int2_matmul: expected a [m, 4 p] and b [p, n], got ", a_.sym_sizes(), " and ", b_.sym_sizes());
  TORCH_CHECK_VALUE(b_.sym_size(0) < int64_t(1) << 31, "int2_matmul: b must have fewer than 2^31 rows, got ",
                    b_.sym_size(0));
  TORCH_CHECK(a_.device() == b_.device(), "int2_matmul: b must be on ", a_.device(), ", got ", b_.device());
  const Tensor out = at::empty_symint({a_.sym_size(0), b_.sym_size(1)}, a_.options().dtype(at::kInt));
  if (out.is_meta() || out.numel() == 0) return out;
  const Tensor a = a_.contiguous();
  const Rows b(b_);
  run(int2_matmul_kernel, a,
      {.a = data<int8_t>(a),
       .b = data<uint8_t>(b.tensor),
       .out = data<int>(out),
       .m = a.size(0),
       .n = out.size(1),
       .packed = b_.size(0),
       .b_stride = b.stride});
  return out;
}

struct Weights {
  Tensor weights;
  LIGER_FIELDS(weights)
};

Tensor pack(const Weights& in) {
  const Tensor& weights = in.weights;
  TORCH_CHECK_TYPE(at::isIntegralType(weights.scalar_type(), false), "int2_pack: weights must be integers, got ",
                   weights.scalar_type());
  TORCH_CHECK(weights.dim() >= 1, "int2_pack: expected at least one dimension, got a scalar");
  c10::SymDimVector shape(weights.sym_sizes());
  shape[0] = ceil_div(shape[0], 4);
  shape.insert(shape.begin(), 4);
  const Tensor codes = at::zeros_symint(shape, weights.options().dtype(at::kByte));
  codes.flatten(0, 1).slice_symint(0, 0, weights.sym_size(0)).copy_(weights.add(1).bitwise_and(3));
  return codes[0] | codes[1] * 4 | codes[2] * 16 | codes[3] * 64;
}

struct Packed {
  Tensor packed;
  LIGER_FIELDS(packed)
};

Tensor unpack(const Packed& in) {
  const Tensor& packed = in.packed;
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, "int2_unpack: packed must be uint8, got ", packed.scalar_type());
  TORCH_CHECK(packed.dim() >= 1, "int2_unpack: expected at least one dimension, got a scalar");
  const auto plane = [&](int i) { return packed.bitwise_right_shift(2 * i).bitwise_and(3); };
  return at::cat({plane(0), plane(1), plane(2), plane(3)}).to(at::kInt).sub(1);
}

using Matmul = Undifferentiated<"int2_matmul", forward>;
using Pack = Undifferentiated<"int2_pack", pack>;
using Unpack = Undifferentiated<"int2_unpack", unpack>;

}  // namespace op::int2_matmul

Tensor int2_matmul(const Tensor& a, const Tensor& b) { return op::int2_matmul::Matmul::op(a, b); }
Tensor int2_pack(const Tensor& weights) { return op::int2_matmul::Pack::op(weights); }
Tensor int2_unpack(const Tensor& packed) { return op::int2_matmul::Unpack::op(packed); }

LIGER_OPERATORS(int2_matmul, op::int2_matmul::Matmul, op::int2_matmul::Pack, op::int2_matmul::Unpack)

}  // namespace liger
