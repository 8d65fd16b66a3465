#include "liger/train/ranks.h"

#include <torch/types.h>
#include <cstdlib>
#include <string>
#ifdef LIGER_GLOO
#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
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

#ifdef LIGER_GLOO

struct Ranks::Group {
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo;
  ~Group() { gloo.reset(); }  // before the store, which it talks through
};

Ranks::Ranks() {
  if (variable("WORLD_SIZE").empty() || number("WORLD_SIZE") == 1) return;
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
  const auto of_gloo = c10d::ProcessGroupGloo::Options::create();
  of_gloo->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  group_->gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(group_->store, int(rank_), int(size_), of_gloo);
}

void Ranks::sum(const std::vector<at::Tensor>& tensors) const {
  if (!group_) return;
  in_buckets(tensors, [&](at::Tensor& tensor) {
    std::vector<at::Tensor> one{tensor};
    group_->gloo->allreduce(one)->wait();
  });
}

void Ranks::broadcast(const std::vector<at::Tensor>& tensors, int64_t from) const {
  if (!group_) return;
  in_buckets(tensors, [&](at::Tensor& tensor) {
    std::vector<at::Tensor> one{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = from;
    group_->gloo->broadcast(one, options)->wait();
  });
}

#else

struct Ranks::Group {};

Ranks::Ranks() {
  TORCH_CHECK(
      variable("WORLD_SIZE").empty() || number("WORLD_SIZE") == 1,
      "several processes need gloo, whose headers were not found when liger-train was built (Debian: libgloo-dev)");
}

void Ranks::sum(const std::vector<at::Tensor>&) const {}
void Ranks::broadcast(const std::vector<at::Tensor>&, int64_t) const {}

#endif

double Ranks::sum(double value) const {
  const at::Tensor all = at::full({1}, value, at::kDouble);
  sum({all});
  return all.item<double>();
}

void Ranks::wait() const { sum(0.); }

}  // namespace liger::train
