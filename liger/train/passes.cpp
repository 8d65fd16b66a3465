#include "liger/train/passes.h"

#include <torch/torch.h>
#include <algorithm>
#include <filesystem>
#include <sstream>
#include "liger/nn/preference.h"

namespace liger::train {

using at::Tensor;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kWarmUp = 3;     // passes of a shape before it is captured
constexpr size_t kMostGraphs = 4;  // each of which holds the memory of a pass

/// What --lora-target may name, and the layers that this stands for, of which a model may have some only.
const std::vector<std::string> kAttention{"q_proj",    "k_proj",    "v_proj",    "o_proj",  "in_proj_qkv",
                                          "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"},
    kMLP{"gate_proj", "up_proj", "down_proj"};

LoraConfig lora_config(const Options& o, const nn::LlamaForCausalLM& model) {
  LoraConfig config{.rank = o.lora_rank, .alpha = o.lora_alpha, .rslora = o.lora_rslora, .dropout = o.lora_dropout};
  const auto parameters = model->named_parameters();
  const auto has = [&](const std::string& layer) {
    const std::string weight = "." + layer + ".weight";
    return std::any_of(parameters.begin(), parameters.end(),
                       [&](const auto& item) { return item.key().ends_with(weight); });
  };
  std::istringstream targets(o.lora_target);
  for (std::string target; std::getline(targets, target, ',');) {
    const size_t before = config.target_modules.size();
    for (const auto& [group, layers] : {std::pair("attention", &kAttention), std::pair("mlp", &kMLP)})
      for (const std::string& layer : *layers)
        if ((target == "all" || target == group || target == layer) && has(layer))
          config.target_modules.push_back(layer);
    TORCH_CHECK(config.target_modules.size() > before, "--lora-target: ", target, " is none of all, attention, mlp, ",
                c10::Join(", ", kAttention), ", ", c10::Join(", ", kMLP), ", or no layer of this model");
  }
  return config;
}

}  // namespace

Passes::Passes(const Options& options, at::Device device, Log& log, const std::string& newest)
    : options_(options), device_(device), log_(log) {
  make_model(newest);
  if (options_.loss == "dpo") make_reference();
}

/// The model that the run begins with, or goes on with from its newest checkpoint: with adapters that is one of them.
void Passes::make_model(const std::string& newest) {
  const auto dtype = options_.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
  torch::manual_seed(uint64_t(options_.seed));
  if (options_.fresh && newest.empty()) {
    LlamaConfig config = LlamaConfig::load(options_.model);
    config.dtype = dtype;
    model_ = nn::LlamaForCausalLM(config);
    model_->to(device_, dtype);
  } else {
    const bool whole = newest.empty() || options_.lora();
    model_ = nn::LlamaForCausalLM(nn::LlamaForCausalLMImpl::from_pretrained(whole ? options_.model : newest, dtype));
    if (options_.lora()) {
      if (!newest.empty()) model_->load_adapter(newest);
      else if (!options_.adapter.empty()) model_->load_adapter(options_.adapter);
      else model_->add_adapter(lora_config(options_, model_));
      model_->lora->base_model = fs::absolute(options_.model).lexically_normal().string();
    }
    model_->to(device_);
    if (!options_.base.empty()) model_->quantise(options_.base == "fp8" ? EightBit::E4M3 : EightBit::Int8);
    // Memory of their own: pages of a file lie where products are summed in another order, and are copied when written.
    // Frozen weights stay there, where processes share them.
    for (auto& parameter : model_->parameters())
      if (parameter.device().is_cpu() && parameter.requires_grad()) parameter.set_data(parameter.detach().clone());
  }
  model_->gradient_checkpointing = options_.gradient_checkpointing;
}

/// What DPO compares with: the model that the run began with. With adapters its weights are the model's.
void Passes::make_reference() {
  if (options_.lora()) {
    reference_ = nn::LlamaForCausalLM(model_->config, /*draw=*/false);
    const auto weights = model_->named_parameters();
    for (auto& item : reference_->named_parameters()) item.value().set_data(weights[item.key()].detach());
    if (!options_.adapter.empty()) reference_->load_adapter(options_.adapter);
  } else {  // its weights stay in the file's pages
    reference_ = nn::LlamaForCausalLM(nn::LlamaForCausalLMImpl::from_pretrained(options_.model, model_->config.dtype));
    reference_->to(device_);
  }
  for (auto& parameter : reference_->parameters()) parameter.requires_grad_(false);
  reference_->eval();
}

Outcome Passes::forward(const Batch& b, double counted, const Tensor& divisor) {
  const Tensor ids = b.ids.to(device_), labels = b.labels.to(device_);
  nn::CausalLMInputs inputs;
  if (b.positions.defined()) inputs.position_ids = b.positions.to(device_);
  if (!reference_.is_empty()) {
    const auto hidden = [&](nn::LlamaForCausalLM& model) { return model->hidden_states(ids, inputs).slice(1, 0, -1); };
    nn::DPOLoss loss(nn::DPOLossOptions().loss({.loss_type = options_.dpo_loss,
                                                .beta = options_.dpo_beta,
                                                .label_smoothing = options_.dpo_label_smoothing,
                                                .pairs = int64_t(counted)}));
    Tensor reference;
    {
      const torch::NoGradGuard no_gradients;
      reference = hidden(reference_);
    }
    const PreferenceResult result = loss->forward(hidden(model_), model_->head_weight(), labels.slice(1, 1), {},
                                                  reference, reference_->head_weight());
    const Tensor margins = (result.chosen_rewards - result.rejected_rewards).detach().to(at::kDouble);
    return {result.loss, double(margins.gt(0).sum().item<int64_t>()), margins.sum().item<double>()};
  }
  inputs.labels = labels, inputs.num_items = counted, inputs.divisor = divisor, inputs.packed = b.packed;
  return {model_->forward(ids, inputs).loss};
}

std::string Passes::reason_for_no_graphs() const {
  const bool adds_apart = options_.master_weights && options_.dtype != "float32";
  if (options_.cuda_graphs == "off") return "--cuda-graphs off";
  if (!device_.is_cuda()) return "there is no GPU";
  if (!Graph::available(device_)) return "liger-train was built without CUDA's headers";
  if (options_.loss != "causal") return "--loss " + options_.loss + " has rows of many lengths";
  if (options_.packing == "none") return "--packing none has rows of many lengths";
  if (options_.gradient_checkpointing) return "--gradient-checkpointing runs layers within backward";
  if (options_.accumulate > 1 && !adds_apart) return "without float copies passes add to the gradients of the first";
  return "";
}

void Passes::use_graphs() {
  no_graphs_ = reason_for_no_graphs();
  if (no_graphs_.empty()) Graph::use_stream(device_);
}

Outcome Passes::forward_backward(const Batch& batch, double counted) {
  const auto plain = [&](const Batch& b, const Tensor& divisor) {
    Outcome outcome = forward(b, counted, divisor);
    outcome.loss.backward();
    outcome.loss = outcome.loss.detach();
    return outcome;
  };
  if (!no_graphs_.empty()) return plain(batch, {});
  const std::pair key(batch.ids.sizes().vec(), batch.packed);
  auto found = std::find_if(captured_.begin(), captured_.end(), [&](const auto& each) { return each.first == key; });
  if (found == captured_.end()) {
    if (captured_.size() == kMostGraphs) return plain(batch, {});
    captured_.emplace_back(key, Captured{}), found = captured_.end() - 1;
  }
  Captured& c = found->second;
  auto parameters = model_->parameters();
  if (!c.graph) {
    if (c.seen++ < kWarmUp) return plain(batch, {});
    c.batch = batch;
    for (Tensor* t : {&c.batch.ids, &c.batch.labels, &c.batch.positions})
      if (t->defined()) *t = t->to(device_, t->scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    c.divisor = at::empty({}, at::TensorOptions(device_).dtype(at::kFloat));
    try {
      c.graph = std::make_unique<Graph>([&] { c.loss = plain(c.batch, c.divisor).loss; });
    } catch (const std::exception& error) {
      no_graphs_ = error.what();
      no_graphs_ = no_graphs_.substr(0, no_graphs_.find('\n'));
      log_.say("no CUDA graphs: " + no_graphs_);
      captured_.clear();
      for (Tensor& parameter : parameters) parameter.mutable_grad().reset();
      return plain(batch, {});
    }
    for (const Tensor& parameter : parameters) c.gradients.push_back(parameter.grad());
  }
  c.batch.ids.copy_(batch.ids), c.batch.labels.copy_(batch.labels), c.divisor.fill_(counted);
  if (batch.positions.defined()) c.batch.positions.copy_(batch.positions);
  c.graph->replay();
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = c.gradients[i];
  return {c.loss};
}

}  // namespace liger::train
