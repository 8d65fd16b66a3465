#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <memory>
#include <vector>

namespace liger::train {

/// The processes of one run, as torchrun starts them; they talk through c10d and gloo. One process alone needs neither.
class Ranks {
 public:
  /// Of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment. Raises c10::Error where there are several
  /// ranks and liger-train was built without gloo.
  Ranks();

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  /// Makes each tensor the sum of all ranks'. All have the same tensors, in the same order.
  void sum(const std::vector<at::Tensor>& tensors) const;
  double sum(double value) const;

  /// Makes each tensor that of one rank.
  void broadcast(const std::vector<at::Tensor>& tensors, int64_t from) const;

  /// Until all have come here.
  void wait() const;

 private:
  struct Group;
  std::shared_ptr<Group> group_;
  int64_t rank_ = 0, size_ = 1;
};

}  // namespace liger::train
