#include "liger/train/optimizer.h"

#include <torch/types.h>
#include <algorithm>
#include <cmath>
#include <numbers>
#include "liger/functions/optimizer.h"

namespace liger::train {

Optimizer::Optimizer(const torch::nn::Module& model, const Options& options, const Ranks& ranks)
    : options_(options), ranks_(ranks) {
  std::vector<int64_t> load(ranks.size());
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!parameter.requires_grad()) continue;
    Weight weight{item.key(), -1, parameter, {}, {}, {}, {}};
    if (options.shard_optimizer) {
      const auto least = std::min_element(load.begin(), load.end());
      weight.owner = least - load.begin();
      *least += parameter.numel();
    }
    if (mine(weight)) {
      const at::Tensor updated = has_copy(weight) ? parameter.detach().to(at::kFloat) : parameter.detach();
      if (has_copy(weight)) weight.master = updated;
      weight.mean = at::zeros_like(updated), weight.square = at::zeros_like(updated);
    }
    weights_.push_back(std::move(weight));
  }
  steps_ = at::zeros({}, at::kFloat);
}

void Optimizer::accumulate() {
  // The kernel reads gradients of 16 bits as they are: a float copy of them is for sums.
  const bool adds = options_.accumulate > 1 || ranks_.size() > 1;
  for (Weight& weight : weights_) {
    at::Tensor& gradient = weight.parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (!has_copy(weight) || !adds) {
      weight.gradient = gradient;
      continue;
    }
    weight.gradient = weight.gradient.defined() ? weight.gradient.add_(gradient) : gradient.to(at::kFloat);
    gradient.reset();
  }
}

double Optimizer::step(double lr) {
  const at::NoGradGuard no_gradients;
  std::vector<at::Tensor> all;
  for (const Weight& weight : weights_)
    if (weight.gradient.defined()) all.push_back(weight.gradient);
  ranks_.sum(all);
  const at::Tensor norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(all, 2, at::kFloat)));
  AdamWOptions settings{.lr = lr, .beta1 = options_.beta1, .beta2 = options_.beta2, .eps = options_.eps};
  if (options_.clip > 0) settings.factor = (options_.clip / (norm + 1e-6)).clamp_max(1);
  const at::Tensor steps = at::add(steps_, 1).to(norm.device());
  for (const auto& [decays, copies] : {std::pair(true, true), {true, false}, {false, true}, {false, false}}) {
    std::vector<at::Tensor> parameters, gradients, means, squares, masters;
    for (const Weight& weight : weights_) {
      if (!weight.gradient.defined() || !mine(weight)) continue;
      if ((weight.parameter.dim() > 1) != decays || has_copy(weight) != copies) continue;
      parameters.push_back(weight.parameter), gradients.push_back(weight.gradient);
      means.push_back(weight.mean), squares.push_back(weight.square);
      if (copies) masters.push_back(weight.master);
    }
    if (parameters.empty()) continue;
    settings.weight_decay = decays ? options_.weight_decay : 0;
    adamw_(parameters, gradients, means, squares, masters, std::vector(parameters.size(), steps), settings);
  }
  steps_ += 1;
  for (Weight& weight : weights_) {
    weight.gradient.reset();
    weight.parameter.mutable_grad().reset();
  }
  for (int64_t rank = 0; options_.shard_optimizer && rank < ranks_.size(); ++rank) {
    std::vector<at::Tensor> updated;
    for (const Weight& weight : weights_)
      if (weight.owner == rank) updated.push_back(weight.parameter);
    ranks_.broadcast(updated, rank);
  }
  return norm.item<double>();
}

NamedTensors Optimizer::state() const {
  NamedTensors tensors{{"steps", steps_}};
  for (const Weight& weight : weights_) {
    if (!mine(weight)) continue;
    if (has_copy(weight)) tensors.emplace_back("master." + weight.name, weight.master);
    tensors.emplace_back("mean." + weight.name, weight.mean);
    tensors.emplace_back("square." + weight.name, weight.square);
  }
  return tensors;
}

void Optimizer::load(const std::vector<SafetensorsFile>& files) {
  const at::NoGradGuard no_gradients;
  for (const auto& [name, tensor] : state()) {
    const auto file = std::find_if(files.begin(), files.end(), [&](const auto& f) { return f.contains(name); });
    TORCH_CHECK(file != files.end(), "the optimiser's state is of another model: there is no ", name);
    const at::Tensor saved = file->tensor(name);
    TORCH_CHECK(saved.sizes() == tensor.sizes() && saved.scalar_type() == tensor.scalar_type(),
                "the optimiser's state is of another model: ", name, " is of ", saved.scalar_type(), saved.sizes());
    tensor.copy_(saved);
  }
}

double learning_rate(const Options& o, int64_t step) {
  if (step < o.warmup) return o.lr * double(step) / double(o.warmup);
  const double progress = double(step - o.warmup) / double(std::max<int64_t>(1, o.steps - o.warmup));
  if (o.schedule == "cosine") return o.lr * std::max(0., 0.5 * (1 + std::cos(std::numbers::pi * progress)));
  if (o.schedule == "linear") return o.lr * std::max(0., 1 - progress);
  return o.lr;
}

}  // namespace liger::train
