#include "liger/ops/linear/eight_bit_op.h"

namespace liger {

LIGER_OPTIONAL(eight_bit_rows);
LIGER_OPTIONAL(transpose_bytes);
LIGER_OPTIONAL(scaled_matmul);

namespace op::linear {
namespace {

EightBit format_of(const AdaptedLinear& layer) {
  return layer.weight.scalar_type() == at::kChar ? EightBit::Int8 : EightBit::E4M3;
}

/// Whether the kernels take a layer's weight for rows like x.
bool takes(const Tensor& x, const AdaptedLinear& layer) {
  const Tensor& w = layer.weight;
  return layer.weight_scale && w.size(0) % 16 == 0 && w.size(1) % 16 == 0 && w.is_contiguous() &&
         has_byte_products(x, format_of(layer));
}

int64_t columns(at::ArrayRef<Tensor> parts) {
  int64_t all = 0;
  for (const Tensor& part : parts) all += part.size(1);
  return all;
}

EightBitRows quantised(at::ArrayRef<Tensor> parts, at::ArrayRef<Tensor> factors, EightBit format) {
  const EightBitRows made = empty_rows(parts[0].size(0), columns(parts), format, parts[0]);
  write_bytes(made.to(), parts, factors);
  return made;
}

/// Room for numbers of 8 bits in the memory of t, where that is enough.
Tensor room_in(const Tensor& t, int64_t rows, int64_t cols) {
  if (!t.is_contiguous() || int64_t(t.nbytes()) < rows * cols) return {};
  return t.view(at::kByte).view({-1}).narrow(0, 0, rows * cols).view({rows, cols});
}

/// Columns up to a multiple of 8 as the kernel reads them.
Tensor in_eights(const Tensor& t) {
  const int64_t missing = round_up(t.size(1), 8) - t.size(1);
  if (missing > 0) return at::constant_pad_nd(t, {0, missing});
  const bool readable = t.stride(1) == 1 && t.stride(0) % 8 == 0 && reinterpret_cast<uintptr_t>(data(t)) % 16 == 0;
  return readable ? t : t.clone(at::MemoryFormat::Contiguous);
}

/// out = (x) (w ⊙ w_scale)ᵀ + factor · low bᵀ + bias.
void run_product(const Tensor& out, const EightBitRows& x, const Tensor& w, const Tensor& w_scale, const Tensor& low,
                 const Tensor& b, double factor, const Tensor& bias, EightBit format) {
  ScaledMatmul args{.x = data<uint8_t>(x.rows),
                    .w = static_cast<const uint8_t*>(data(w)),
                    .x_scale = data<float>(x.scale),
                    .w_scale = data<float>(w_scale),
                    .bias = data(bias),
                    .out = data<void>(out),
                    .rows = out.size(0),
                    .cols = out.size(1),
                    .depth = w.size(1),
                    .factor = float(factor),
                    .dtype = dtype_of(out),
                    .format = format};
  Tensor low_rows, b_rows;
  if (low.defined()) {
    low_rows = in_eights(low), b_rows = in_eights(b);
    args.low = data(low_rows), args.b = data(b_rows);
    args.rank = low_rows.size(1), args.low_stride = low_rows.stride(0), args.b_stride = b_rows.stride(0);
  }
  run(scaled_matmul, out, args);
}

}  // namespace

void write_bytes(const RowBytes& to, at::ArrayRef<Tensor> parts, at::ArrayRef<Tensor> factors) {
  QuantiseRows args{.count = int(parts.size()), .to = to, .rows = parts[0].size(0), .dtype = dtype_of(parts[0])};
  std::vector<Rows> rows;  // which own what the kernel reads
  for (size_t i = 0; i < parts.size(); ++i) {
    rows.emplace_back(parts[i]);
    const Tensor& part = rows[i].tensor;
    if (reinterpret_cast<uintptr_t>(data(part)) % 16 != 0 || rows[i].stride % 8 != 0)
      rows[i] = Rows(part.clone(at::MemoryFormat::Contiguous));
    args.parts[i] = {data(rows[i].tensor), factors.empty() ? nullptr : data<float>(factors[i]), part.size(1),
                     rows[i].stride};
  }
  run(eight_bit_rows, parts[0], args);
}

const EightBitRows& Factor::in(EightBit format) const {
  EightBitRows& made = made_[int(format)];
  if (!made.rows.defined()) made = quantised(rows_, {}, format);
  return made;
}

Tensor whole(const AdaptedLinear& layer, at::ScalarType dtype) {
  if (!layer.weight_scale) return layer.weight;
  return dequantised(layer.weight, *layer.weight_scale, dtype);
}

std::optional<EightBit> format_of_products(const Tensor& x, at::ArrayRef<const AdaptedLinear*> layers) {
  for (const AdaptedLinear* layer : layers)
    if (!takes(x, *layer) || format_of(*layer) != format_of(*layers[0])) return {};
  return format_of(*layers[0]);
}

bool multiply(const Tensor& y, const Factor& x, const AdaptedLinear& layer, const Tensor& low, const Tensor& b) {
  if (!takes(y, layer)) return false;
  const EightBit format = format_of(layer);
  const Tensor bias = contiguous(layer.bias), scale = layer.weight_scale->contiguous();
  run_product(y, x.in(format), layer.weight, scale, layer.a ? low : Tensor(), b, layer.scale, bias, format);
  return true;
}

bool multiply_transposed(const Tensor& dx, at::ArrayRef<Tensor> dy, at::ArrayRef<const AdaptedLinear*> layers,
                         const Tensor& low, const Tensor& a, const EightBitRows& made) {
  const auto format = format_of_products(dx, layers);
  if (!format) return false;
  std::vector<Tensor> scales;
  for (const AdaptedLinear* layer : layers) scales.push_back(layer->weight_scale->contiguous());
  const EightBitRows rows = made.rows.defined() ? made : quantised(dy, scales, *format);
  const int64_t cols = rows.rows.size(1);
  Tensor weights = made.rows.defined() ? room_in(dy[0], dx.size(1), cols) : Tensor();
  if (!weights.defined()) weights = at::empty({dx.size(1), cols}, rows.rows.options());
  int64_t first = 0;
  for (const AdaptedLinear* layer : layers) {
    const Tensor& w = layer->weight;
    run(transpose_bytes, dx,
        {static_cast<const uint8_t*>(data(w)), data<uint8_t>(weights), w.size(0), w.size(1), first, cols});
    first += w.size(0);
  }
  run_product(dx, rows, weights, {}, low, low.defined() ? a.t() : Tensor(), 1, {}, *format);
  return true;
}

}  // namespace op::linear

std::tuple<Tensor, Tensor> quantise_rows(const Tensor& matrix, EightBit format) {
  TORCH_CHECK(matrix.dim() == 2, "quantise_rows: matrix must have two dimensions, got ", matrix.sizes());
  const Tensor rows = matrix.detach().to(at::kFloat), most = rows.abs().amax(1);
  const Tensor scale = at::where(most > 0, most / largest(format), at::ones_like(most));
  const Tensor numbers = (rows / scale.unsqueeze(1)).clamp_(-largest(format), largest(format));
  if (format == EightBit::Int8) return {numbers.round_().to(at::kChar), scale};
  return {numbers.to(at::kFloat8_e4m3fn).view(at::kByte), scale};
}

}  // namespace liger
