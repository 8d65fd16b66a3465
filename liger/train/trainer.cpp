#include "liger/train/trainer.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/torch.h>
#include <algorithm>
#include <cmath>
#include <fstream>
#include "liger/train/stop.h"

namespace liger::train {

using at::Tensor;
using nlohmann::json;

namespace {

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
  passes_.emplace(options_, device_, log_, newest > 0 ? checkpoints_.path(newest) : "");
  model_ = passes_->model();
  data_.emplace(options_.data, options_, model_->config);
  if (!options_.eval.empty()) eval_.emplace(options_.eval, options_, model_->config);
  const int64_t of_step = options_.batch * options_.accumulate * ranks_.size();
  if (options_.steps == 0)
    options_.steps =
        std::max<int64_t>(1, int64_t(std::ceil(double(data_->size()) * options_.epochs / double(of_step))));
  optimizer_.emplace(*model_, options_, ranks_);
  passes_->use_graphs();
  if (newest > 0) checkpoints_.resume(newest, *optimizer_, *data_, options_);
  done_ = newest;
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
    const Outcome part = passes_->forward_backward(batch, double(std::max<int64_t>(1, counted)));
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
    const Outcome part = passes_->forward(batch, double(batch.counted));
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
  if (device_.is_cuda() && !passes_->no_graphs().empty()) log_.say("no CUDA graphs: " + passes_->no_graphs());
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
