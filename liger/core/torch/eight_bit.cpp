#include "liger/core/torch/eight_bit.h"
#include <algorithm>

namespace liger {

LIGER_OPTIONAL(has_scaled_matmul);
LIGER_OPTIONAL(dequantise_rows);

namespace {

/// On a tensor itself: torch asks for a clone where it copies what is known of one, and gets none.
struct Attached : c10::BackendMeta {
  Attached(EightBitRows rows, const Tensor& t) : rows(std::move(rows)), of(data(t)), version(t._version()) {}
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>&) const override { return {}; }
  EightBitRows rows;
  const void* of;
  int64_t version;
};

}  // namespace

Tensor dequantised(const Tensor& numbers, const Tensor& scale_, at::ScalarType dtype) {
  const bool e4m3 = numbers.scalar_type() == at::kByte;
  const auto options = numbers.options().dtype(dtype);
  if (dequantise_rows.has(Backend(numbers.device().type())) && numbers.is_contiguous() && cols(numbers) % 16 == 0 &&
      reinterpret_cast<uintptr_t>(data(numbers)) % 16 == 0) {
    const Tensor out = output(at::empty(numbers.sizes(), options)), scale = scale_.contiguous();
    run(dequantise_rows, out,
        {.numbers = static_cast<const uint8_t*>(data(numbers)),
         .scale = data<float>(scale),
         .out = out.data_ptr(),
         .rows = rows(numbers),
         .cols = cols(numbers),
         .format = e4m3 ? EightBit::E4M3 : EightBit::Int8,
         .dtype = dtype_of(out)});
    return out;
  }
  const Tensor scale = scale_.unsqueeze(-1);
  // 16 bits hold every number of 8 exactly.
  if (e4m3) return numbers.view(at::kFloat8_e4m3fn).to(dtype).mul_(scale);
  Tensor out = at::empty(numbers.sizes(), options);
  return at::mul_out(out, numbers, scale);
}

EightBitRows empty_rows(int64_t rows, int64_t cols, EightBit format, const Tensor& like) {
  const auto bytes = like.options().dtype(at::kByte);
  return {at::empty({rows, cols}, bytes), at::empty({rows}, bytes.dtype(at::kFloat)), format};
}

bool has_byte_products(const Tensor& x, EightBit format) {
  if (x.is_meta() || x.scalar_type() == at::kFloat) return false;
  if (!has_scaled_matmul.has(Backend(x.device().type()))) return false;
  bool yes = false;
  run(has_scaled_matmul, x, {&yes, format});
  return yes;
}

bool rows_fit_bytes(const Tensor& t, std::initializer_list<const void*> addresses,
                    std::initializer_list<int64_t> strides) {
  constexpr int kPack = 8;
  return t.scalar_type() != at::kFloat && cols(t) % 16 == 0 && cols(t) <= kMostByteColumns &&
         std::all_of(addresses.begin(), addresses.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % (2 * kPack) == 0; }) &&
         std::all_of(strides.begin(), strides.end(), [](int64_t n) { return n % kPack == 0; });
}

void attach_rows(const Tensor& t, EightBitRows rows) {
  if (t.is_inference()) return;  // it has no version
  t.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Attached>(std::move(rows), t));
}

EightBitRows take_rows(const Tensor& t) {
  auto* const found = dynamic_cast<Attached*>(t.unsafeGetTensorImpl()->get_backend_meta());
  if (!found) return {};
  const bool same = !t.is_inference() && found->version == t._version() && found->of == data(t) && t.is_contiguous() &&
                    cols(t) == found->rows.rows.size(1) && rows(t) == found->rows.rows.size(0);
  EightBitRows rows = same ? std::move(found->rows) : EightBitRows();
  t.unsafeGetTensorImpl()->set_backend_meta({});
  return rows;
}

}  // namespace liger
