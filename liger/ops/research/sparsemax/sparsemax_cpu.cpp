#include "liger/core/cpu/row.h"
#include "liger/ops/research/sparsemax/sparsemax.h"

namespace LIGER_CPU::sparsemax {
namespace {

template <class T>
void sparsemax_row(const T* x, T* y, int64_t n, std::vector<float>& members) {
  // τ is searched as its distance from the largest value, which is a member of the support however large it is.
  const float max = row_reduce(
                  n, -INFINITY, Max{}, [](Vec x) { return x; }, x),
              bound = std::min(floor_of(max - 1.), std::nextafterf(max, -INFINITY));
  members.clear();
  for_each(n, [&](int64_t c, int64_t k) {
    const Vec v = read(x + c, k);
    if ((v <= Vec(bound)).zero_mask() == 0) return;  // none of them
    float lanes[kLanes];
    v.store(lanes);
    std::copy_if(lanes, lanes + k, std::back_inserter(members), [&](float v) { return !(v <= bound); });
  });
  double tau;
  for (size_t before;;) {
    before = members.size();
    double sum = 0;
    for (const float v : members) sum += double(v) - max;
    tau = (sum - 1) / double(before);
    std::erase_if(members, [&](float v) { return double(v) - max <= tau; });
    if (members.size() == before) break;
  }
  // τ in two floats, and what a difference from it was rounded by (Knuth's TwoSum), so that y has no error but its own.
  // NaN in x, and no finite largest value, make it NaN.
  const float rounded = float(max + tau);
  const Vec high{rounded}, low{float(max - double(rounded) + tau)}, zero(0.f), least(-1.f);
  row_map(
      n, y,
      [&](Vec x) {
        const Vec d = x - high, back = d - x,
                  v = d - low - Vec::blendv(zero, (high + back) - (x - (d - back)), d > least);
        return Vec::blendv(v, zero, v <= zero);
      },
      x);
}

template <class T>
void sparsemax_row_backward(const T* dy, const T* y, T* dx, int64_t n) {
  const Vec zero(0.f), one(1.f);
  const auto inside = [&](Vec v, Vec y) { return Vec::blendv(v, zero, y <= zero); };
  const float sum = row_sum(n, inside, dy, y), count = row_sum(n, [&](Vec y) { return inside(one, y); }, y);
  const Vec mean(sum / count);
  row_map(n, dx, [&](Vec dy, Vec y) { return inside(dy - mean, y); }, dy, y);
}

}  // namespace

LIGER_REGISTER(sparsemax_forward, [](const SoftmaxForward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() {
    for_runs(a.rows, a.cols * 8, [&](int64_t begin, int64_t end) {
      std::vector<float> members;
      for (int64_t r = begin; r < end; ++r) {
        const T* x = row_of<T>(a.x, r, a.x_stride);
        T* y = row_of<T>(a.y, r, a.cols);
        const int64_t n = length(a, r);
        sparsemax_row(x, y, n, members);
        std::fill(y + n, y + a.cols, T(0));
      }
    });
  });
});

LIGER_REGISTER(sparsemax_backward, [](const SoftmaxBackward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() {
    for_rows(a.rows, a.cols, [&](int64_t r) {
      sparsemax_row_backward(row_of<T>(a.dy, r, a.cols), row_of<T>(a.y, r, a.cols), row_of<T>(a.dx, r, a.cols), a.cols);
    });
  });
});

}  // namespace LIGER_CPU::sparsemax
