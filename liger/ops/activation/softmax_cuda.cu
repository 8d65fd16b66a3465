#include "liger/core/cuda/softmax.cuh"
#include "liger/ops/activation/probabilities.cuh"

namespace liger::cuda::softmax {
namespace {

template <class T>
struct Softmax {
  using Online = OnlineSoftmax<T>;
  static constexpr bool kMean = false;
  typename Online::Value v = Online::identity();
  typename Online::Sum inverse;

  template <class Pack, int n>
  __device__ void push(const Pack (&packs)[n]) {
    Online::push(v, packs);
  }

  template <class KeptRows>
  struct Reduce {
    typename KeptRows::template Reduce<Online> all;
  };

  template <class KeptRows>
  __device__ void settle(const KeptRows&, Reduce<KeptRows>& reduce, typename KeptRows::State&,
                         const typename KeptRows::RowSet&) {
    v = reduce.all(v);
    inverse = 1 / v.sum;
  }

  __device__ float value(float x) const { return float(Online::exp(x, v.max) * inverse); }
  static __device__ float weight(float y) { return y; }
};

}  // namespace

LIGER_REGISTER(softmax_forward, probabilities::forward<Softmax, false>);
LIGER_REGISTER(softmax_backward, probabilities::backward<Softmax, false>);

}  // namespace liger::cuda::softmax
