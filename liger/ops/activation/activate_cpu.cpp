#include "liger/core/cpu/row.h"
#include "liger/ops/activation/activate.h"

namespace LIGER_CPU::activate {

LIGER_REGISTER(activate_forward, [](const ActivateForward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() {
    dispatch_activation(a.activation, [&]<class Act>() {
      for_row_chunks(1, a.count, [&](int64_t, int64_t begin, int64_t n) {
        row_map(
            n, static_cast<T*>(a.y) + begin, [](Vec x) { return Act::template value<Math>(x); },
            static_cast<const T*>(a.x) + begin);
      });
    });
  });
});
LIGER_REGISTER(activate_backward, [](const ActivateBackward& a, Stream) {
  dispatch(a.dtype, [&]<class T>() {
    dispatch_activation(a.activation, [&]<class Act>() {
      for_row_chunks(1, a.count, [&](int64_t, int64_t begin, int64_t n) {
        row_map(
            n, static_cast<T*>(a.dx) + begin, [](Vec dy, Vec x) { return dy * Act::template derivative<Math>(x); },
            static_cast<const T*>(a.dy) + begin, static_cast<const T*>(a.x) + begin);
        if (a.y)
          row_map(
              n, static_cast<T*>(a.y) + begin, [](Vec x) { return Act::template value<Math>(x); },
              static_cast<const T*>(a.x) + begin);
      });
    });
  });
});

}  // namespace LIGER_CPU::activate
