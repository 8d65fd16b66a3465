#pragma once
#include "liger/core/torch/operator.h"
#include "liger/ops/rope/rope.h"

namespace liger::op::rope {

/// Columns of a head that are rotated: `asked`, or as many as the tables have angles for.
int64_t rotated_columns(const Tensor& cos, bool interleaved, int64_t asked);

/// Refuses tables that do not fit the tensors of an operator; `op` is its name.
void check_tables(const char* op, const Arguments& arguments, const Tensor& cos, const Tensor& sin,
                  const c10::SymInt& batch, const c10::SymInt& seq, const c10::SymInt& dim, bool interleaved,
                  at::IntArrayRef sections, int64_t rotary_dim);

/// The same for q and k [batch, heads, seq, dim], with these two.
void check(const char* op, const Arguments& arguments, const Tensor& q, const Tensor& k, const Tensor& cos,
           const Tensor& sin, bool interleaved, at::IntArrayRef sections, int64_t rotary_dim);

/// [batch, heads, seq, dim] over [batch, seq, heads, dim], the order in which the projections around attention read and
/// write.
Tensor empty_heads(const Tensor& t);

Tensor with_unit_stride(const Tensor& t);

/// A table in a dtype that kernels read beside x.
Tensor table_like(const Tensor& table, const Tensor& x);

RopeTensor describe(const Tensor& in, const Tensor& out);

/// Runs the kernel on tensors of x's sizes but for heads.
void rotate(const RopeTensor& q, const RopeTensor& k, const RopeTensor& v, const Tensor& x, const Tensor& cos,
            const Tensor& sin, bool inverse, bool interleaved, at::IntArrayRef sections, int64_t rotary_dim);

}  // namespace liger::op::rope
