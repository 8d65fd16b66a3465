#include "liger/ops/linear/adapter_casts_op.h"
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>
#include <mutex>
#include <unordered_map>
#include "liger/core/partial_sums.h"

namespace liger {
namespace op::linear {
namespace adapter_casts {

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// The tensor, if there still is one.
Tensor alive(const Weak& weak) {
  auto impl = weak.lock();
  return impl ? Tensor(std::move(impl)) : Tensor();
}

/// A matrix as it was when it was noted or cast.
struct Part {
  Weak tensor;
  const void* data;
  uint32_t version;
  c10::DimVector sizes;

  explicit Part(const Tensor& t)
      : tensor(t.getIntrusivePtr()), data(t.const_data_ptr()), version(t._version()), sizes(t.sizes()) {}
  bool is(const Tensor& t) const {
    return tensor._unsafe_get_target() == t.unsafeGetTensorImpl() && data == t.const_data_ptr() &&
           version == t._version() && sizes == t.sizes();
  }
};

/// Matrices that one call casts together.
struct Group {
  int64_t owner;
  std::vector<Part> parts;
  at::TensorOptions options;  // of the cast
  Tensor cast;
  std::vector<Tensor> casts;  // of each matrix, in that
  bool fresh = false;
};

std::mutex mutex;
std::unordered_map<const c10::TensorImpl*, Group> groups;  // by the first matrix
thread_local int64_t owner = 0;                            // whose forward runs

bool is_capturing(const Tensor& t) {
  bool yes = false;
  run(stream_capturing, t, {.yes = &yes});
  return yes;
}

/// The matrices of a group, if all are there as whole as they were noted; a shard that is not gathered is not.
std::vector<Tensor> whole(const Group& group) {
  std::vector<Tensor> found;
  for (const Part& part : group.parts) {
    Tensor t = alive(part.tensor);
    if (!t.defined() || t.sizes() != part.sizes || !t.is_contiguous() || !t.has_storage() ||
        t.storage().nbytes() < size_t((t.storage_offset() + t.numel()) * t.element_size()))
      return {};
    found.push_back(std::move(t));
  }
  return found;
}

/// Begins a forward of the model `of`, any number but 0: casts what its calls were noted to cast, by one launch. Gives
/// how many numbers that are.
int64_t begin(int64_t of) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::lock_guard lock(mutex);
  owner = of;
  int64_t numbers = 0;
  std::vector<Tensor> from, to;
  for (auto at = groups.begin(); at != groups.end();) {
    Group& group = at->second;
    if (group.parts[0].tensor.expired()) {
      at = groups.erase(at);
      continue;
    }
    ++at;
    if (group.owner != of) continue;
    const std::vector<Tensor> parts = whole(group);
    group.fresh = !parts.empty() && !is_capturing(parts[0]);
    if (!group.fresh) continue;
    if (!group.cast.defined()) {
      int64_t all = 0;
      for (const Tensor& t : parts) all += t.numel();
      group.cast = at::empty({all}, group.options), all = 0;
      for (const Tensor& t : parts)
        group.casts.push_back(group.cast.narrow(0, all, t.numel()).view(t.sizes())), all += t.numel();
    }
    group.parts.clear();
    for (const Tensor& t : parts) group.parts.emplace_back(t);
    numbers += group.cast.numel();
    from.insert(from.end(), parts.begin(), parts.end()), to.insert(to.end(), group.casts.begin(), group.casts.end());
  }
  if (!to.empty()) at::_foreach_copy_(to, from);
  return numbers;
}

void end() { owner = 0; }

/// Frees what is held for a model.
void forget(int64_t of) {
  const std::lock_guard lock(mutex);
  std::erase_if(groups, [&](const auto& group) { return group.second.owner == of; });
}

}  // namespace adapter_casts

Tensor held_cast(const std::vector<Tensor>& parts, const Tensor& x) {
  using namespace adapter_casts;
  const bool again = torch::autograd::get_current_graph_task_id() != -1;
  const std::lock_guard lock(mutex);
  if (owner == 0 && groups.empty()) return {};
  for (const Tensor& t : parts)
    if (!t.has_storage() || t.is_inference() || !t.is_contiguous() || t.device() != x.device()) return {};
  if (is_capturing(x)) return {};
  const auto found = groups.find(parts[0].unsafeGetTensorImpl());
  bool same =
      found != groups.end() && found->second.parts.size() == parts.size() && found->second.options.dtype() == x.dtype();
  for (size_t i = 0; same && i < parts.size(); ++i) same = found->second.parts[i].is(parts[i]);
  if (same && found->second.fresh && (again || found->second.owner == owner)) return found->second.cast.variable_data();
  if (owner && !again) {
    Group group{owner, {}, x.options()};
    for (const Tensor& t : parts) group.parts.emplace_back(t);
    groups.insert_or_assign(parts[0].unsafeGetTensorImpl(), std::move(group));
  } else if (found != groups.end() && !again) {
    found->second.fresh = false;  // it is called outside of its model: so are what it is part of, and they run again so
  }
  return {};
}

}  // namespace op::linear

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("begin_adapter_casts(int of) -> int", op::linear::adapter_casts::begin);
  m.def("end_adapter_casts() -> ()", op::linear::adapter_casts::end);
  m.def("forget_adapter_casts(int of) -> ()", op::linear::adapter_casts::forget);
}

}  // namespace liger
