#pragma once
// How tests compare the C++ API with libtorch.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <vector>

namespace {

using torch::Tensor;

/// f's value and the gradients of its inputs, under one upstream gradient.
template <class F>
std::vector<Tensor> run(F f, const std::vector<Tensor>& inputs) {
  std::vector<Tensor> leaves;
  for (const auto& t : inputs) leaves.push_back(t.clone().requires_grad_());
  Tensor y = f(leaves);
  torch::manual_seed(1);
  y.backward(torch::randn_like(y));
  std::vector<Tensor> all{y.detach()};
  for (const auto& t : leaves) all.push_back(t.grad());
  return all;
}

/// Floats agree within a few units of rounding of the largest value.
void expect_close(const std::vector<Tensor>& ours, const std::vector<Tensor>& theirs) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i)
    EXPECT_LE((ours[i] - theirs[i]).abs().max().item<double>(), 1e-5 * (1 + theirs[i].abs().max().item<double>()))
        << "result " << i;
}

}  // namespace
