#include "liger/core/torch/batch_invariant.h"
#include "liger/core/torch/operator.h"
#include "liger/functions/head.h"
#include "liger/ops/head/head_op.h"
#include "liger/ops/loss/selective_log_softmax_op.h"

namespace liger {
namespace op {

/// Logits that fit into the budget wait for backward, others are recomputed.
struct LinearLogProb {
  static constexpr Name kName = "linear_log_prob";
  static constexpr Autocast kAutocast = Autocast::Compute;
  struct Operands {
    Tensor hidden, weight;
    OptTensor bias;
    Tensor ids;
    OptTensor low_hidden, low_weight, class_ids;
    LIGER_FIELDS(hidden, weight, bias, ids, low_hidden, low_weight, class_ids)
  };
  struct Inputs {
    Operands of;
    OptTensor main_grad;  // float, where backward adds the weight's gradient, which is not returned then
    OptDtype dtype;
    LIGER_FIELDS(of, main_grad, dtype)
  };
  struct Options : LogProbOptions {
    LIGER_OPTIONS(temperature, softcap, logit_scale, ignore_index, entropy, lse, mean_logit, log_sum_squares, is_top1,
                  argmax, top_k, log_tail, valid_count, max_bytes, batch_invariant)

    /// The logits are map's of what the GEMM gives, divided by rest. A scale without a softcap is a part of the
    /// temperature.
    LogitMap map() const { return softcap > 0 ? LogitMap{float(logit_scale), float(softcap)} : LogitMap{}; }
    double rest() const { return softcap > 0 ? temperature : temperature / logit_scale; }
  };
  struct Record {
    Operands of;
    OptDtype dtype;
    int64_t keep_bytes;  // of logits, where all of them fit into that; 0: none, -1: what max_bytes or the default says
    LIGER_FIELDS(of, dtype, keep_bytes)
  };
  /// The numbers of each token, those that have a derivative first. class_logp is [..., count of class_ids], the last
  /// two are [..., top_k].
  struct Columns {
    Tensor logp, entropy, lse, mean_logit, class_logp, log_tail, log_sum_squares, is_top1, argmax, top_logp, top_ids;
    LIGER_FIELDS(logp, entropy, lse, mean_logit, class_logp, log_tail, log_sum_squares, is_top1, argmax, top_logp,
                 top_ids)
  };
  /// stats [tokens, 3], classes [tokens, count + 1], which are class_logp and log_tail, or none, and logits [tokens,
  /// classes] or none. Of all, the first rows are those of the kept tokens.
  struct Results {
    Columns columns;
    Tensor stats, classes, logits;
    LIGER_FIELDS(columns, stats, classes, logits)
  };
  static constexpr size_t kResults = 11;  // the columns
  struct Upstream {
    OptTensor dlogp, dentropy, dlse, dmean_logit, dclass_logp, dlog_tail;
    LIGER_FIELDS(dlogp, dentropy, dlse, dmean_logit, dclass_logp, dlog_tail)
  };
  struct Saved {
    Operands of;
    Untracked main_grad;
    Tensor stats, classes, logits;
    OptDtype dtype;
    LIGER_FIELDS(of, main_grad, stats, classes, logits, dtype)
  };
  template <class T>
  struct Gradients {
    T dhidden, dweight, dbias, dlow_hidden, dlow_weight;
    LIGER_FIELDS(dhidden, dweight, dbias, dlow_hidden, dlow_weight)
  };
  static constexpr std::array kGradientOf{0, 1, 2, -1, 3, 4, -1};

  static void check(const Options& o, const Operands& in, const OptTensor& main_grad, const OptDtype& dtype) {
    constexpr auto op = kName.text;
    const Arguments arguments(op, "hidden", in.hidden);
    TORCH_CHECK(in.weight.dim() == 2, op, ": weight must be [classes, width], got ", in.weight.sym_sizes());
    const c10::SymInt classes = in.weight.sym_size(0);
    const auto tokens = in.hidden.sym_sizes().slice(0, in.hidden.dim() - 1);
    arguments.shaped("weight", in.weight, {classes, in.hidden.sym_size(-1)}, Type::Kernels)
        .vector("bias", in.bias, classes, Type::Kernels)
        .shaped("ids", in.ids, tokens, Type::Integer)
        .present("low_hidden", in.low_hidden.has_value(), "low_weight", in.low_weight)
        .present("low_weight", in.low_weight.has_value(), "low_hidden", in.low_hidden)
        .shaped("main_grad", main_grad, in.weight.sym_sizes(), Type::Float);
    if (in.class_ids) head::check_class_ids(op, arguments, in.hidden, *in.class_ids);
    TORCH_CHECK_VALUE(in.class_ids || !o.log_tail, op, ": log_tail is of class_ids, which are None");
    if (in.low_weight) {
      TORCH_CHECK(in.low_weight->dim() == 2, op, ": low_weight must be [classes, rank], got ",
                  in.low_weight->sym_sizes());
      auto shape = tokens.vec();
      shape.push_back(in.low_weight->sym_size(1));
      arguments.shaped("low_hidden", in.low_hidden, shape, Type::Kernels)
          .shaped("low_weight", in.low_weight, {classes, in.low_weight->sym_size(1)}, Type::Kernels);
    }
    TORCH_CHECK_VALUE(o.temperature > 0, op, ": temperature must be positive, got ", o.temperature);
    TORCH_CHECK_VALUE(o.logit_scale > 0, op, ": logit_scale must be positive, got ", o.logit_scale);
    TORCH_CHECK_VALUE(o.softcap >= 0 && std::isfinite(o.softcap), op, ": softcap must be positive, or 0 for none, got ",
                      o.softcap);
    TORCH_CHECK_VALUE(classes > 0, op, ": there must be at least one class");
    TORCH_CHECK_VALUE(o.top_k >= 0 && o.top_k <= classes, op,
                      ": top_k must be between 0 and the number of classes, got ", o.top_k);
    TORCH_CHECK_TYPE(!dtype || has_dtype(*dtype), op,
                     ": dtype, in which it computes, must be float32, float16 or bfloat16");
  }

  static int64_t count_tokens(const Options& o, const Tensor& ids, const Tensor& weight) {
    return head::kept_count(ids, weight, o.valid_count, [&] { return ids.ne(o.ignore_index).sum().item<int64_t>(); });
  }

  /// The operands of the tokens that count, in the dtype of the GEMMs, and which tokens those are.
  struct Kept {
    head::HeadOperands operands;
    Tensor ids, all_ids, which, class_ids;
    int64_t tokens;

    Kept(const Options& o, const Operands& in, at::ScalarType dtype) {
      all_ids = in.ids.reshape(-1).to(at::kLong).contiguous(), tokens = all_ids.numel();
      which = head::kept_tokens(all_ids, o.ignore_index, count_tokens(o, all_ids, in.weight));
      ids = head::gather(which, all_ids);
      if (in.class_ids)
        class_ids =
            head::gather(which, in.class_ids->reshape({tokens, in.class_ids->size(-1)}).to(at::kLong)).contiguous();
      const auto rows = [&](const Tensor& t) {
        return head::gather(which, t.reshape({-1, t.size(-1)})).to(dtype).contiguous();
      };
      const auto all = [&](const OptTensor& t) { return t ? t->to(dtype).contiguous() : Tensor(); };
      operands = {rows(in.hidden), all(in.weight), all(in.bias), in.low_hidden ? rows(*in.low_hidden) : Tensor(),
                  all(in.low_weight)};
    }
  };

  /// Columns of `shape`, filled with 0 on a device; undefined unless asked for.
  static Columns make_columns(const Options& o, c10::SymIntArrayRef shape, const OptTensor& class_ids,
                              const at::TensorOptions& floats) {
    const auto column = [&](bool wanted, at::ScalarType dtype = at::kFloat,
                            std::optional<c10::SymInt> width = std::nullopt) {
      auto sizes = shape.vec();
      if (width) sizes.push_back(*width);
      return wanted ? at::zeros_symint(sizes, floats.dtype(dtype)) : Tensor();
    };
    return {column(true),
            column(o.entropy),
            column(o.lse),
            column(o.mean_logit),
            class_ids ? column(true, at::kFloat, class_ids->sym_size(-1)) : Tensor(),
            column(o.log_tail),
            column(o.log_sum_squares),
            column(o.is_top1, at::kBool),
            column(o.argmax, at::kLong),
            column(o.top_k > 0, at::kFloat, o.top_k),
            column(o.top_k > 0, at::kLong, o.top_k)};
  }

  /// Fills the columns of tokens [begin, begin + z's rows) from what the GEMM gave. z has its values in the end.
  static void fill(const Options& o, const Tensor& z, int64_t begin, const Kept& in, const Columns& to,
                   const Tensor& stats, const Tensor& classes) {
    // Which thread sums what depends on where in 16 bytes a row begins: here all begin alike.
    constexpr int64_t kAlike = 8, kRows = 512;
    const int64_t n = z.size(0), width = z.size(1);
    const bool invariant = o.batch_invariant || is_batch_invariant();
    if (invariant && z.stride(0) % kAlike != 0) {
      const Tensor alike = at::empty({std::min(n, kRows), round_up(width, kAlike)}, z.options()).narrow(1, 0, width);
      return for_chunks(n, kRows, [&](int64_t first, int64_t rows) {
        fill(o, alike.narrow(0, 0, rows).copy_(z.narrow(0, first, rows)), begin + first, in, to, stats, classes);
      });
    }
    const auto rows = [&](const Tensor& t) { return t.narrow(0, begin, n); };
    const auto if_wanted = [&](bool wanted, const Tensor& t) { return wanted ? rows(t) : Tensor(); };
    const Tensor ids = rows(in.ids), entropy = o.entropy ? rows(to.entropy) : at::empty({n}, stats.options());
    selective_log_softmax::LogitRows of{z, z.stride(0), ids, o.rest(), o.ignore_index, o.map(), invariant};
    const Tensor lse = o.lse ? rows(to.lse) : o.top_k > 0 ? at::empty({n}, stats.options()) : Tensor();
    selective_log_softmax::run_rows(of,
                                    {rows(to.logp), entropy, rows(stats), lse, if_wanted(o.mean_logit, to.mean_logit)});
    if (in.class_ids.defined())
      selective_log_softmax::run_classes(of, rows(in.class_ids), rows(stats), rows(classes), o.log_tail);
    if (o.log_sum_squares) {  // ln Σ exp(2 (z − m)) − 2 ln Σ exp(z − m)
      const Tensor scratch = at::empty({n}, stats.options()), twice = at::empty({n, 3}, stats.options());
      of.temperature /= 2;
      selective_log_softmax::run_rows(of, {scratch, at::empty_like(scratch), twice});
      rows(to.log_sum_squares).copy_(twice.select(1, 1).log().sub_(rows(stats).select(1, 1).log(), 2));
    }
    // The softcap keeps the order of logits: these read them before it, and are not misled by two that it rounds to one
    // value.
    if (o.is_top1 || o.argmax) {
      const Tensor argmax = z.argmax(-1);
      if (o.argmax) rows(to.argmax).copy_(argmax);
      if (o.is_top1) rows(to.is_top1).copy_(argmax.eq_(ids));
    }
    if (o.top_k > 0) {
      auto [y, at] = z.topk(o.top_k, -1);
      const LogitMap map = o.map();
      Tensor top = y.to(at::kFloat);
      if (!is_plain(map)) top.mul_(map.scale / map.softcap).tanh_().mul_(map.softcap);
      rows(to.top_logp).copy_(top.div_(o.rest()).sub_(lse.unsqueeze(1))), rows(to.top_ids).copy_(at);
    }
  }

  static int64_t most_kept(const Options& o, c10::Device device) {
    return o.max_bytes > 0 ? o.max_bytes : head::default_bytes(device);
  }

  /// Both passes must agree on the tokens that count; where it is not known what ids hold, both ask. How much is kept
  /// depends on the device, which is unknown in forward of a compiler's tensors: those are on `meta` there.
  static Record record(const Inputs& in, Options& o, const Gradients<bool>& wanted) {
    const bool keep = any(wanted);
    const Operands& of = in.of;
    if (in.main_grad) check(o, of, in.main_grad, in.dtype);
    if (keep && is_plain(of.ids) && is_plain(of.hidden) && of.weight.dim() == 2)
      o.valid_count = count_tokens(o, of.ids, of.weight);
    return {of, in.dtype, keep ? most_kept(o, of.hidden.device()) : 0};
  }

  static Results forward(const Record& record, const Options& o) {
    const auto& [of, asked, keep_bytes] = record;
    check(o, of, std::nullopt, asked);
    const auto floats = of.hidden.options().dtype(at::kFloat);
    const auto dtype = asked.value_or(of.hidden.scalar_type());
    const c10::SymInt all_tokens = of.ids.sym_numel();
    const int64_t most = keep_bytes < 0 ? most_kept(o, of.hidden.device()) : keep_bytes;
    const bool keep = most > 0 && all_tokens * of.weight.sym_size(0) * int64_t(c10::elementSize(dtype)) <= most;
    Results results;
    results.logits = output(at::empty_symint({keep ? all_tokens : c10::SymInt(0), of.weight.sym_size(0)},
                                             of.hidden.options().dtype(dtype)));
    results.stats = at::empty_symint({all_tokens, 3}, floats);
    const c10::SymInt count = of.class_ids ? of.class_ids->sym_size(-1) : c10::SymInt(0);
    results.classes = at::empty_symint({of.class_ids ? all_tokens : c10::SymInt(0), count + 1}, floats);
    if (of.hidden.is_meta()) {
      results.columns = make_columns(o, of.ids.sym_sizes(), of.class_ids, floats);
      return results;
    }
    const Kept in(o, of, dtype);
    const int64_t n = in.ids.numel();
    results.columns = make_columns(o, {n}, of.class_ids, floats);
    const auto rows = [&](const Tensor& z, int64_t begin, int64_t = 0) {
      fill(o, z, begin, in, results.columns, results.stats, results.classes);
    };
    if (keep) {
      const Tensor z = results.logits.narrow(0, 0, n);
      if (n > 0) in.operands.project(z, 0, o.batch_invariant), rows(z, 0);
    } else {
      head::Pass{.of = in.operands,
                 .wants = {},
                 .weight_dtype = of.weight.scalar_type(),
                 .max_bytes = o.max_bytes,
                 .in_blocks = o.batch_invariant}
          .run(rows);
    }
    if (in.class_ids.defined()) {
      const Tensor its = results.classes.narrow(0, 0, n);
      results.columns.class_logp.copy_(its.narrow(1, 0, in.class_ids.size(1)));
      if (o.log_tail) results.columns.log_tail.copy_(its.select(1, in.class_ids.size(1)));
    }
    place(o, in, of.ids.sizes(), results.columns);
    return results;
  }

  /// Puts the columns of the tokens that count to their places among all, where the others have 0.
  static void place(const Options& o, const Kept& in, at::IntArrayRef shape, Columns& columns) {
    // Where ignored tokens were not left out, the results that need not be 0 for them are set to 0.
    const bool ignores = !in.which.defined() && (o.log_sum_squares || o.is_top1 || o.argmax || o.top_k > 0);
    const Tensor ignored = ignores ? in.ids.eq(o.ignore_index) : Tensor();
    const auto put = [&](Tensor& t) {
      if (!t.defined()) return;
      if (ignores) t.masked_fill_(t.dim() > 1 ? ignored.unsqueeze(1) : ignored, 0);
      auto sizes = shape.vec();
      if (t.dim() > 1) sizes.push_back(t.size(1));
      t = head::scatter(in.which, t, in.tokens, 0).view(sizes);
    };
    columns.fields().apply([&](auto&... t) { (put(t), ...); });
  }

  static Saved save(const Inputs& in, const Results& out) {
    return {in.of, in.main_grad, out.stats, out.classes, out.logits, in.dtype};
  }

  static void check_saved(const char* op, const Upstream& up, const Saved& s, const Gradients<bool>& wanted,
                          const Options& o, at::ScalarType dtype) {
    const auto& [hidden, weight, bias, ids, low_hidden, low_weight, class_ids] = s.of;
    check(o, s.of, s.main_grad, s.dtype);
    const Arguments arguments(op, "hidden", hidden);
    arguments.shaped("dlogp", up.dlogp, ids.sym_sizes(), Type::Floating)
        .shaped("dentropy", up.dentropy, ids.sym_sizes(), Type::Floating)
        .shaped("dlse", up.dlse, ids.sym_sizes(), Type::Floating)
        .shaped("dmean_logit", up.dmean_logit, ids.sym_sizes(), Type::Floating)
        .shaped("dlog_tail", up.dlog_tail, ids.sym_sizes(), Type::Floating)
        .count("stats", s.stats, 3 * ids.sym_numel())
        .present("dclass_logp", up.dclass_logp.has_value(), "class_ids", class_ids)
        .present("with_dbias", wanted.dbias, "bias", bias)
        .present("with_dlow_hidden", wanted.dlow_hidden, "low_hidden", low_hidden)
        .present("with_dlow_weight", wanted.dlow_weight, "low_weight", low_weight);
    if (class_ids) arguments.shaped("dclass_logp", up.dclass_logp, class_ids->sym_sizes(), Type::Floating);
    arguments.count("classes", s.classes, class_ids ? ids.sym_numel() * (class_ids->sym_size(-1) + 1) : c10::SymInt(0));
    TORCH_CHECK_TYPE(s.logits.scalar_type() == dtype, op, ": logits must be of ", dtype, ", got ",
                     s.logits.scalar_type());
    TORCH_CHECK(s.logits.device() == hidden.device() && s.logits.dim() == 2 &&
                    s.logits.sym_size(1) == weight.sym_size(0) &&
                    (s.logits.sym_size(0) == 0 || s.logits.sym_size(0) == ids.sym_numel()),
                op, ": logits must be [", ids.sym_numel(), " or 0, ", weight.sym_size(0), "] on ", hidden.device(),
                ", got ", s.logits.sym_sizes(), " on ", s.logits.device());
  }

  /// The upstream gradients of the kept tokens, in float16 times `power`: there those of a mean over many tokens would
  /// vanish, and those that a loss scale has multiplied would overflow.
  struct OfKept {
    Tensor dlogp, dentropy, dlse, dmean_logit, power;
    Tensor dclass, level;  // of classes: their gradient, and that of lse which they see

    OfKept(const Options& o, const Upstream& up, const Kept& in, const Tensor& classes, at::ScalarType dtype) {
      const auto of_kept = [&](const OptTensor& g) {
        return g ? head::gather(in.which, g->reshape(-1).to(at::kFloat)).contiguous() : Tensor();
      };
      const auto or_zero = [&](const Tensor& g) {
        return g.defined() ? g : at::zeros({in.ids.numel()}, in.operands.hidden.options().dtype(at::kFloat));
      };
      dlogp = or_zero(of_kept(up.dlogp)), dentropy = or_zero(of_kept(up.dentropy));
      dlse = of_kept(up.dlse), dmean_logit = of_kept(up.dmean_logit);
      const Tensor dtail = of_kept(up.dlog_tail);
      if (up.dclass_logp || dtail.defined()) of_classes(up, in, classes, or_zero(dlse), dtail);
      if (dtype != at::kHalf) return;
      Tensor largest = dlogp.abs();
      for (const Tensor* g : {&dentropy, &dlse, &dmean_logit})
        if (g->defined()) largest = at::maximum(largest, g->abs());
      if (dclass.defined() && dclass.size(1) > 0) largest = at::maximum(largest, dclass.abs().amax(1));
      power = head::unit_power(largest.div_(o.rest())).mul_(2048);
      for (Tensor* g : {&dlogp, &dentropy, &dlse, &dmean_logit, &dclass, &level})
        if (g->defined()) *g = g->mul(power);
    }

   private:
    /// The gradient of ln p_c is [v = c] − p_v, and that of the mass outside the classes
    ///   ln Σ p_v:  p_v (1/Σ − 1) outside, −p_v inside
    /// so that all but [v = c] is one of lse, which inside and outside differs.
    void of_classes(const Upstream& up, const Kept& in, const Tensor& classes, const Tensor& of_lse,
                    const Tensor& dtail) {
      // Of a mass below this the gradient is that of this mass: its inverse is a float.
      constexpr double kLeast = -80;
      const int64_t count = in.class_ids.size(1), n = in.ids.numel();
      dclass = up.dclass_logp ? head::gather(in.which, up.dclass_logp->reshape({-1, count}).to(at::kFloat))
                                    .masked_fill(in.class_ids.lt(0), 0)
                                    .contiguous()
                              : at::zeros({n, count}, of_lse.options());
      level = of_lse - dclass.sum(1);
      dlse = level;
      if (!dtail.defined()) return;
      level = level - dtail;
      dlse = level + dtail * classes.narrow(0, 0, n).select(1, count).clamp_min(kLeast).neg().exp();
    }
  };

  /// overwrites: the kept logits, and main_grad, to which it adds the weight's gradient.
  static Gradients<Tensor> make_gradients(const char* op, const Upstream& up, const Saved& s,
                                          const Gradients<bool>& wanted, const Options& o, bool overwrites) {
    const auto dtype = s.dtype.value_or(s.of.hidden.scalar_type());
    check_saved(op, up, s, wanted, o, dtype);
    const bool adds = wanted.dweight && s.main_grad;
    if (s.of.hidden.is_meta()) {
      const auto like = [](bool wanted, const OptTensor& t) {
        return wanted ? at::empty_symint(t->sym_sizes(), t->options()) : Tensor();
      };
      return {like(wanted.dhidden, s.of.hidden), like(wanted.dweight && !adds, s.of.weight),
              like(wanted.dbias, s.of.bias), like(wanted.dlow_hidden, s.of.low_hidden),
              like(wanted.dlow_weight, s.of.low_weight)};
    }
    const Kept in(o, s.of, dtype);
    const OfKept g(o, up, in, s.classes, dtype);
    const Tensor stats = s.stats.contiguous(),
                 class_logp = g.dclass.defined() ? s.classes.narrow(1, 0, g.dclass.size(1)).contiguous() : Tensor();
    const auto work = [&](const Tensor& z, int64_t begin, int64_t first) {
      const auto part = [&](const Tensor& t) { return t.defined() ? t.narrow(0, begin, z.size(0)) : Tensor(); };
      const Tensor ids = part(in.ids);
      const selective_log_softmax::LogitRows of{z, z.stride(0), ids, o.rest(), o.ignore_index, o.map()};
      selective_log_softmax::LogitGradients up{part(g.dlogp), part(g.dentropy), part(g.dlse), part(g.dmean_logit)};
      selective_log_softmax::run_backward(of, up, part(stats), z, first, s.of.weight.size(0));
      if (!g.dclass.defined()) return;
      up.dlse = part(g.level);
      selective_log_softmax::run_class_backward(of, up, part(in.class_ids), part(g.dclass), part(class_logp),
                                                part(stats), z, first, s.of.weight.size(0));
    };
    const auto d =
        head::Pass{.of = in.operands,
                   .wants = {wanted.dhidden, wanted.dweight, wanted.dbias, wanted.dlow_hidden, wanted.dlow_weight},
                   .weight_dtype = s.of.weight.scalar_type(),
                   .max_bytes = o.max_bytes,
                   .logits = s.logits.size(0) > 0 ? s.logits.narrow(0, 0, in.ids.numel()) : Tensor(),
                   .copy_logits = !overwrites,
                   .in_blocks = o.batch_invariant,
                   .by_class = !o.batch_invariant,
                   .main_grad = value_or_undefined(s.main_grad)}
            .run(work, g.power);
    const auto rounded = [](const Tensor& t, const OptTensor& like) {
      return t.defined() ? t.to(like->scalar_type()) : t;
    };
    const auto of_tokens = [&](const Tensor& t, const OptTensor& like) {
      return t.defined() ? rounded(head::scatter(in.which, t, in.tokens, 0), like).view(like->sizes()) : t;
    };
    return {of_tokens(d.hidden, s.of.hidden), rounded(d.weight, s.of.weight), rounded(d.bias, s.of.bias),
            of_tokens(d.low_hidden, s.of.low_hidden), rounded(d.low_weight, s.of.low_weight)};
  }

  /// Changes none of its arguments, so that torch can batch it (is_grads_batched).
  static Gradients<Tensor> backward(const Upstream& up, const Saved& s, const Gradients<bool>& wanted,
                                    const Options& o) {
    constexpr auto op = "linear_log_prob_backward";
    TORCH_CHECK(!s.main_grad, op, ": main_grad must be None, ", op, "_ adds to it");
    return make_gradients(op, up, s, wanted, o, false);
  }

  static Gradients<Tensor> backward_(const Upstream& up, const Saved& s, const Gradients<bool>& wanted,
                                     const Options& o) {
    return make_gradients("linear_log_prob_backward", up, s, wanted, o, true);
  }

  static Gradients<Tensor> differentiate(const Upstream& upstream, const Saved& saved, const Gradients<bool>& wanted,
                                         const Options& o);
};

using LinearLogProbInPlace =
    Undifferentiated<"linear_log_prob_backward_", &LinearLogProb::backward_, "main_grad(m!) logits(a!)">;

LinearLogProb::Gradients<Tensor> LinearLogProb::differentiate(const Upstream& upstream, const Saved& saved,
                                                              const Gradients<bool>& wanted, const Options& o) {
  Upstream up = upstream;
  if (!o.entropy) up.dentropy.reset();
  if (!o.lse) up.dlse.reset();
  if (!o.mean_logit) up.dmean_logit.reset();
  if (!saved.of.class_ids) up.dclass_logp.reset();
  if (!o.log_tail) up.dlog_tail.reset();
  bool any = false, plain = is_plain(saved.logits);
  for (const OptTensor* g : {&up.dlogp, &up.dentropy, &up.dlse, &up.dmean_logit, &up.dclass_logp, &up.dlog_tail})
    if (*g) any = true, plain = plain && is_plain(**g);
  if (!any) return {};
  const bool overwrite = plain && !torch::autograd::get_current_graph_task_keep_graph();
  if (!overwrite && !saved.main_grad)
    return as_fields<Gradients<Tensor>>(Operator<LinearLogProb>::backward_op(up, saved, wanted, o));
  Saved s = saved;
  if (!overwrite) s.logits = s.logits.clone();
  auto d = as_fields<Gradients<Tensor>>(LinearLogProbInPlace::op(up, s, wanted, o));
  if (saved.main_grad) d.dweight.reset();
  return d;
}

}  // namespace op

LogProbResult linear_log_prob(const Tensor& hidden, const Tensor& weight, const Tensor& ids, const LogProbOptions& o,
                              const OptTensor& bias, const LowRank& low) {
  using Op = op::LinearLogProb;
  const OptTensor low_hidden = low.a ? OptTensor(at::linear(hidden, *low.a).mul(low.scale)) : std::nullopt;
  const auto c = as_fields<Op::Columns>(Operator<Op>::public_op(hidden, weight, bias, ids, low_hidden, low.b,
                                                                o.class_ids, o.main_grad, OptDtype(), Op::Options{o}));
  return {c.logp,
          if_wanted(o.entropy, c.entropy),
          if_wanted(o.log_sum_squares, c.log_sum_squares),
          if_wanted(o.mean_logit, c.mean_logit),
          if_wanted(o.is_top1, c.is_top1),
          if_wanted(o.lse, c.lse),
          if_wanted(o.argmax, c.argmax),
          if_wanted(o.top_k > 0, c.top_logp),
          if_wanted(o.top_k > 0, c.top_ids),
          if_wanted(o.class_ids.has_value(), c.class_logp),
          if_wanted(o.log_tail, c.log_tail)};
}

LIGER_OPERATORS(linear_log_prob, Operator<op::LinearLogProb>, op::LinearLogProbInPlace)

}  // namespace liger
