#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include "liger/core/kernel.h"
#include "liger/core/math.h"

namespace liger {

/// Where rows go in 8 bits, rounded to nearest. Of a row v:
///   scale   max |v| / largest(format), 1 for a row of zeros, NaN for a row with a NaN or an infinity
///   out     v / scale
struct RowBytes {
  uint8_t* out;  // [rows, cols]
  float* scale;  // [rows]
  EightBit format;
};
/// Of rows that kernels write in 8 bits beside a result: the registers of a block hold two of 16 bits.
inline constexpr int64_t kMostByteColumns = 32 * 1024;

/// Whether the current device is one that products of 8-bit numbers of a format are made on.
struct HasScaledMatmul {
  bool* yes;
  EightBit format;
};
inline constinit Kernel<HasScaledMatmul> has_scaled_matmul{"has_scaled_matmul"};

/// out = numbers · scale, rounded once, of rows in 8 bits.
struct DequantiseRows {
  const uint8_t* numbers;  // [rows, cols], cols a multiple of 16
  const float* scale;      // [rows]
  void* out;               // [rows, cols]
  int64_t rows, cols;
  EightBit format;
  DType dtype;
};
inline constinit Kernel<DequantiseRows> dequantise_rows{"dequantise_rows"};

/// The largest number of a format.
constexpr float largest(EightBit format) { return format == EightBit::E4M3 ? 448.f : 127.f; }

/// A float as E4M3, to the nearest and to even; beyond 448, ±448; NaN stays NaN.
LIGER_HD inline uint8_t to_e4m3(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  const uint8_t sign = uint8_t(bits >> 24 & 0x80);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7f;
  if (bits >= 0x43e00000) return sign | 0x7e;                           // 448
  if (bits < 0x3c800000) return sign | uint8_t(rintf(fabsf(v) * 512));  // below 2⁻⁶: a multiple of 2⁻⁹
  bits += 0x7ffff + (bits >> 20 & 1);
  return sign | uint8_t((bits >> 20) - (120 << 3));
}

/// Its bits are those of a float whose exponent is less by 120, also below 2⁻⁶.
LIGER_HD inline float from_e4m3(uint8_t byte) {
  const uint32_t bits = uint32_t(byte & 0x80) << 24 | uint32_t(byte & 0x7f) << 20;
  float v;
  memcpy(&v, &bits, 4);
  return (byte & 0x7f) == 0x7f ? NAN : v * 0x1p120f;
}

/// A float that lies within ±largest, or is NaN, as the byte of a format. NaN has no integer: it becomes 0.
LIGER_HD inline uint8_t to_byte(EightBit format, float v) {
  if (format == EightBit::E4M3) return to_e4m3(v);
  return v == v ? uint8_t(int8_t(rintf(v))) : 0;
}

}  // namespace liger
