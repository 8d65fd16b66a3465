#pragma once
// The tensor core's products of a warp: mma, wgmma on compute capability 9.0, and a plain form where there is neither.
#include "liger/core/cuda/warp_words.cuh"
#include "liger/core/eight_bit.h"

namespace liger::cuda {

/// sum[i] += Σ product(word of a, word of b) of the words that make it, which are laid out as below.
template <class Sum, class F>
__device__ void gather_products(Sum (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, F product) {
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const WarpWords<6> all(a[0], a[1], a[2], a[3], b0, b1);
  for (int half = 0; half < 2; ++half)
    for (int q = 0; q < 4; ++q)
      for (int i = 0; i < 4; ++i)
        sum[i] += product(all.of(2 * half + i / 2, group * 4 + q), all.of(4 + half, (2 * quad + i % 2) * 4 + q));
}

/// The tensor core's product of a 16 x 32 matrix of unsigned bytes and a 32 x 8 one of signed bytes, added to sum
/// [16 x 8]. With
///   group = lane / 4
///   quad  = lane % 4
/// a lane has
///   a     rows group and group + 8 in k = 4 quad … 4 quad + 3, then the same at k + 16
///   b     column group at the same k
///   sum   row group in columns 2 quad and 2 quad + 1, then row group + 8
__device__ inline void tensor_multiply_add(int (&sum)[4], const unsigned (&a)[4], const int (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  gather_products(sum, a, unsigned(b[0]), unsigned(b[1]), [](unsigned x, unsigned y) {
    int sum = 0;
    for (int bit = 0; bit < 32; bit += 8) sum += int(x >> bit & 0xff) * int8_t(y >> bit);
    return sum;
  });
#endif
}

/// The same for signed bytes on both sides (Sum int), or for E4M3 floats (Sum float; from compute capability 8.9 on).
template <class Sum>
__device__ void multiply_bytes(Sum (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  constexpr bool kIntegers = std::is_same_v<Sum, int>;
#if __CUDA_ARCH__ >= 800
  if constexpr (kIntegers)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#if __CUDA_ARCH__ >= 890
  else
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
#else
  gather_products(sum, a, b0, b1, [](unsigned x, unsigned y) {
    Sum sum = 0;
    for (int bit = 0; bit < 32; bit += 8) {
      if constexpr (kIntegers) sum += int(int8_t(x >> bit)) * int8_t(y >> bit);
      else sum += from_e4m3(uint8_t(x >> bit)) * from_e4m3(uint8_t(y >> bit));
    }
    return sum;
  });
#endif
}

/// The same for 16-bit numbers, two in a word: a 16 x 16 and a 16 x 8 matrix. A lane has
///   a     rows group and group + 8 in k = 2 quad, 2 quad + 1, then the same at k + 8
///   b     column group at the same k
template <class T>
__device__ void multiply_numbers(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
#define LIGER_PRODUCT(types)                                         \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." types                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, " \
      "%2, %3};"                                                     \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<T, bfloat16>) LIGER_PRODUCT("bf16.bf16");
  else LIGER_PRODUCT("f16.f16");
#undef LIGER_PRODUCT
#else
  gather_products(sum, a, b0, b1, [](unsigned x, unsigned y) {
    const float2 of_a = to_floats<T>(x), of_b = to_floats<T>(y);
    return of_a.x * of_b.x + of_a.y * of_b.y;
  });
#endif
}

/// Four 8 x 8 matrices of 16-bit numbers from shared memory, whose row i of matrix j is where lane 8 j + i says: a lane
/// gets the pair lane % 4 of row lane / 4 of each.
__device__ inline void load_matrices(unsigned (&words)[4], const void* row) {
#if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
#else
  const int lane = threadIdx.x % 32;
  for (int j = 0; j < 4; ++j)
    words[j] = reinterpret_cast<const unsigned*>(__shfl_sync(~0u, uintptr_t(row), 8 * j + lane / 4))[lane % 4];
#endif
}

/// What wgmma needs around its products: begin, products, issued, and await_products before the sums are read.
__device__ inline void products_begin() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void products_issued() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/// Waits for all products that this warp has issued, or all but the last group's.
template <bool kButLast>
__device__ void await_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(int(kButLast)) : "memory");
#endif
}

/// After the next barrier products may read what this thread has written, or copied and awaited, in shared memory.
__device__ inline void show_tensor_core() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// What wgmma reads an operand by that begins at `tile`, rows of 128 bytes whose chunks of 16 lie at chunk ^ row % 8,
/// the rows from a multiple of 1024 bytes on. PTX ISA, "Matrix descriptor":
///   bits 0   address / 16
///   bits 16  bytes / 16 to the next 64 numbers across k; no matter where rows go along k
///   bits 32  bytes / 16 from eight rows to the next
///   bits 62  the swizzle of 128 bytes
__device__ inline uint64_t matrix_at(const void* tile, int bytes_across = 16) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  return (shared_address(tile) >> 4) | uint64_t(bytes_across >> 4) << 16 | uint64_t(1024 >> 4) << 32 |
         uint64_t(1) << 62;
#else
  return 0;
#endif
}

/// As tensor_multiply_add above for two a and a wider b, whose 8 kEights columns lie in shared memory: 128 bytes of k
/// each, of which chunks of 16 `chunk` and the next are b's; chunk c of column r lies at c ^ r % 8, the columns from a
/// multiple of 1024 bytes on. Four neighbouring warps come here together, with the same columns. On compute
/// capability 9.0 (wgmma) the products are in flight until await_products.
template <int kEights>
__device__ void tensor_multiply_add(int (&sums)[2][kEights][4], unsigned (&a)[2][4], const uint4 (*columns)[8],
                                    int chunk) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
  for (int i = 0; i < 8; ++i) forget(a[i / 4][i % 4]);  // made before the fence
  const uint64_t matrix = matrix_at(&columns[0][chunk]);
  products_begin();
  constexpr int kAtOnce = 8;
  static_assert(kEights % kAtOnce == 0);
#pragma unroll
  for (int e = 0; e < kEights; e += kAtOnce)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#define LIGER_SUMS(i) "+r"(sums[h][e + i][0]), "+r"(sums[h][e + i][1]), "+r"(sums[h][e + i][2]), "+r"(sums[h][e + i][3])
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
          "%13, %14, %15, %16, %17, %18, "
          "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1;"
          : LIGER_SUMS(0), LIGER_SUMS(1), LIGER_SUMS(2), LIGER_SUMS(3), LIGER_SUMS(4), LIGER_SUMS(5), LIGER_SUMS(6),
            LIGER_SUMS(7)
          : "r"(a[h][0]), "r"(a[h][1]), "r"(a[h][2]), "r"(a[h][3]), "l"(matrix + e * 64));
#undef LIGER_SUMS
    }
  products_issued();
#elif __CUDA_ARCH__ >= 800
  const int lane = threadIdx.x % 32, of = lane / 8;  // each column's two chunks, of two columns of eight at once
#pragma unroll
  for (int e = 0; e < kEights; e += 2) {
    unsigned b[4];
    const int column = 8 * (e + of / 2) + lane % 8;
    load_matrices(b, &columns[column][(chunk + of % 2) ^ column % 8]);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) tensor_multiply_add(sums[h][e + i], a[h], {int(b[2 * i]), int(b[2 * i + 1])});
  }
#else
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  for (int e = 0; e < kEights; ++e) {
    const auto of_b = [&](int half) {
      return int(reinterpret_cast<const unsigned*>(&columns[8 * e + group][(chunk + half) ^ group])[quad]);
    };
    for (int h = 0; h < 2; ++h) tensor_multiply_add(sums[h][e], a[h], {of_b(0), of_b(1)});
  }
#endif
}

}  // namespace liger::cuda
