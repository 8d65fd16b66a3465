#include "liger/ops/loss/class_log_prob.h"
#include "liger/ops/loss/selective_log_softmax_op.h"

namespace liger::op::selective_log_softmax {
namespace {

/// logp and, unless undefined, logits [rows, count] at the classes.
void read_classes(const LogitRows& of, const Tensor& classes, const Tensor& stats, const Tensor& logp,
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

/// Puts logits [rows, count], or -inf where they are undefined, in x's place at the classes.
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

/// The statistics of rows without the classes, in whose place x has -inf then.
void run_others(const LogitRows& of, const Tensor& classes, const Tensor& stats) {
  const Tensor scratch = at::empty({of.ids.numel()}, stats.options());
  write_classes(of, classes, Tensor());
  run_rows(of, {scratch, at::empty_like(scratch), stats});
}

}  // namespace

void run_classes(const LogitRows& of, const Tensor& classes, const Tensor& stats, const Tensor& to, bool log_tail) {
  const int64_t count = classes.size(1), n = of.ids.numel();
  const Tensor logp = at::empty({n, count}, stats.options()), raw = log_tail ? at::empty_like(logp) : Tensor();
  read_classes(of, classes, stats, logp, raw);
  to.narrow(1, 0, count).copy_(logp);
  if (!log_tail) return;
  // A sum without the classes, whose logits come back: no difference of two sums that are nearly equal.
  const Tensor others = at::empty({n, 3}, stats.options());
  if (is_plain(of.map)) {
    run_others(of, classes, others);
    write_classes(of, classes, raw);
  } else {  // a softcap would map -inf to a number: of a part of the rows in float, mapped
    constexpr int64_t kRows = 256;
    for_chunks(n, kRows, [&](int64_t begin, int64_t rows) {
      const auto part = [&](const Tensor& t) { return t.narrow(0, begin, rows); };
      Tensor z = part(of.x).to(at::kFloat, false, true);
      if (of.map.softcap > 0) z.mul_(of.map.scale / of.map.softcap).tanh_().mul_(of.map.softcap);
      else z.mul_(of.map.scale);
      const Tensor ids = part(of.ids);
      run_others({z, z.stride(0), ids, of.temperature, of.ignore_index, {}, of.fixed_chunks}, part(classes),
                 part(others));
    });
  }
  to.select(1, count).copy_((others.select(1, 0) - stats.select(1, 0))
                                .div_(of.temperature)
                                .add_(others.select(1, 1).log())
                                .sub_(stats.select(1, 1).log())
                                .masked_fill_(of.ids.eq(of.ignore_index), 0));
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
