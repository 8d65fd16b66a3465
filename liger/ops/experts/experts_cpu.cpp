#include "liger/core/cpu/pair_row.h"
#include "liger/ops/experts/experts.h"

namespace LIGER_CPU::experts {
namespace {

/// A counting sort.
void sort_pairs(const SortByExpert& a) {
  if (!a.scratch) return void(*a.scratch_bytes = (a.experts + 1) * int64_t(sizeof(int)));
  int* next = static_cast<int*>(a.scratch);  // where the next pair of each expert goes
  std::fill_n(next, a.experts + 1, 0);
  for (int64_t i = 0; i < a.pairs; ++i) ++next[a.key(i)];
  for (int64_t e = 0, before = 0; e <= a.experts; ++e) {
    before += next[e], next[e] = int(before) - next[e];
    if (e < a.experts) a.ends[e] = int(before);
  }
  for (int64_t i = 0; i < a.pairs; ++i) {
    const int key = a.key(i), p = next[key]++;
    a.order[p] = int(i), a.place[i] = key < a.experts ? p : -1;
  }
}

template <class T>
void spread(const SpreadTokens& a) {
  for_rows(a.tokens, a.cols * a.k, [&](int64_t t) {
    const T* x = row_of<T>(a.x, t, a.cols);
    for (int64_t k = t * a.k; k < (t + 1) * a.k; ++k) {
      if (a.place[k] < 0) continue;
      T* row = row_of<T>(a.rows, a.place[k], a.cols);
      if (!a.weights.of) {
        std::copy_n(x, a.cols, row);
        continue;
      }
      const Vec weight(number(a.weights, k));
      for_each(a.cols, [&](int64_t c, int64_t n) { write(weight * read(x + c, n), row + c, n); });
    }
  });
}

template <class T>
void combine(const CombineExperts& a) {
  for_row_chunks(a.tokens, a.cols, [&](int64_t t, int64_t begin, int64_t n) {
    T* y = row_of<T>(a.y, t, a.cols) + begin;
    for_each(n, [&](int64_t c, int64_t count) {
      Vec sum(0.f);
      for (int64_t k = t * a.k; k < (t + 1) * a.k; ++k) {
        if (a.place[k] < 0) continue;
        sum = Math::fma(Vec(a.weights.of ? number(a.weights, k) : 1.f),
                        read(row_of<T>(a.rows, a.place[k], a.cols) + begin + c, count), sum);
      }
      write(sum, y + c, count);
    });
  });
}

/// The row of what experts activate: gates and their factors, or these alone.
template <class T, class Gate>
struct ActivatedRow : PairRow<T, Gate::kInterleaved> {
  ActivatedRow(auto* rows, int64_t r, int64_t cols)
      : PairRow<T, Gate::kInterleaved>(rows, static_cast<T*>(rows) + cols, r, 2 * cols, 2 * cols) {}
};
template <class T, class Act>
struct ActivatedRow<T, NoGate<Act>> {
  T* row;

  ActivatedRow(auto* rows, int64_t r, int64_t cols) : row(row_of<std::remove_const_t<T>>(rows, r, cols)) {}
  std::pair<Vec, Vec> read(int64_t c, int64_t n) const { return {Vec(1.f), cpu::read(row + c, n)}; }
  void write(const Vec&, const Vec& b, int64_t c, int64_t n) const { cpu::write(b, row + c, n); }
};

template <class T, class Gate>
void backward(const ExpertsBackward& a) {
  const typename Gate::template Of<Math, Vec> gate(a.form);
  for_rows(a.pairs, a.cols * 8, [&](int64_t r) {
    if (r >= *a.valid) return void(a.dweights[a.order[r]] = 0);
    const ActivatedRow<const T, Gate> in(a.a, r, a.cols);
    const ActivatedRow<T, Gate> out(a.da, r, a.cols);
    T* dh = row_of<T>(a.dh, r, a.cols);
    const Vec weight(number(a.weights, a.order[r]));
    LongSum sum;
    for_each(a.cols, [&](int64_t c, int64_t k) {
      const auto [x, b] = in.read(c, k);
      const Vec d = read(dh + c, k), act = round_to<T>(gate.act(x)), u = gate.up(b), h = act * u, dc = weight * d;
      sum.add(round_to<T>(h) * d, k);
      out.write(dc * u * gate.slope(x), gate.through_up(b, dc * act), c, k);
      write(weight * h, dh + c, k);
    });
    if (a.bias) {
      const T *dy = row_of<T>(a.dy, r, a.width), *bias = row_of<T>(a.bias, a.experts[r], a.width);
      for_each(a.width, [&](int64_t c, int64_t k) { sum.add(read(dy + c, k) * read(bias + c, k), k); });
    }
    a.dweights[a.order[r]] = float(sum.value());
  });
}

}  // namespace

LIGER_REGISTER(sort_by_expert, [](const SortByExpert& a, Stream) { sort_pairs(a); });
LIGER_REGISTER(spread_tokens,
               [](const SpreadTokens& a, Stream) { dispatch(a.dtype, [&]<class T>() { spread<T>(a); }); });
LIGER_REGISTER(combine_experts,
               [](const CombineExperts& a, Stream) { dispatch(a.dtype, [&]<class T>() { combine<T>(a); }); });
LIGER_REGISTER(experts_backward, [](const ExpertsBackward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { dispatch_experts(a.gated, a.form, [&]<class Gate>() { backward<T, Gate>(a); }); });
});

}  // namespace LIGER_CPU::experts
