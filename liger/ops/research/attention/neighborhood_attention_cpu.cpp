#include "liger/core/cpu/row.h"
#include "liger/ops/research/attention/neighborhood_attention.h"

namespace LIGER_CPU::neighborhood_attention {
namespace {

template <class T>
double dot(const T* a, const T* b, int64_t n) {
  return row_sum(n, [](Vec a, Vec b) { return a * b; }, a, b);
}

/// The rows around one, and a weight of each.
struct Neighbor {
  int64_t row;
  float weight, other;
};

/// y = Σ weight · x of the neighbours.
template <class T, class W>
void mix(const std::vector<Neighbor>& neighbors, const void* x, void* y, int64_t row, int64_t cols, W weight) {
  for_each(cols, [&](int64_t c, int64_t n) {
    Vec sum(0.f);
    for (const Neighbor& of : neighbors) sum = Math::fma(Vec(weight(of)), read(row_of<T>(x, of.row, cols) + c, n), sum);
    write(sum, row_of<T>(y, row, cols) + c, n);
  });
}

/// f(row, its neighbours) of all rows.
template <class Args, class F>
void for_neighborhoods(const Args& a, F f) {
  for_runs(a.rows, (2 * a.half + 1) * a.cols * 4, [&](int64_t begin, int64_t end) {
    std::vector<Neighbor> neighbors;
    for (int64_t row = begin; row < end; ++row) {
      neighbors.clear();
      for (int64_t t = -a.half; t <= a.half; ++t)
        if (const int64_t other = neighbor(a, row, t); other >= 0) neighbors.push_back({other, 0, 0});
      f(row, neighbors);
    }
  });
}

template <class T>
void forward(const NeighborhoodAttentionForward& a) {
  for_neighborhoods(a, [&](int64_t row, std::vector<Neighbor>& neighbors) {
    const T* q = row_of<T>(a.q, row, a.cols);
    float max = -INFINITY;
    for (Neighbor& of : neighbors) {
      of.weight = float(a.scale * dot(q, row_of<T>(a.k, of.row, a.cols), a.cols));
      max = Max{}(max, of.weight);
    }
    double sum = 0;
    for (Neighbor& of : neighbors) sum += of.weight = std::exp(of.weight - max);
    const float inverse = float(1 / sum);
    a.stats[row * 2] = max, a.stats[row * 2 + 1] = float(sum);
    mix<T>(neighbors, a.v, a.out, row, a.cols, [&](const Neighbor& of) { return of.weight * inverse; });
  });
}

template <class T>
void backward(const NeighborhoodAttentionBackward& a) {
  const auto at = [&](const void* matrix, int64_t row) { return row_of<T>(matrix, row, a.cols); };
  /// p and dp of a query and a key.
  const auto pair = [&](int64_t query, int64_t key) {
    const float s = float(a.scale * dot(at(a.q, query), at(a.k, key), a.cols));  // as forward has it
    const float p = std::exp(s - a.stats[query * 2]) / a.stats[query * 2 + 1];
    return std::pair(p, float(dot(at(a.dout, query), at(a.v, key), a.cols)));
  };
  for_neighborhoods(a, [&](int64_t row, std::vector<Neighbor>& keys) {
    double delta = 0;
    for (Neighbor& key : keys)
      std::tie(key.weight, key.other) = pair(row, key.row), delta += double(key.weight) * key.other;
    a.delta[row] = float(delta);
    mix<T>(keys, a.k, a.dq, row, a.cols,
           [&](const Neighbor& key) { return float(a.scale * key.weight * (key.other - delta)); });
  });
  for_neighborhoods(a, [&](int64_t row, std::vector<Neighbor>& queries) {
    for (Neighbor& query : queries) std::tie(query.weight, query.other) = pair(query.row, row);
    mix<T>(queries, a.dout, a.dv, row, a.cols, [](const Neighbor& query) { return query.weight; });
    mix<T>(queries, a.q, a.dk, row, a.cols,
           [&](const Neighbor& query) { return a.scale * query.weight * (query.other - a.delta[query.row]); });
  });
}

}  // namespace

LIGER_REGISTER(neighborhood_attention_forward, [](const NeighborhoodAttentionForward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { forward<T>(a); });
});
LIGER_REGISTER(neighborhood_attention_backward, [](const NeighborhoodAttentionBackward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() { backward<T>(a); });
});

}  // namespace LIGER_CPU::neighborhood_attention
