#include "liger/train/ranks.h"

#include <ATen/DeviceAccelerator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/cuda.h>
#include <torch/types.h>
#include <cstdlib>
#include <string>
#ifdef LIGER_GLOO
#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif
#ifdef LIGER_NCCL
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace liger::train {
namespace {

constexpr int64_t kBucketBytes = int64_t(32) << 20;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int64_t number(const char* name) {
  const std::string value = variable(name);
  char* end = nullptr;
  const int64_t result = std::strtoll(value.c_str(), &end, 10);
  TORCH_CHECK(!value.empty() && *end == 0 && result >= 0, "torchrun's variable ", name, " is \"", value, "\"");
  return result;
}

/// Calls with(one) for tensors joined to as large ones as a bucket holds, and copies the results back.
template <class F>
void in_buckets(const std::vector<at::Tensor>& tensors, F with) {
  std::vector<at::Tensor> bucket;
  int64_t bytes = 0;
  const auto flush = [&] {
    if (bucket.size() == 1 && bucket[0].is_contiguous()) {
      with(bucket[0]);
    } else if (!bucket.empty()) {
      std::vector<at::Tensor> flat;
      for (const at::Tensor& tensor : bucket) flat.push_back(tensor.reshape(-1));
      at::Tensor joined = at::cat(flat);
      with(joined);
      int64_t at = 0;
      for (const at::Tensor& tensor : bucket) {
        tensor.copy_(joined.narrow(0, at, tensor.numel()).view(tensor.sizes()));
        at += tensor.numel();
      }
    }
    bucket.clear();
    bytes = 0;
  };
  for (const at::Tensor& tensor : tensors) {
    const int64_t more = tensor.numel() * tensor.element_size();
    if (!bucket.empty() && (bytes + more > kBucketBytes || tensor.scalar_type() != bucket[0].scalar_type())) flush();
    bucket.push_back(tensor.detach());
    bytes += more;
  }
  flush();
}

}  // namespace

struct Ranks::Group {
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Backend> backend;
  ~Group() { backend.reset(); }  // before the store, which it talks through
};

namespace {

c10::intrusive_ptr<c10d::Backend> make_backend(at::Device device, const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int size) {
  if (device.is_cpu()) {
#ifdef LIGER_GLOO
    const auto options = c10d::ProcessGroupGloo::Options::create();
    options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
    return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
#endif
  } else if (device.is_cuda()) {
#ifdef LIGER_NCCL
    auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size);
    backend->setBoundDeviceId(device);
    return backend;
#endif
  }
  TORCH_CHECK(false, "several processes on ", device.type(), " need ", device.is_cpu() ? "gloo" : "NCCL",
              ", whose headers were not found when liger-train was built (docs/cpp.md)");
}

}  // namespace

Ranks::Ranks(at::Device device) : device_(device) {
  const bool alone = variable("WORLD_SIZE").empty() || number("WORLD_SIZE") == 1;
  if (!device_.is_cpu()) {
    const int64_t count = int64_t(torch::cuda::device_count());
    TORCH_CHECK(count > 0, "--device ", device_, ": there is no GPU that torch can use");
    if (!device_.has_index()) device_.set_index(c10::DeviceIndex(alone ? 0 : number("LOCAL_RANK")));
    TORCH_CHECK(device_.index() < count, "--device ", device_, ": there is no such GPU, but ", count,
                ", the first of which is cuda:0");
    at::accelerator::setDeviceIndex(device_.index());
  }
  if (alone) return;
  rank_ = number("RANK"), size_ = number("WORLD_SIZE");
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(number("MASTER_PORT"));
  options.isServer = rank_ == 0 && variable("TORCHELASTIC_USE_AGENT_STORE") != "True";  // else torchrun's own is there
  options.numWorkers = static_cast<size_t>(size_);
  options.waitWorkers = false;
  group_ = std::make_shared<Group>();
  const auto store = c10::make_intrusive<c10d::TCPStore>(variable("MASTER_ADDR"), options);
  group_->store =
      c10::make_intrusive<c10d::PrefixStore>("liger-train/" + variable("TORCHELASTIC_RESTART_COUNT"), store);
  group_->backend = make_backend(device_, group_->store, int(rank_), int(size_));
}

void Ranks::sum(const std::vector<at::Tensor>& tensors) const {
  if (!group_) return;
  in_buckets(tensors, [&](at::Tensor& tensor) {
    std::vector<at::Tensor> one{tensor};
    group_->backend->allreduce(one)->wait();
  });
}

void Ranks::broadcast(const std::vector<at::Tensor>& tensors, int64_t from) const {
  if (!group_) return;
  in_buckets(tensors, [&](at::Tensor& tensor) {
    std::vector<at::Tensor> one{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = from;
    group_->backend->broadcast(one, options)->wait();
  });
}

double Ranks::sum(double value) const { return sum(std::vector<double>{value})[0]; }

std::vector<double> Ranks::sum(const std::vector<double>& values) const {
  if (!group_) return values;
  const at::Tensor all = torch::tensor(values, at::kDouble).to(device_);
  sum(std::vector<at::Tensor>{all});
  const at::Tensor read = all.cpu();
  return {read.const_data_ptr<double>(), read.const_data_ptr<double>() + read.numel()};
}

void Ranks::wait() const { sum(0.); }

}  // namespace liger::train
