#pragma once
// Products of small matrices of floats, for kernels that hold a few rows in cache.
#include "liger/core/cpu/row.h"

namespace LIGER_CPU::matrix {

// Scratch rows are padded with zeros to whole vectors of either instruction set.
inline constexpr int64_t kPad = 16;

/// A scratch matrix of floats, its rows without gaps.
struct Matrix {
  std::vector<float> numbers;
  int64_t cols = 0;
  Matrix(int64_t rows, int64_t cols) : numbers(size_t(rows * cols)), cols(cols) {}
  float* operator[](int64_t row) { return numbers.data() + row * cols; }
  const float* operator[](int64_t row) const { return numbers.data() + row * cols; }
};

/// kRows rows of a · b in kVecs vectors, which stay in registers.
template <int kRows, int kVecs, bool kAdd>
void block(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVecs; ++v) sums[r][v] = kAdd ? Vec::loadu(c + r * ldc + v * kLanes) : Vec(0.f);
  for (int64_t i = 0; i < k; ++i) {
    Vec of_b[kVecs];
    for (int v = 0; v < kVecs; ++v) of_b[v] = Vec::loadu(b + i * ldb + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec of_a(a[r * lda + i]);
      for (int v = 0; v < kVecs; ++v) sums[r][v] = at::vec::fmadd(of_a, of_b[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVecs; ++v) sums[r][v].store(c + r * ldc + v * kLanes);
}

/// c = a · b, or c + a · b, of [m, k] and [k, n]; n is a multiple of kPad.
template <bool kAdd>
void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
              int64_t ldc) {
  constexpr int kRows = kLanes == 16 ? 8 : 4, kVecs = 2;
  for (int64_t j = 0; j < n;) {
    const bool wide = j + kVecs * kLanes <= n;
    int64_t i = 0;
    const auto rows = [&]<int kR>() {
      for (; i + kR <= m; i += kR)
        if (wide) block<kR, kVecs, kAdd>(k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
        else block<kR, 1, kAdd>(k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
    };
    rows.template operator()<kRows>();
    rows.template operator()<1>();
    j += wide ? kVecs * kLanes : kLanes;
  }
}

/// to [cols, rows] = from [rows, cols] transposed; both are multiples of kPad.
inline void transpose(int64_t rows, int64_t cols, const float* from, int64_t ld_from, float* to, int64_t ld_to) {
  for (int64_t i = 0; i < rows; i += 8)
    for (int64_t j = 0; j < cols; j += 8) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
      at::vec::transpose_mxn<float, 8, 8>(from + i * ld_from + j, ld_from, to + j * ld_to + i, ld_to);
#else
      for (int64_t r = 0; r < 8; ++r)
        for (int64_t c = 0; c < 8; ++c) to[(j + c) * ld_to + i + r] = from[(i + r) * ld_from + j + c];
#endif
    }
}

/// y += s · x of whole vectors.
inline void add_scaled(int64_t n, float s, const float* x, float* y) {
  for (int64_t c = 0; c < n; c += kLanes) at::vec::fmadd(Vec(s), Vec::loadu(x + c), Vec::loadu(y + c)).store(y + c);
}
inline void scale(int64_t n, float s, const float* x, float* y) {
  for (int64_t c = 0; c < n; c += kLanes) (Vec(s) * Vec::loadu(x + c)).store(y + c);
}
inline float dot(int64_t n, const float* a, const float* b) {
  Vec sums[2] = {Vec(0.f), Vec(0.f)};
  int64_t c = 0;
  for (; c + 2 * kLanes <= n; c += 2 * kLanes)
    for (int i = 0; i < 2; ++i)
      sums[i] = at::vec::fmadd(Vec::loadu(a + c + i * kLanes), Vec::loadu(b + c + i * kLanes), sums[i]);
  for (; c < n; c += kLanes) sums[0] = at::vec::fmadd(Vec::loadu(a + c), Vec::loadu(b + c), sums[0]);
  return reduce_lanes(sums[0] + sums[1], Plus{});
}

}  // namespace LIGER_CPU::matrix
