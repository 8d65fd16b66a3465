#include "liger/core/cpu/row.h"
#include "liger/ops/research/matmul/int2_matmul.h"
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#include <immintrin.h>
#endif

namespace LIGER_CPU::int2_matmul {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
constexpr int kBytes = 64;
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
// Columns of b as 16-bit lanes: a lane holds the codes of two planes, which meet two neighbours of a in one
// instruction.
using Lanes [[gnu::vector_size(kBytes)]] = int16_t;
using Bytes [[gnu::vector_size(kBytes / 2)]] = uint8_t;

Lanes planes(Lanes b) { return (b | b << 6) & 0x0303; }

Lanes multiply_add(Lanes sum, Lanes codes, int16_t a) {
#if defined(CPU_CAPABILITY_AVX512)
  return sum + Lanes(_mm512_maddubs_epi16(__m512i(codes), _mm512_set1_epi16(a)));
#elif defined(CPU_CAPABILITY_AVX2)
  return sum + Lanes(_mm256_maddubs_epi16(__m256i(codes), _mm256_set1_epi16(a)));
#else
  return sum + (codes & 3) * int16_t(int8_t(a)) + (codes >> 8) * int16_t(a >> 8);
#endif
}

constexpr int64_t kColumns = kBytes / 2;  // in one Lanes
constexpr int64_t kRun = 16;              // rows of b whose products a 16-bit lane can sum: 16 · 4 · 3 · 128 < 2^15
constexpr int64_t kStep = 64, kVecs = kStep / kColumns;  // columns at once: a cache line of each row of b
constexpr int64_t kStrip = 512, kRows = 64;  // a task: columns of b and rows of a, whose sums stay in the caches

/// The codes of rows [p, p + run) of b, columns [c, c + kStep), as pairs of planes; 0 where there are none.
void unpack(const Int2Matmul& g, int64_t p, int64_t run, int64_t c, Lanes (&codes)[2 * kRun][kVecs]) {
  for (int64_t r = 0; r < run; ++r) {
    const uint8_t* from = g.b + (p + r) * g.b_stride + c;
    Bytes bytes[kVecs] = {};
    if (c + kStep <= g.n) std::memcpy(bytes, from, kStep);
    else std::memcpy(bytes, from, g.n - c);
    for (int v = 0; v < kVecs; ++v) {
      const Lanes b = __builtin_convertvector(bytes[v], Lanes);
      codes[2 * r][v] = planes(b), codes[2 * r + 1][v] = planes(b >> 4);
    }
  }
}

/// a's columns p, P + p, 2P + p and 3P + p side by side, and the sums of its rows.
struct Words {
  std::vector<int8_t> a;  // [m, packed, 4]
  std::vector<int> sum;   // [m]
  explicit Words(const Int2Matmul& g) : a(g.m * g.packed * 4), sum(g.m) {
    for_rows(g.m, 4 * g.packed, [&](int64_t r) {
      const int8_t* from = g.a + r * 4 * g.packed;
      int8_t* to = &a[r * 4 * g.packed];
      int total = 0;
      for (int64_t p = 0; p < g.packed; ++p)
        for (int i = 0; i < 4; ++i) total += to[4 * p + i] = from[i * g.packed + p];
      sum[r] = total;
    });
  }
};

/// sums += the products of kM rows of words, at p, with kStep columns of codes.
template <int kM>
void multiply(const int8_t* words, int64_t packed, int64_t p, int64_t run, const Lanes (&codes)[2 * kRun][kVecs],
              int* sums) {
  Lanes x[kM][kVecs] = {};
  for (int64_t i = 0; i < 2 * run; ++i)
    for (int j = 0; j < kM; ++j) {
      int16_t a;
      std::memcpy(&a, words + (j * packed + p) * 4 + 2 * i, 2);
      for (int v = 0; v < kVecs; ++v) x[j][v] = multiply_add(x[j][v], codes[i][v], a);
    }
  // Unrolled, so that the sums above are registers.
#pragma GCC unroll 2
  for (int j = 0; j < kM; ++j)
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      const Lanes lanes = x[j][v];
      for (int64_t i = 0; i < kColumns; ++i) sums[j * kStrip + v * kColumns + i] += lanes[i];
    }
}

void task(const Int2Matmul& g, const Words& words, int64_t m, int64_t m_end, int64_t c, int64_t c_end) {
  std::vector<int> sums((m_end - m) * kStrip);
  Lanes codes[2 * kRun][kVecs];
  for (int64_t p = 0; p < g.packed; p += kRun) {
    const int64_t run = std::min(kRun, g.packed - p);
    for (int64_t at = c; at < c_end; at += kStep) {
      unpack(g, p, run, at, codes);
      const auto some = [&]<int kM>(std::integral_constant<int, kM>, int64_t r) {
        multiply<kM>(&words.a[r * g.packed * 4], g.packed, p, run, codes, &sums[(r - m) * kStrip + at - c]);
      };
      int64_t r = m;
      for (; r + 2 <= m_end; r += 2) some(std::integral_constant<int, 2>(), r);
      for (; r < m_end; ++r) some(std::integral_constant<int, 1>(), r);
    }
  }
  for (int64_t r = m; r < m_end; ++r)
    for (int64_t i = c; i < c_end; ++i) g.out[r * g.n + i] = sums[(r - m) * kStrip + i - c] - words.sum[r];
}

}  // namespace

LIGER_REGISTER(int2_matmul_kernel, [](const Int2Matmul& g, Stream) {
  const Words words(g);
  const int64_t strips = ceil_div(g.n, kStrip);
  for_rows(ceil_div(g.m, kRows) * strips, kStrip * g.packed, [&](int64_t i) {
    const int64_t m = i / strips * kRows, c = i % strips * kStrip;
    task(g, words, m, std::min(g.m, m + kRows), c, std::min(g.n, c + kStrip));
  });
});

}  // namespace LIGER_CPU::int2_matmul
