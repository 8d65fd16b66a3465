#include "liger/core/cpu/row.h"
#include "liger/ops/embedding/embedding.h"

namespace LIGER_CPU::embedding {
namespace {

/// dw_v, whose tokens are order[begin, end): a block of columns at a time, so that their sums stay in the first-level cache.
template <class T>
void sum_tokens(const EmbeddingBackward& a, int64_t begin, int64_t end, T* dw) {
  constexpr int64_t kBlock = 64 * kLanes;
  for (int64_t c = 0; c < a.cols; c += kBlock) {
    const int64_t n = std::min(kBlock, a.cols - c);
    float sum[kBlock] = {};
    for (int64_t i = begin; i < end; ++i)
      row_map(n, sum, [](Vec sum, Vec dy) { return sum + dy; }, sum, row_of<T>(a.dy, a.order[i], a.cols) + c);
    row_map(n, dw + c, [](Vec sum) { return sum; }, sum);
  }
}

}  // namespace

LIGER_REGISTER(embedding_forward, [](const EmbeddingForward& a, Stream) {
  for (int64_t i = 0; i < a.tokens; ++i)
    if (a.ids[i] < 0 || a.ids[i] >= a.classes) return void(*a.bad_id = a.ids[i]);
  dispatch(a.dtype, [&]<class T>() {
    for_rows(a.tokens, a.cols, [&](int64_t i) { std::copy_n(row_of<T>(a.w, a.ids[i], a.cols), a.cols, row_of<T>(a.y, i, a.cols)); });
  });
});

// A thread owns a range of the vocabulary.
LIGER_REGISTER(embedding_backward, [](const EmbeddingBackward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() {
    for_rows(a.classes, a.cols, [&](int64_t v) {
      T* dw = row_of<T>(a.dw, v, a.cols);
      if (a.first[v] == a.first[v + 1] || v == a.padding) std::fill_n(dw, a.cols, T(0));
      else sum_tokens(a, a.first[v], a.first[v + 1], dw);
    });
  });
});

}  // namespace LIGER_CPU::embedding
