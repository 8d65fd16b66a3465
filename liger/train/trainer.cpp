#include "liger/train/trainer.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/torch.h>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include "liger/nn/preference.h"
#include "liger/train/stop.h"

namespace liger::train {

using at::Tensor;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kWarmUp = 3;     // passes of a shape before it is captured
constexpr size_t kMostGraphs = 4;  // each of which holds the memory of a pass

/// The most memory that the process held: on the GPU, or resident. (What getrusage says may be that of the process
/// which started this one.)
int64_t peak_bytes(at::Device device) {
  if (!device.is_cpu())
    return c10::getDeviceAllocator(device.type())->getDeviceStats(device.index()).reserved_bytes[0].peak;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
  return 0;
}

/// What --lora-target may name, and the layers that this stands for.
const std::vector<std::string> kAttention{"q_proj", "k_proj", "v_proj", "o_proj"},
    kMLP{"gate_proj", "up_proj", "down_proj"};

LoraConfig lora_config(const Options& o) {
  LoraConfig config{.rank = o.lora_rank, .alpha = o.lora_alpha, .rslora = o.lora_rslora, .dropout = o.lora_dropout};
  std::istringstream targets(o.lora_target);
  for (std::string target; std::getline(targets, target, ',');) {
    const size_t before = config.target_modules.size();
    for (const auto& [group, layers] : {std::pair("attention", &kAttention), std::pair("mlp", &kMLP)})
      for (const std::string& layer : *layers)
        if (target == "all" || target == group || target == layer) config.target_modules.push_back(layer);
    TORCH_CHECK(config.target_modules.size() > before, "--lora-target: ", target, " is none of all, attention, mlp, ",
                c10::Join(", ", kAttention), ", ", c10::Join(", ", kMLP));
  }
  return config;
}

}  // namespace

Trainer::Trainer(Options options)
    : options_(std::move(options)),
      ranks_(options_.device),
      device_(ranks_.device()),
      checkpoints_(options_, ranks_),
      log_(options_.out, ranks_.rank() == 0) {
  start_ = std::chrono::steady_clock::now();
  if (device_.is_cuda() && options_.deterministic) {
    ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  }
  if (options_.threads > 0) at::set_num_threads(int(options_.threads));
  const int64_t newest = checkpoints_.newest();
  TORCH_CHECK(newest == 0 || options_.resume, "--out ", options_.out,
              " holds checkpoints: go on from them with --resume, or name another folder");
  if (newest > 0) checkpoints_.check_options(newest, options_);
  make_model(newest > 0 ? checkpoints_.path(newest) : "");
  if (options_.loss == "dpo") make_reference();
  data_.emplace(options_.data, options_, model_->config);
  if (!options_.eval.empty()) eval_.emplace(options_.eval, options_, model_->config);
  const int64_t of_step = options_.batch * options_.accumulate * ranks_.size();
  if (options_.steps == 0)
    options_.steps =
        std::max<int64_t>(1, int64_t(std::ceil(double(data_->size()) * options_.epochs / double(of_step))));
  optimizer_.emplace(*model_, options_, ranks_);
  no_graphs_ = reason_for_no_graphs();
  if (no_graphs_.empty()) Graph::use_stream(device_);
  if (newest > 0) checkpoints_.resume(newest, *optimizer_, *data_, options_);
  done_ = newest;
}

/// The model that the run begins with, or goes on with from its newest checkpoint: with adapters that is one of them.
void Trainer::make_model(const std::string& newest) {
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
      else model_->add_adapter(lora_config(options_));
      model_->lora->base_model = fs::absolute(options_.model).lexically_normal().string();
    }
    model_->to(device_);
    // Memory of their own: pages of a file lie where products are summed in another order, and are copied when written.
    // Frozen weights stay there, where processes share them.
    for (auto& parameter : model_->parameters())
      if (parameter.device().is_cpu() && parameter.requires_grad()) parameter.set_data(parameter.detach().clone());
  }
  model_->gradient_checkpointing = options_.gradient_checkpointing;
}

/// What DPO compares with: the model that the run began with. With adapters its weights are the model's.
void Trainer::make_reference() {
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

Trainer::Outcome Trainer::outcome_of(const Batch& b, double counted, const Tensor& divisor) {
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

std::string Trainer::reason_for_no_graphs() const {
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

/// Forward and backward: returns the loss, and leaves gradients in the parameters. What a graph computes are the same
/// kernels' results.
Trainer::Outcome Trainer::pass(const Batch& batch, double counted) {
  const auto plain = [&](const Batch& b, const Tensor& divisor) {
    Outcome outcome = outcome_of(b, counted, divisor);
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

void Trainer::step(int64_t step) {
  const auto begin = std::chrono::steady_clock::now();
  // Dropouts of each step and rank draw masks of their own, also in a run that was cut off before.
  torch::manual_seed(uint64_t(options_.seed + 1 + step * ranks_.size() + ranks_.rank()));
  std::vector<Batch> batches;
  int64_t counted = 0, tokens = 0;
  for (int64_t pass = 0; pass < options_.accumulate; ++pass) {
    std::vector<int64_t> items;
    for (int64_t i = 0; i < options_.batch; ++i)
      items.push_back(
          data_->sample(((step * options_.accumulate + pass) * ranks_.size() + ranks_.rank()) * options_.batch + i));
    batches.push_back(data_->batch(items));
    counted += batches.back().counted, tokens += batches.back().ids.numel();
  }
  counted = int64_t(ranks_.sum(double(counted))), tokens = int64_t(ranks_.sum(double(tokens)));
  double loss = 0, accuracy = 0, margin = 0;
  for (const Batch& batch : batches) {
    const Outcome part = pass(batch, double(std::max<int64_t>(1, counted)));
    optimizer_->accumulate();
    loss += part.loss.item<double>(), accuracy += part.accuracy, margin += part.margin;
  }
  const auto sums = ranks_.sum({loss, accuracy, margin, double(Stop::asked())});
  loss = sums[0], stopping_ = sums[3] > 0;
  const double lr = learning_rate(options_, step), norm = optimizer_->step(lr);
  const auto now = std::chrono::steady_clock::now();
  const auto since = [&](auto from) { return std::chrono::duration<double>(now - from).count(); };
  const double left = since(begin_) / double(step + 1 - done_) * double(options_.steps - step - 1);
  json line{{"step", step + 1},
            {"loss", loss},
            {"gradient_norm", norm},
            {"lr", lr},
            {"tokens", tokens},
            {"seconds", since(begin)},
            {"since_start", since(start_)},
            {"seconds_left", left},
            {"peak_bytes", peak_bytes(device_)}};
  if (options_.loss == "dpo") line["accuracy"] = sums[1] / double(counted), line["margin"] = sums[2] / double(counted);
  if ((step + 1) % options_.log_steps == 0 || step + 1 == options_.steps) tell(step, line);
  TORCH_CHECK(std::isfinite(loss), "the loss of step ", step + 1, " is ", loss, ": a smaller --lr may help");
}

void Trainer::tell(int64_t step, const json& line) {
  log_.line(line);
  std::string said = text("step %lld/%lld  loss %.4f", static_cast<long long>(step + 1),
                          static_cast<long long>(options_.steps), line["loss"].get<double>());
  if (line.contains("accuracy"))
    said += text("  accuracy %.3f  margin %.4f", line["accuracy"].get<double>(), line["margin"].get<double>());
  said += text("  lr %.2e  %.0f tokens/s", line["lr"].get<double>(),
               line["tokens"].get<double>() / line["seconds"].get<double>());
  if (step + 1 < options_.steps) said += "  " + duration(line["seconds_left"]) + " left";
  log_.progress(said);
}

void Trainer::evaluate(int64_t step) {
  const torch::NoGradGuard no_gradients;
  model_->eval();  // without dropouts
  double sum = 0, counted = 0, accuracy = 0, margin = 0;
  for (int64_t at = ranks_.rank() * options_.batch; at < eval_->size(); at += ranks_.size() * options_.batch) {
    std::vector<int64_t> items;
    for (int64_t i = at; i < std::min(at + options_.batch, eval_->size()); ++i) items.push_back(i);
    const Batch batch = eval_->batch(items);
    if (batch.counted == 0) continue;
    const Outcome part = outcome_of(batch, double(batch.counted));
    sum += part.loss.item<double>() * double(batch.counted);
    counted += double(batch.counted), accuracy += part.accuracy, margin += part.margin;
  }
  model_->train();
  const auto sums = ranks_.sum({sum, counted, accuracy, margin});
  const double all = std::max(1., sums[1]);
  json line{{"step", step}, {"eval_loss", sums[0] / all}};
  std::string said = text("evaluation after step %lld: loss %.4f", static_cast<long long>(step), sums[0] / all);
  if (options_.loss == "dpo") {
    line["eval_accuracy"] = sums[2] / all, line["eval_margin"] = sums[3] / all;
    said += text("  accuracy %.3f  margin %.4f", sums[2] / all, sums[3] / all);
  }
  log_.line(line);
  log_.say(said);
}

void Trainer::describe() {
  for (const std::string& note : options_.notes) log_.say(note);
  int64_t trainable = 0, all = 0;
  for (const Tensor& parameter : model_->parameters())
    all += parameter.numel(), trainable += parameter.requires_grad() ? parameter.numel() : 0;
  if (done_ == 0)
    log_.line({{"step", 0},
               {"rows", data_->rows()},
               {"special_tokens", data_->special_tokens()},
               {"rows_without_labels", data_->without_labels()},
               {"trainable_parameters", trainable},
               {"parameters", all}});
  log_.say("parameters: " + std::to_string(all) + ", of which " + std::to_string(trainable) + " are trained");
  if (device_.is_cuda() && !no_graphs_.empty()) log_.say("no CUDA graphs: " + no_graphs_);
  for (const auto& [what, data] : {std::pair("data", &data_), std::pair("evaluation", &eval_)}) {
    if (!*data) continue;
    const Data& d = **data;
    log_.say(std::string(what) + ": " + std::to_string(d.rows()) +
             " rows; special tokens added: " + std::to_string(d.special_tokens()) +
             "; rows without a label that is learnt: " + std::to_string(d.without_labels()));
    if (const int64_t longest = d.longest(), most = model_->config.max_position_embeddings; longest > most)
      log_.say(std::string(what) + ": a text of " + std::to_string(longest) + " tokens is longer than the model's " +
               "max_position_embeddings, " + std::to_string(most) + ": a smaller --length cuts it");
  }
  if (options_.warmup >= options_.steps && options_.warmup > 0 && options_.notes.empty())
    log_.say("--warmup " + std::to_string(options_.warmup) + " is not over after " + std::to_string(options_.steps) +
             " steps: --lr is not reached");
}

bool Trainer::run() {
  if (done_ < options_.steps) checkpoints_.check_space(model_, *optimizer_);
  log_.open(done_);
  describe();
  const auto due = [&](int64_t every, int64_t step) {
    return step == options_.steps || (every > 0 && step % every == 0);
  };
  if (done_ >= options_.steps) log_.say(checkpoints_.path(done_) + " is finished");
  const bool alone = ranks_.size() == 1;
  Stop::listen(alone, ranks_.rank() > 0 ? nullptr
                      : alone ? "\nafter this step a checkpoint is written; Ctrl-C again ends at once, without one\n"
                              : "\nafter this step a checkpoint is written\n");
  begin_ = std::chrono::steady_clock::now();
  int64_t made = done_, saved = done_;
  const auto stops = [&] { return stopping_ = stopping_ || (alone && Stop::asked()); };
  const auto save = [&] {
    checkpoints_.save(made, model_, *optimizer_, *data_, options_);
    log_.say("saved " + checkpoints_.path(made));
    saved = made;
  };
  while (made < options_.steps && !stops()) {
    step(made++);
    if (eval_ && due(options_.eval_steps, made)) evaluate(made);
    if (due(options_.save_steps, made)) save();
  }
  if (made > saved) save();
  const bool finished = made >= options_.steps;
  if (!finished)
    log_.say("stopped after step " + std::to_string(made) + " of " + std::to_string(options_.steps) + ". Go on " +
             (alone ? "" : "in as many processes ") + "with:\n  " + options_.command);
  ranks_.wait();  // the first one's store serves all
  return finished;
}

}  // namespace liger::train
