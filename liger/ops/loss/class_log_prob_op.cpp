#include "liger/ops/loss/class_log_prob.h"
#include "liger/ops/loss/selective_log_softmax_op.h"

namespace liger::op::selective_log_softmax {

void run_classes(const LogitRows& of, const Tensor& classes, const Tensor& stats, const Tensor& logp,
                 const Tensor& logits) {
  if (classes.numel() == 0) return;
  int64_t bad_class = -1;
  run(class_log_probs, logp,
      {.x = data(of.x),
       .ids = data<int64_t>(of.ids),
       .classes = data<int64_t>(classes),
       .stats = data<float>(stats),
       .logp = data<float>(logp),
       .logits = data<float>(logits),
       .bad_class = &bad_class,
       .rows = of.ids.numel(),
       .cols = cols(of.x),
       .count = classes.size(1),
       .x_stride = of.x_stride,
       .ignore_index = of.ignore_index,
       .inverse_temperature = float(1 / of.temperature),
       .map = of.map,
       .dtype = dtype_of(of.x)});
  TORCH_CHECK_INDEX(bad_class == -1, "class_ids: class ", bad_class, " is out of bounds: it is outside [0, ",
                    cols(of.x), ") and not -1, for none");
}

void write_classes(const LogitRows& of, const Tensor& classes, const Tensor& logits) {
  if (classes.numel() == 0) return;
  run(class_logits_write, of.x,
      {.x = of.x.data_ptr(),
       .ids = data<int64_t>(of.ids),
       .classes = data<int64_t>(classes),
       .logits = data<float>(logits),
       .rows = of.ids.numel(),
       .count = classes.size(1),
       .x_stride = of.x_stride,
       .ignore_index = of.ignore_index,
       .dtype = dtype_of(of.x)});
}

void run_class_backward(const LogitRows& of, const LogitGradients& g, const Tensor& classes, const Tensor& dclass,
                        const Tensor& logp, const Tensor& stats, const Tensor& dx, int64_t first, int64_t all_classes) {
  if (classes.numel() == 0) return;
  run(class_gradients, dx,
      {.dlogp = data<float>(g.dlogp),
       .dentropy = data<float>(g.dentropy),
       .level = data<float>(g.dlse),
       .dmean_logit = data<float>(g.dmean_logit),
       .dclass = data<float>(dclass),
       .logp = data<float>(logp),
       .stats = data<float>(stats),
       .ids = data<int64_t>(of.ids),
       .classes = data<int64_t>(classes),
       .dx = dx.data_ptr(),
       .rows = rows(dx),
       .cols = cols(dx),
       .count = classes.size(1),
       .ignore_index = of.ignore_index,
       .first = first,
       .all_classes = all_classes,
       .inverse_temperature = float(1 / of.temperature),
       .map = of.map,
       .dtype = dtype_of(dx)});
}

}  // namespace liger::op::selective_log_softmax
