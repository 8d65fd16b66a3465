// liger's rms_norm and fused_add_rms_norm on this device: the kernels that they are made of. Their headers say what
// these compute.
#include <liger/backend.h>
#include <liger/core/partial_sums.h>
#include <liger/ops/norm/norm.h>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cmath>
#include <stdexcept>

namespace {

using namespace liger;

/// The i-th number of an array of any of the dtypes.
float get(const void* of, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::F32: return static_cast<const float*>(of)[i];
    case DType::F16: return float(static_cast<const c10::Half*>(of)[i]);
    case DType::BF16: return float(static_cast<const c10::BFloat16*>(of)[i]);
  }
  return 0;
}

void set(void* of, DType dtype, int64_t i, float value) {
  switch (dtype) {
    case DType::F32: static_cast<float*>(of)[i] = value; break;
    case DType::F16: static_cast<c10::Half*>(of)[i] = value; break;
    case DType::BF16: static_cast<c10::BFloat16*>(of)[i] = value; break;
  }
}

float rounded(float value, DType dtype) {
  float kept = 0;
  set(&kept, dtype, 0, value);
  return get(&kept, dtype, 0);
}

/// Raises for the other norms that share the kernels.
void check(bool is_another) {
  if (is_another) throw std::runtime_error("of the norms this device has only rms_norm, also of a sum");
}

void forward(const NormForward& a, Stream) {
  check(a.centred || a.scale);
  const void* from = a.residual ? a.s : a.x;
  for (int64_t row = 0; row < a.rows; ++row) {
    double squares = 0;
    for (int64_t i = row * a.cols; i < (row + 1) * a.cols; ++i) {
      if (a.residual) set(a.s, a.dtype, i, get(a.x, a.dtype, i) + get(a.residual, a.dtype, i));
      const double x = get(from, a.dtype, i);
      squares += x * x;
    }
    const float rstd = float(1 / std::sqrt(squares * double(a.inv_cols) + double(a.eps)));
    a.rstd[row] = rstd;
    for (int64_t col = 0; col < a.cols; ++col) {
      const int64_t i = row * a.cols + col;
      float y = get(from, a.dtype, i) * rstd;
      if (a.casting == Casting::Llama) y = rounded(y, a.dtype);
      if (a.w) y *= get(a.w, a.w_dtype, col) + a.offset;
      set(a.y, a.dtype, i, y);
    }
  }
}

void backward(const NormBackward& a, Stream) {
  check(a.centred || a.scale);
  for (int64_t col = 0; a.dw && col < a.cols; ++col) a.dw[col] = 0;
  for (int64_t row = 0; row < a.rows; ++row) {
    const float rstd = a.rstd[row];
    const auto normed = [&](int64_t col) { return get(a.x, a.dtype, row * a.cols + col) * rstd; };
    const auto upstream = [&](int64_t col) { return get(a.dy, a.dtype, row * a.cols + col); };
    const auto g = [&](int64_t col) { return upstream(col) * (a.w ? get(a.w, a.w_dtype, col) + a.offset : 1); };
    double projection = 0;
    for (int64_t col = 0; col < a.cols; ++col) projection += double(g(col)) * double(normed(col));
    const float mean = float(projection * double(a.inv_cols));
    for (int64_t col = 0; col < a.cols; ++col) {
      const int64_t i = row * a.cols + col;
      const float of_sum = a.ds ? get(a.ds, a.dtype, i) : 0;
      if (a.dx) set(a.dx, a.dtype, i, rstd * (g(col) - normed(col) * mean) + of_sum);
      if (a.dw)
        a.dw[col] += upstream(col) * (a.casting == Casting::Llama ? rounded(normed(col), a.dtype) : normed(col));
    }
  }
}

/// One partial sum: backward adds up all rows by itself.
void partials(const RowPartials& a, Stream) { *a.count = 1; }

void add(const AddPartials& a, Stream) {
  for (int n = 0; n < a.count; ++n) {
    const PartialSum& s = a.sums[n];
    for (int64_t i = 0; i < s.groups * s.cols; ++i) {
      float sum = 0;
      for (int64_t p = 0; p < s.partials; ++p) sum += s.part[(i / s.cols * s.partials + p) * s.cols + i % s.cols];
      set(s.out, s.dtype, i, sum);
    }
  }
}

/// When the library is loaded.
const bool registered = [] {
  register_backend(c10::DeviceType::PrivateUse1,
                   {{norm_forward, forward}, {norm_backward, backward}, {row_partials, partials}, {add_partials, add}});
  return true;
}();

}  // namespace
