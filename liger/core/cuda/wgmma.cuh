#pragma once
// What Hopper's tensor cores take from shared memory (compute capability 9.0a): boxes of a matrix, copied by the Tensor
// Memory Accelerator, barriers that count their bytes, and the products of a warpgroup, wgmma. PTX ISA, "Asynchronous
// Warpgroup Level Matrix Instructions" and "Data Movement: cp.async.bulk.tensor". Compiled for anything else these
// functions do nothing: ask has_wgmma().
#include <cuda.h>
#include "liger/core/cuda/mma.cuh"

namespace liger::cuda {

template <int>
__global__ void has_wgmma_kernel() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ volatile int mark;  // by which it is known
  mark = 1;
#endif
}

/// Whether the current device is a Hopper and these kernels were compiled for 9.0a: without the "a" there is no wgmma.
inline bool has_wgmma() {
  static int known[kMaxDevices];
  return shared_bytes_of(has_wgmma_kernel<0>, known) > 0;
}

/// Where the tiles of a 16-bit operand lie in shared memory, from a multiple of 1024 bytes on: rows of 64 numbers (128
/// bytes), whose chunks of 16 bytes lie at chunk ^ row % 8.
///   Along k     a row has 64 k of one row of the operand (of a column, for the second)
///   Across k    a row has 64 rows of the operand at one k; 64 k, 8 KiB, and then the next 64 rows
enum class Layout { AlongK, AcrossK };

/// The part of global memory that boxes are copied from: up to three dimensions, the first one contiguous. What a box
/// has outside of them is zeros.
using TensorMap = CUtensorMap;

/// Sizes and box in numbers, strides of the second and third dimension in numbers, multiples of 8. A box has 64 numbers
/// of the first dimension.
inline TensorMap tensor_map(DType dtype, const void* data, const int64_t (&sizes)[3], const int64_t (&strides)[2],
                            int box_rows) {
  // From the driver, which this library is not linked against.
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    if (!found) throw std::runtime_error("CUDA: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  const cuuint64_t size[3] = {cuuint64_t(sizes[0]), cuuint64_t(sizes[1]), cuuint64_t(sizes[2])},
                   bytes[2] = {cuuint64_t(2 * strides[0]), cuuint64_t(2 * strides[1])};
  const cuuint32_t box[3] = {64, cuuint32_t(box_rows), 1}, steps[3] = {1, 1, 1};
  TensorMap map;
  const auto type = dtype == DType::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (encode(&map, type, 3, const_cast<void*>(data), size, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    throw std::runtime_error("CUDA: a matrix that the Tensor Memory Accelerator does not take");
  return map;
}

/// A barrier in shared memory, of which each phase ends when all have arrived and all bytes are there.
struct CopyBarrier {
  uint64_t state;

  __device__ void init(int arrivals) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(arrivals) : "memory");
#endif
  }
  __device__ void arrive() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
#endif
  }
  /// Arrives, and has the phase wait for so many bytes.
  __device__ void arrive_expecting(int bytes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)), "r"(bytes)
                 : "memory");
#endif
  }
  /// Waits for the end of the phase of this parity: 0 for the first one, 1 for the second, then 0 again.
  __device__ void await(int parity) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::
            "r"(shared_address(&state)),
        "r"(parity)
        : "memory");
#endif
  }
};

/// After barriers were initialised, before copies use them.
__device__ inline void barriers_initialised() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// One thread copies the box that begins at (x, y, z).
__device__ inline void copy_box(void* to, const TensorMap& map, int x, int y, int z, CopyBarrier& barrier) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier.state)), "r"(x), "r"(y), "r"(z)
      : "memory");
#endif
}

/// One thread writes the box that begins at (x, y, z), but for what lies outside of the map.
__device__ inline void store_box(const TensorMap& map, const void* from, int x, int y, int z) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
               : "memory");
#endif
}
/// Closes a group of boxes that this thread writes.
__device__ inline void stores_issued() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
/// Waits until the shared memory of all of its groups but the last kPending may be written again.
template <int kPending>
__device__ void await_stores() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

/// A barrier of `threads` neighbouring threads of a block, number 1 to 15.
__device__ inline void await_threads(int number, int threads) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
#endif
}

/// A warpgroup gives registers back, or takes what others gave.
template <int n, bool kTake>
__device__ void resize_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (kTake) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
#endif
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define LIGER_SUMS_OF(i) "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
#define LIGER_REGISTERS_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LIGER_REGISTERS_2 LIGER_REGISTERS_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LIGER_REGISTERS_3 LIGER_REGISTERS_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LIGER_REGISTERS_4 LIGER_REGISTERS_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LIGER_REGISTERS_5 LIGER_REGISTERS_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LIGER_REGISTERS_6 LIGER_REGISTERS_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define LIGER_REGISTERS_7 LIGER_REGISTERS_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define LIGER_REGISTERS_8 LIGER_REGISTERS_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define LIGER_REGISTERS_9 LIGER_REGISTERS_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LIGER_REGISTERS_10 LIGER_REGISTERS_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define LIGER_REGISTERS_11 LIGER_REGISTERS_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define LIGER_REGISTERS_12 LIGER_REGISTERS_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define LIGER_REGISTERS_13 LIGER_REGISTERS_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define LIGER_REGISTERS_14 LIGER_REGISTERS_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define LIGER_REGISTERS_15 LIGER_REGISTERS_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define LIGER_REGISTERS_16 LIGER_REGISTERS_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define LIGER_SUMS_1 LIGER_SUMS_OF(0), LIGER_SUMS_OF(1)
#define LIGER_SUMS_2 LIGER_SUMS_1, LIGER_SUMS_OF(2), LIGER_SUMS_OF(3)
#define LIGER_SUMS_3 LIGER_SUMS_2, LIGER_SUMS_OF(4), LIGER_SUMS_OF(5)
#define LIGER_SUMS_4 LIGER_SUMS_3, LIGER_SUMS_OF(6), LIGER_SUMS_OF(7)
#define LIGER_SUMS_5 LIGER_SUMS_4, LIGER_SUMS_OF(8), LIGER_SUMS_OF(9)
#define LIGER_SUMS_6 LIGER_SUMS_5, LIGER_SUMS_OF(10), LIGER_SUMS_OF(11)
#define LIGER_SUMS_7 LIGER_SUMS_6, LIGER_SUMS_OF(12), LIGER_SUMS_OF(13)
#define LIGER_SUMS_8 LIGER_SUMS_7, LIGER_SUMS_OF(14), LIGER_SUMS_OF(15)
#define LIGER_SUMS_9 LIGER_SUMS_8, LIGER_SUMS_OF(16), LIGER_SUMS_OF(17)
#define LIGER_SUMS_10 LIGER_SUMS_9, LIGER_SUMS_OF(18), LIGER_SUMS_OF(19)
#define LIGER_SUMS_11 LIGER_SUMS_10, LIGER_SUMS_OF(20), LIGER_SUMS_OF(21)
#define LIGER_SUMS_12 LIGER_SUMS_11, LIGER_SUMS_OF(22), LIGER_SUMS_OF(23)
#define LIGER_SUMS_13 LIGER_SUMS_12, LIGER_SUMS_OF(24), LIGER_SUMS_OF(25)
#define LIGER_SUMS_14 LIGER_SUMS_13, LIGER_SUMS_OF(26), LIGER_SUMS_OF(27)
#define LIGER_SUMS_15 LIGER_SUMS_14, LIGER_SUMS_OF(28), LIGER_SUMS_OF(29)
#define LIGER_SUMS_16 LIGER_SUMS_15, LIGER_SUMS_OF(30), LIGER_SUMS_OF(31)
#endif

/// What wgmma reads an operand by that begins at chunk `chunk` of 16 bytes of the row at `row`, a multiple of 1024
/// bytes; across k, panels of 64 numbers lie `bytes_across` apart.
__device__ inline uint64_t matrix_from(const void* row, int chunk, int bytes_across) {
  return matrix_at(row, bytes_across) + chunk;
}

/// sums += a b for 64 rows of a, kColumns columns of b and 16 k, of which matrix_from says where they begin; by the 128
/// threads of a warpgroup, between products_begin and products_issued. With
///   group = lane / 4
///   quad  = lane % 4
/// a lane of warp w has of the columns 8 c to 8 c + 7
///   sums[c]  row 16 w + group in columns 8 c + 2 quad and the next, then the same of row 16 w + group + 8
template <class T, Layout kA, Layout kB, int kColumns>
__device__ void multiply_add(float (*sums)[4], uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kBfloat = std::is_same_v<T, bfloat16>;
  constexpr int kAcrossA = kA == Layout::AcrossK, kAcrossB = kB == Layout::AcrossK;
#define LIGER_PRODUCT_OF(i, types, n, of_a, of_b, across_a, across_b)                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." types " {" LIGER_REGISTERS_##i \
               "}, " of_a ", " of_b ", 1, 1, 1, " across_a ", " across_b ";"                   \
               : LIGER_SUMS_##i                                                                \
               : "l"(a), "l"(b), "n"(kAcrossA), "n"(kAcrossB));
#define LIGER_PRODUCT(i, n, ...)                                            \
  if constexpr (kColumns == 16 * i) {                                       \
    if constexpr (kBfloat) LIGER_PRODUCT_OF(i, "bf16.bf16", n, __VA_ARGS__) \
    else LIGER_PRODUCT_OF(i, "f16.f16", n, __VA_ARGS__)                     \
  }
  LIGER_PRODUCT(1, "16", "%8", "%9", "%10", "%11")
  LIGER_PRODUCT(2, "32", "%16", "%17", "%18", "%19")
  LIGER_PRODUCT(3, "48", "%24", "%25", "%26", "%27")
  LIGER_PRODUCT(4, "64", "%32", "%33", "%34", "%35")
  LIGER_PRODUCT(5, "80", "%40", "%41", "%42", "%43")
  LIGER_PRODUCT(6, "96", "%48", "%49", "%50", "%51")
  LIGER_PRODUCT(7, "112", "%56", "%57", "%58", "%59")
  LIGER_PRODUCT(8, "128", "%64", "%65", "%66", "%67")
  LIGER_PRODUCT(9, "144", "%72", "%73", "%74", "%75")
  LIGER_PRODUCT(10, "160", "%80", "%81", "%82", "%83")
  LIGER_PRODUCT(11, "176", "%88", "%89", "%90", "%91")
  LIGER_PRODUCT(12, "192", "%96", "%97", "%98", "%99")
  LIGER_PRODUCT(13, "208", "%104", "%105", "%106", "%107")
  LIGER_PRODUCT(14, "224", "%112", "%113", "%114", "%115")
  LIGER_PRODUCT(15, "240", "%120", "%121", "%122", "%123")
  LIGER_PRODUCT(16, "256", "%128", "%129", "%130", "%131")
#undef LIGER_PRODUCT
#undef LIGER_PRODUCT_OF
#endif
}

/// The same of the 16 k of `step`, 0 to 3, of two tiles of 64 k.
template <class T, Layout kA, Layout kB, int kColumns>
__device__ void multiply_add(float (&sums)[32][4], const T* a, const T* b, int step) {
  // 16 k are 32 bytes of a row along k, or 16 rows across k.
  constexpr int kStepA = (kA == Layout::AcrossK ? 2048 : 32) >> 4, kStepB = (kB == Layout::AcrossK ? 2048 : 32) >> 4;
  multiply_add<T, kA, kB, kColumns>(sums, matrix_at(a, 8192) + step * kStepA, matrix_at(b, 8192) + step * kStepB);
}

/// The same with bfloat16 numbers, those of a in registers, as the lanes of a warp have its 16 rows for mma.
template <Layout kB, int kColumns>
__device__ void multiply_add(float (*sums)[4], const unsigned (&a)[4], uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define LIGER_PRODUCT(i, n, a0, a1, a2, a3, of_b, across)                                        \
  if constexpr (kColumns == 16 * i)                                                              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" LIGER_REGISTERS_##i \
                 "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " of_b ", 1, 1, 1, " across ";"           \
                 : LIGER_SUMS_##i                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(kB == Layout::AcrossK)));
  LIGER_PRODUCT(1, "16", "%8", "%9", "%10", "%11", "%12", "%13")
  LIGER_PRODUCT(2, "32", "%16", "%17", "%18", "%19", "%20", "%21")
  LIGER_PRODUCT(3, "48", "%24", "%25", "%26", "%27", "%28", "%29")
  LIGER_PRODUCT(4, "64", "%32", "%33", "%34", "%35", "%36", "%37")
  LIGER_PRODUCT(8, "128", "%64", "%65", "%66", "%67", "%68", "%69")
#undef LIGER_PRODUCT
#endif
}

/// Sums that products in flight are added to may be read after this, which stands after await_products.
template <int n>
__device__ void hold(float (&sums)[n][4]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
  for (auto& eight : sums)
#pragma unroll
    for (float& sum : eight) asm volatile("" : "+f"(sum)::"memory");
#endif
}

/// The same of numbers of 8 bits, 256 columns of b and the 32 k of `step`: of integers, whose sums are exact, or of
/// E4M3 floats. Both operands lie along k, 128 numbers a row.
template <class Sum>
__device__ void multiply_add_bytes(Sum (&sums)[32][4], const uint8_t* a, const uint8_t* b, int step) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const uint64_t of_a = matrix_at(a) + step * (32 >> 4), of_b = matrix_at(b) + step * (32 >> 4);
  if constexpr (std::is_same_v<Sum, int>) {
#undef LIGER_SUMS_OF
#define LIGER_SUMS_OF(i) "+r"(sums[i][0]), "+r"(sums[i][1]), "+r"(sums[i][2]), "+r"(sums[i][3])
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {" LIGER_REGISTERS_16 "}, %128, %129, 1;"
                 : LIGER_SUMS_16
                 : "l"(of_a), "l"(of_b));
#undef LIGER_SUMS_OF
#define LIGER_SUMS_OF(i) "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" LIGER_REGISTERS_16 "}, %128, %129, 1, 1, 1;"
                 : LIGER_SUMS_16
                 : "l"(of_a), "l"(of_b));
  }
#endif
}

/// Four 8 x 8 matrices of 16-bit numbers to shared memory: of each a lane has the pair lane % 4 of row lane / 4, and
/// row i of matrix j goes where lane 8 j + i says. kTransposed: column i.
template <bool kTransposed>
__device__ void store_matrices(void* row, const unsigned (&words)[4]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (kTransposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
#endif
}

}  // namespace liger::cuda
