#include <numeric>
#include "liger/core/cpu/row.h"
#include "liger/ops/embedding/embedding.h"

namespace LIGER_CPU::embedding {
namespace {

/// dw_v, whose tokens are the first `count` of `order`: a block of columns at a time, so that their sums stay in L1.
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
    for_rows(a.tokens, a.cols,
             [&](int64_t i) { std::copy_n(row_of<T>(a.w, a.ids[i], a.cols), a.cols, row_of<T>(a.y, i, a.cols)); });
  });
});

// The tokens are brought in the order of their ids by counting those; then a thread owns a range of the vocabulary.
LIGER_REGISTER(embedding_backward, [](const EmbeddingBackward& a, Stream) {
  if (!a.scratch) return void(*a.scratch_bytes = (1 + a.classes + a.tokens) * int64_t(sizeof(int64_t)));
  int64_t *next = static_cast<int64_t*>(a.scratch) + 1,
          *order = next + a.classes;  // where each id's next token goes, in the end that is their end
  std::fill_n(next - 1, 1 + a.classes, 0);
  for (int64_t i = 0; i < a.tokens; ++i)
    if (a.counts(a.ids[i])) ++next[a.ids[i]];
  std::exclusive_scan(next, next + a.classes, next, int64_t(0));
  for (int64_t i = 0; i < a.tokens; ++i)
    if (a.counts(a.ids[i])) order[next[a.ids[i]]++] = i;
  dispatch(a.dtype, [&]<class T>() {
    for_rows(a.classes, a.cols, [&](int64_t v) {
      T* dw = row_of<T>(a.dw, v, a.cols);
      if (next[v - 1] == next[v]) std::fill_n(dw, a.cols, T(0));
      else sum_tokens(a.dy, a.cols, order + next[v - 1], next[v] - next[v - 1], dw);
    });
  });
});

}  // namespace LIGER_CPU::embedding
