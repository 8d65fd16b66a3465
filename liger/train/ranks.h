#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <cstdint>
#include <memory>
#include <vector>

namespace liger::train {

/// The processes of one run, as torchrun starts them; they talk through c10d: by gloo on CPUs, by NCCL on GPUs. One
/// process alone needs neither.
class Ranks {
 public:
  /// Of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment, and LOCAL_RANK, whose GPU a rank takes where
  /// the device is "cuda". Raises c10::Error where there is no such GPU, and where there are several ranks and
  /// liger-train was built without what they talk by.
  explicit Ranks(at::Device device);

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  at::Device device() const { return device_; }

  /// Makes each tensor the sum of all ranks'. All have the same tensors on their device, in the same order.
  void sum(const std::vector<at::Tensor>& tensors) const;
  double sum(double value) const;
  std::vector<double> sum(const std::vector<double>& values) const;

  /// Makes each tensor that of one rank.
  void broadcast(const std::vector<at::Tensor>& tensors, int64_t from) const;

  /// Until all have come here.
  void wait() const;

 private:
  struct Group;
  std::shared_ptr<Group> group_;
  at::Device device_;
  int64_t rank_ = 0, size_ = 1;
};

}  // namespace liger::train
