#include "liger/core/cuda/grouped_gemm.cuh"

namespace liger::cuda::grouped_gemm {

LIGER_REGISTER(has_grouped, [](const HasGrouped& a, Stream) { *a.yes = has_wgmma(); });
LIGER_REGISTER(grouped_rows,
               [](const GroupedRows& a, Stream s) { start_rows(a, s, [&]<class T>() { return MakesNothing(); }); });
LIGER_REGISTER(grouped_outer_products, [](const GroupedOuter& a, Stream s) {
  if (a.rows == 0) return clear(a.out, a.groups * a.cols_a * a.cols_b * 2, s);
  dispatch16(a.dtype, [&]<class T>() {
    start(OuterOfGroups<T>{.a = tensor_map(a.dtype, a.a, {a.cols_a, a.rows, 1}, {a.a_stride, a.a_stride}, 64),
                           .b = tensor_map(a.dtype, a.b, {a.cols_b, a.rows, 1}, {a.b_stride, a.b_stride}, 64),
                           .out = static_cast<T*>(a.out),
                           .ends = a.ends,
                           .groups = int(a.groups),
                           .cols_a = int(a.cols_a),
                           .cols_b = int(a.cols_b)},
          s);
  });
});

}  // namespace liger::cuda::grouped_gemm
