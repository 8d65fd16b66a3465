#include <limits>
#include "liger/ops/embedding/embedding.h"
#include "liger/core/torch/operator.h"
#include "liger/functions/embedding.h"

namespace liger {
namespace op {

struct Embedding {
  static constexpr Name kName = "embedding";
  struct Inputs {
    Tensor weight, ids;
    LIGER_FIELDS(weight, ids)
  };
  struct Options {
    int64_t padding_idx = -1;
    LIGER_OPTIONS(padding_idx)
  };
  struct Saved {
    Tensor ids;
    c10::SymInt classes;
    LIGER_FIELDS(ids, classes)
  };
  using Upstream = Dy;
  template <class T>
  struct Gradients {
    T dw;
    LIGER_FIELDS(dw)
  };

  static Tensor forward(const Inputs& in, const Options& options) {
    const Tensor &w_ = in.weight, &ids_ = in.ids;
    const int64_t padding_idx = options.padding_idx;
    Arguments("embedding", "weight", w_).any("ids", ids_, Type::Integer);
    TORCH_CHECK(w_.dim() == 2, "embedding: weight must be [classes, width], got ", w_.sym_sizes());
    TORCH_CHECK_VALUE(padding_idx < w_.sym_size(0), "embedding: padding_idx must be below ", w_.sym_size(0),
                      ", or negative for none, got ", padding_idx);
    c10::SymDimVector shape(ids_.sym_sizes());
    shape.push_back(w_.sym_size(1));
    const Tensor y = output(at::empty_symint(shape, w_.options()));
    if (y.is_meta() || y.numel() == 0) return y;
    const Tensor w = w_.contiguous(), ids = ids_.to(at::kLong).contiguous();
    int64_t bad_id = 0;
    run(embedding_forward, w,
        {.w = data(w),
         .ids = data<int64_t>(ids),
         .y = y.data_ptr(),
         .bad_id = &bad_id,
         .tokens = ids.numel(),
         .classes = w.size(0),
         .cols = w.size(1),
         .dtype = dtype_of(w)});
    TORCH_CHECK_INDEX(bad_id == 0 && w.size(0) > 0, "embedding: id ", bad_id, " is out of range: it is outside [0, ",
                      w.size(0), ")");
    return y;
  }

  static Saved save(const Inputs& in, const Tensor&) { return {in.ids, in.weight.sym_size(0)}; }

  static Tensor backward(const Upstream& up, const Saved& saved, const Options& options) {
    const Tensor &dy_ = up.dy, &ids_ = saved.ids;
    const c10::SymInt& classes_ = saved.classes;
    Arguments("embedding_backward", "dy", dy_).any("ids", ids_, Type::Integer);
    TORCH_CHECK(dy_.dim() == ids_.dim() + 1 && dy_.sym_sizes().slice(0, ids_.dim()) == ids_.sym_sizes(),
                "embedding_backward: dy must be [", ids_.sym_sizes(), ", width], got ", dy_.sym_sizes());
    TORCH_CHECK_VALUE(classes_ >= 0, "embedding_backward: classes must not be negative, got ", classes_);
    const Tensor dw = output(at::empty_symint({classes_, dy_.sym_size(-1)}, dy_.options()));
    if (dw.is_meta() || dw.numel() == 0) return dw;
    const int64_t classes = classes_.expect_int(), tokens = ids_.numel();
    TORCH_CHECK(std::max(tokens, classes) < std::numeric_limits<int>::max(),
                "embedding: at most 2^31 tokens and classes, got ", tokens, " and ", classes);
    if (tokens == 0) return dw.zero_();
    const Tensor dy = dy_.contiguous(), ids = ids_.to(at::kLong).contiguous();
    int64_t bytes = 0;
    EmbeddingBackward a{.dy = data(dy),
                        .ids = data<int64_t>(ids),
                        .dw = dw.data_ptr(),
                        .scratch = nullptr,
                        .scratch_bytes = &bytes,
                        .tokens = tokens,
                        .classes = classes,
                        .cols = dy.size(-1),
                        .padding = options.padding_idx,
                        .dtype = dtype_of(dy)};
    run(embedding_backward, dy, a);
    const Tensor scratch = at::empty({bytes}, ids.options().dtype(at::kByte));
    a.scratch = scratch.data_ptr();
    run(embedding_backward, dy, a);
    return dw;
  }
};

}  // namespace op

Tensor embedding(const Tensor& weight, const Tensor& ids, int64_t padding_idx) {
  return Operator<op::Embedding>::public_op(weight, ids, padding_idx);
}

LIGER_OPERATORS(embedding, Operator<op::Embedding>)

}  // namespace liger
