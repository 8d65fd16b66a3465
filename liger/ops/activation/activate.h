#pragma once
#include "liger/ops/activation/gated.h"

namespace liger {

/// y = act(x), element by element.
struct ActivateForward {
  const void* x;  // [count]
  void* y;        // [count]
  int64_t count;
  DType dtype;
  Activation activation;
};

/// dx = dy · act'(x).
struct ActivateBackward {
  const void *dy, *x;
  void* dx;
  int64_t count;
  DType dtype;
  Activation activation;
  void* y = nullptr;  // [count]: act(x) again, where it is given; may be dy
};

inline constinit Kernel<ActivateForward> activate_forward{"activate_forward"};
inline constinit Kernel<ActivateBackward> activate_backward{"activate_backward"};

}  // namespace liger
