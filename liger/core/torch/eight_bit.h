#pragma once
#include "liger/core/eight_bit.h"
#include "liger/core/torch/op.h"

// Rows of tensors in 8 bits, and their way from the operator that makes them to the one that reads them.
namespace liger {

/// Rows in 8 bits, each with its scale.
struct EightBitRows {
  Tensor rows, scale;  // uint8 [rows, cols] and float [rows]; undefined where there are none
  EightBit format;

  RowBytes to() const { return {data<uint8_t>(rows), data<float>(scale), format}; }
  EightBitRows part(int64_t begin, int64_t n) const {
    return {rows.narrow(0, begin, n), scale.narrow(0, begin, n), format};
  }
};
/// numbers · scale, rounded once to `dtype`: int8, or uint8 with the bits of E4M3 [..., rows, cols]; float [..., rows].
Tensor dequantised(const Tensor& numbers, const Tensor& scale, at::ScalarType dtype);

EightBitRows empty_rows(int64_t rows, int64_t cols, EightBit format, const Tensor& like);

/// Whether products of 8-bit numbers of a format are made of rows like x: of 16-bit numbers, and on a device that has
/// the kernel.
bool has_byte_products(const Tensor& x, EightBit format);

/// Whether a kernel that reads packs of 16-bit numbers can write rows like t in 8 bits too, where its matrices begin at
/// these addresses and their rows are so many elements apart.
bool rows_fit_bytes(const Tensor& t, std::initializer_list<const void*> addresses,
                    std::initializer_list<int64_t> strides);

/// Attaches rows in 8 bits to the tensor that they were made of. They are no part of its value: no copy, view or
/// detached alias has them.
void attach_rows(const Tensor& t, EightBitRows rows);
/// Takes them from t; undefined where it has none, or has been written to since.
EightBitRows take_rows(const Tensor& t);

}  // namespace liger
