#pragma once
// Rows in memory as flat packs, each read once and by one thread: Row is the address arithmetic, RowChunks shares the
// rows of a matrix out among blocks, map_packs makes rows of rows. Kernels of several passes: row_layout.cuh,
// cluster.cuh.
#include "liger/core/cuda/async_copy.cuh"
#include "liger/core/cuda/dispatch.h"
#include "liger/core/cuda/pack.cuh"
#include "liger/core/cuda/reduce.cuh"
#include "liger/core/partial_sums.h"

namespace liger::cuda {

/// A row of n elements, seen as the 16-byte packs of memory that it touches: rows of any alignment are read and written
/// in whole packs but for the first and the last.
template <class T>
struct Row {
  static constexpr int kWidth = 16 / sizeof(T);
  using Pack = cuda::Pack<T, kWidth>;
  template <class L>
  using PackLike = cuda::Pack<T, Row<L>::kWidth>;
  T* first;      // where the first pack would begin
  int shift, n;  // elements of that pack before the row; elements
  int wholes;    // packs that are all the row's

  __device__ Row(const void* matrix, int64_t row, int64_t stride, int64_t cols) {
    T* p = static_cast<T*>(const_cast<void*>(matrix)) + row * stride;
    shift = int(reinterpret_cast<uintptr_t>(p) % 16 / sizeof(T));
    first = p - shift;
    n = int(cols);
    wholes = max(0, (shift + n) / kWidth - (shift > 0));
  }

  /// As many as a row of so many columns can touch; aligned: it begins at a 16-byte boundary.
  static int64_t packs(int64_t cols, bool aligned) { return ceil_div(cols, kWidth) + !aligned; }
  __device__ int packs() const { return ceil_div(shift + n, kWidth); }
  /// The column of pack k's first element; negative where that lies before the row.
  __device__ int column(int k) const { return k * kWidth - shift; }
  /// The pack that column c is in.
  __device__ int pack(int c) const { return (shift + c) / kWidth; }
  __device__ bool whole(int k) const { return unsigned(k - (shift > 0)) < unsigned(wholes); }

  /// Which elements of pack k are the row's: [begin(k), end(k)).
  __device__ int begin(int k) const { return max(0, -column(k)); }
  __device__ int end(int k) const { return min(kWidth, n - column(k)); }

  __device__ Pack load(int k, T outside) const { return load(k, outside, *this); }

  /// What lies in this row at the columns of pack k of the row `like`, whose alignment may be another, and whose type
  /// may be narrower. kWhole: it is known to be a pack here, too, and the row's.
  template <bool kWhole = false, class L>
  __device__ PackLike<L> load(int k, T outside, const Row<L>& like) const {
    if constexpr (!kWhole) {
      if (!aligned(like) || !like.whole(k)) {
        float f[Row<L>::kWidth];
#pragma unroll
        for (int j = 0; j < Row<L>::kWidth; ++j) {
          const int c = like.column(k) + j;
          f[j] = float(c >= 0 && c < n ? first[shift + c] : outside);
        }
        return PackLike<L>::from_float(f);
      }
    }
    return PackLike<L>::read(at(k, like));
  }

  /// Brings what load gives to shared memory, where it is after copies_done(). near: see copy_async16.
  template <class L>
  __device__ void copy(int k, T outside, const Row<L>& like, PackLike<L>* to, bool near = true) const {
    if (sizeof(*to) == 16 && aligned(like) && like.whole(k))
      near ? copy_async16<true>(to, at(k, like)) : copy_async16<false>(to, at(k, like));
    else *to = load(k, outside, like);
  }

  /// Writes pack k of the row `like` to this row.
  template <bool kWhole = false, class L>
  __device__ void store(int k, const float* f, const Row<L>& like) const {
    if constexpr (!kWhole) {
      if (!aligned(like) || !like.whole(k)) {
#pragma unroll
        for (int j = 0; j < Row<L>::kWidth; ++j)
          if (const int c = like.column(k) + j; c >= 0 && c < n) first[shift + c] = T(f[j]);
        return;
      }
    }
    PackLike<L>::from_float(f).write(at(k, like));
  }

  template <class L>
  __device__ void store(int k, const PackLike<L>& pack, const Row<L>& like) const {
    if (aligned(like) && like.whole(k)) return pack.write(at(k, like));
    float f[Row<L>::kWidth];
    pack.to_float(f);
    store(k, f, like);
  }

  /// Writes n packs of the row `like`, kStride apart.
  template <int kStride, class L, int n>
  __device__ void store(int k, const PackLike<L> (&packs)[n], const Row<L>& like) const {
    if (aligned(like) && like.whole(k) && like.whole(k + kStride * (n - 1))) {
      T* to = at(k, like);
#pragma unroll
      for (int i = 0; i < n; ++i) packs[i].write(to + i * kStride * Row<L>::kWidth);
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        float f[Row<L>::kWidth];
        packs[i].to_float(f);
        store(k + kStride * i, f, like);
      }
    }
  }

  /// Whether packs of the row `like` are packs here, and where such a pack is.
  template <class L>
  __device__ bool aligned(const Row<L>& like) const {
    static_assert(sizeof(L) <= sizeof(T));
    return shift == like.shift % kWidth;
  }
  template <class L>
  __device__ T* at(int k, const Row<L>& like) const {
    return first + k * Row<L>::kWidth - (like.shift - shift);
  }
};

/// f(k) for this thread's packs of a row that its block walks along.
template <class T, class F>
__device__ void for_each_pack_of(const Row<T>& row, F f) {
#pragma unroll 2
  for (int k = threadIdx.x; k < row.packs(); k += blockDim.x) f(k);
}

inline constexpr int kLongRowThreads = 1024;  // of a block that walks along rows that registers do not hold

/// f(load(i)) for every i below n, by the first `threads` of one block, kBatch loads of a thread in flight at once.
template <int kBatch, class Load, class F>
__device__ void for_each_in_batches(int64_t n, Load load, F f, unsigned threads = blockDim.x) {
  for (int64_t first = threadIdx.x; first < n; first += kBatch * int64_t(threads)) {
    decltype(load(first)) loaded[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (const int64_t i = first + u * int64_t(threads); i < n) loaded[u] = load(i);
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (const int64_t i = first + u * int64_t(threads); i < n) f(loaded[u]);
  }
}

/// f(k, values) for k in [begin, end), n of them at once, `stride` apart from k on, which load(k) gives. Those that are
/// left over come one at a time, or with kFill together with blanks.
template <int n, bool kFill, class Load, class F>
__device__ void for_each_batch(int begin, int end, int stride, const Load& load, const decltype(load(0))& blank, F f) {
  int k = begin + threadIdx.x;
  const auto batch = [&]<int count, bool kAll>(std::integer_sequence<int, count>, std::bool_constant<kAll>) {
    std::remove_cvref_t<decltype(blank)> values[count];
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] = kAll || k + i * stride < end ? load(k + i * stride) : blank;
    f(k, values);
    k += count * stride;
  };
#pragma unroll 1
  while (k + (n - 1) * stride < end) batch(std::integer_sequence<int, n>(), std::true_type());
#pragma unroll 1
  while (k < end) batch(std::integer_sequence<int, kFill ? n : 1>(), std::bool_constant<!kFill>());
}

/// f(k, load(k)) for k in [begin, end), kUnroll loads of a thread in flight at once.
template <int kUnroll, class Load, class F>
__device__ void for_each_load(int begin, int end, Load load, F f) {
  const int stride = blockDim.x;
  for_each_batch<kUnroll, false>(begin, end, stride, load, {}, [&](int k, const auto& values) {
#pragma unroll
    for (const auto& value : values) f(k, value), k += stride;
  });
}

/// f(k, pack) for packs [begin, end) of a row. `outside` stands for what is not the row's.
template <int kUnroll, class T, class F>
__device__ void for_each_pack(const Row<T>& row, int begin, int end, T outside, F f) {
  for_each_load<kUnroll>(begin, end, [&](int k) { return row.load(k, outside); }, f);
}

/// f(k, whole) for every pack k of a row: a std::true_type for those that are all the row's, if `alike`, for which no
/// address is checked, and after them a std::false_type.
template <class T, class F>
__device__ void for_each_place(const Row<T>& row, bool alike, F f) {
  const int before = row.shift > 0, wholes = alike ? row.wholes : 0;
#pragma unroll 1
  for (int k = threadIdx.x; k < wholes; k += blockDim.x) f(before + k, std::true_type());
#pragma unroll 1
  for (int k = threadIdx.x; k < row.packs() - wholes; k += blockDim.x)
    f(k < before ? k : k + wholes, std::false_type());
}

/// The rows out become f of the rows in, element by element: f(x, y) makes y, one number for each row out, of x, one
/// for each row in. The first kUnroll packs of a thread are in flight together; a row has one more where it begins
/// inside a pack, and no others.
template <int kUnroll, class T, int kOut, int kIn, class F>
__device__ void map_packs(const Row<T> (&out)[kOut], const Row<T> (&in)[kIn], F f) {
  constexpr int kWidth = Row<T>::kWidth;
  const Row<T>& like = out[0];
  const int packs = like.packs();
  typename Row<T>::Pack raw[kUnroll + 1][kIn];
#pragma unroll
  for (int u = 0; u <= kUnroll; ++u)
    if (const int k = u * blockDim.x + threadIdx.x; k < packs) {
#pragma unroll
      for (int i = 0; i < kIn; ++i) raw[u][i] = in[i].load(k, T(0), like);
    }
#pragma unroll
  for (int u = 0; u <= kUnroll; ++u)
    if (const int k = u * blockDim.x + threadIdx.x; k < packs) {
      float from[kIn][kWidth], to[kOut][kWidth];
#pragma unroll
      for (int i = 0; i < kIn; ++i) raw[u][i].to_float(from[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        float x[kIn], y[kOut];
#pragma unroll
        for (int i = 0; i < kIn; ++i) x[i] = from[i][j];
        f(x, y);
#pragma unroll
        for (int o = 0; o < kOut; ++o) to[o][j] = y[o];
      }
#pragma unroll
      for (int o = 0; o < kOut; ++o) out[o].store(k, to[o], like);
    }
}

/// A matrix whose rows a grid of blocks shares out in chunks of kUnroll packs a thread or, where that is 0, of so many
/// elements.
template <class T, int kUnroll = 0>
struct RowChunks {
  static constexpr int kThreads = 256;
  int64_t rows, cols;
  unsigned given;
  int64_t per_row;  // chunks

  RowChunks(int64_t rows, int64_t cols, int64_t given = 0)
      : rows(rows), cols(cols), given(unsigned(given)), per_row(ceil_div(cols, elements())) {}
  __host__ __device__ unsigned elements() const { return kUnroll > 0 ? kThreads * kUnroll * Row<T>::kWidth : given; }
  __host__ __device__ int64_t count() const { return rows * per_row; }
  Grid grid() const { return {.blocks = count(), .threads = kThreads}; }
  __device__ int64_t row(int64_t i = blockIdx.x) const { return i / per_row; }
  /// Of 32-bit factors: a block's one product of 64-bit ones takes eight registers more of each thread.
  __device__ int64_t begin(int64_t i = blockIdx.x) const { return int64_t(unsigned(i % per_row)) * elements(); }
  /// This block's chunk of a matrix, or chunk i.
  template <class U = T>
  __device__ Row<U> of(const void* matrix, int64_t stride, int64_t i = blockIdx.x) const {
    return Row<U>(static_cast<const U*>(matrix) + begin(i), row(i), stride, min(int64_t(elements()), cols - begin(i)));
  }
};

}  // namespace liger::cuda
