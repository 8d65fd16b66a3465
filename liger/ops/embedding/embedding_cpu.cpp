#include "liger/core/cpu/row.h"
#include "liger/ops/embedding/embedding.h"

namespace LIGER_CPU::embedding {
namespace {

/// dw_v, whose tokens are the first `count` of `order`: a block of columns at a time, so that their sums stay in the first-level cache.
template <class T>
void sum_tokens(const void* dy, int64_t cols, const int64_t* order, int64_t count, T* dw) {
  constexpr int64_t kBlock = 64 * kLanes;
  for (int64_t c = 0; c < cols; c += kBlock) {
    const int64_t n = std::min(kBlock, cols - c);
    float sum[kBlock] = {};
    for (int64_t i = 0; i < count; ++i)
      row_map(n, sum, [](Vec sum, Vec dy) { return sum + dy; }, sum, row_of<T>(dy, order[i], cols) + c);
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
      else sum_tokens(a.dy, a.cols, a.order + a.first[v], a.first[v + 1] - a.first[v], dw);
    });
  });
});

LIGER_REGISTER(embedding_backward_few, [](const EmbeddingBackwardFew& a, Stream) {
  dispatch(a.dtype, [&]<class T>() {
    for_rows(a.tokens, a.cols, [&](int64_t i) {
      if (!a.first(i)) return;
      std::vector<int64_t> order;
      for (int64_t j = i; j < a.tokens; ++j)
        if (a.ids[j] == a.ids[i]) order.push_back(j);
      sum_tokens(a.dy, a.cols, order.data(), int64_t(order.size()), row_of<T>(a.dw, a.ids[i], a.cols));
    });
  });
});

}  // namespace LIGER_CPU::embedding
