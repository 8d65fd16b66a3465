#pragma once
#include "liger/core/kernel.h"

namespace liger {

///   out_mn = Σ_k a_mk w_kn
/// exactly, for weights w in {−1, 0, 1, 2}. A byte holds the codes w + 1 of four of them: bits 2i and 2i + 1 of b_pn
/// are those of row i P + p, with P = K/4. So
///   out_mn = Σ_p Σ_i a_m,iP+p · code_i(b_pn) − Σ_k a_mk
struct Int2Matmul {
  const int8_t* a;   // [m, 4 packed]
  const uint8_t* b;  // [packed, n], rows b_stride apart
  int* out;          // [m, n]
  int64_t m, n, packed, b_stride;
};

inline constinit Kernel<Int2Matmul> int2_matmul_kernel{"int2_matmul"};

}  // namespace liger
