#include "liger/train/trainer.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include "liger/models/json.h"
#include "liger/nn/preference.h"

namespace liger::train {

using at::Tensor;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

constexpr const char* kCheckpoint = "checkpoint-";
constexpr int64_t kWarmUp = 3;     // passes of a shape before it is captured
constexpr size_t kMostGraphs = 4;  // each of which holds the memory of a pass

/// What has been written to a folder is on the disk.
void sync_folder(const fs::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  TORCH_CHECK(file >= 0 && ::fsync(file) == 0, folder.string(), ": ", std::strerror(errno));
  ::close(file);
}

/// The steps of the checkpoints in a folder, in order. They are whole: each took its name when it was.
std::vector<int64_t> checkpoints(const fs::path& folder) {
  std::vector<int64_t> steps;
  if (!fs::exists(folder)) return steps;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string(),
                      number = name.substr(std::min(name.size(), std::strlen(kCheckpoint)));
    const bool digits = !number.empty() && number.size() < 19 && std::all_of(number.begin(), number.end(), ::isdigit);
    if (name.starts_with(kCheckpoint) && digits) steps.push_back(std::stoll(number));
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

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

Trainer::Trainer(Options options) : options_(std::move(options)), ranks_(options_.device), device_(ranks_.device()) {
  start_ = std::chrono::steady_clock::now();
  if (device_.is_cuda() && options_.deterministic) {
    ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  }
  if (options_.threads > 0) at::set_num_threads(int(options_.threads));
  const auto steps = checkpoints(options_.out);
  TORCH_CHECK(steps.empty() || options_.resume, "--out ", options_.out,
              " holds checkpoints: go on from them with --resume, or name another folder");
  if (!steps.empty()) check_options(steps.back());
  make_model(steps.empty() ? "" : checkpoint(steps.back()));
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
  fs::create_directories(options_.out);
  if (!steps.empty()) resume(steps.back());
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

std::string Trainer::checkpoint(int64_t step) const {
  return (fs::path(options_.out) / (kCheckpoint + std::to_string(step))).string();
}

void Trainer::check_options(int64_t step) const {
  const fs::path folder = checkpoint(step);
  const json before = read_json((folder / "trainer.json").string()).at("options"), now = options_.decisive();
  std::string changed;
  for (const auto& [name, value] : now.items())
    if (const json of_before = before.value(name, json());
        of_before != value && !(name == "steps" && options_.steps == 0))
      changed += (changed.empty() ? "" : "; ") + name + " " + of_before.dump() + ", not " + value.dump();
  TORCH_CHECK(changed.empty(), "--resume: ", folder.string(), " was made with ", changed);
}

void Trainer::resume(int64_t step) {
  const fs::path folder = checkpoint(step);
  const json state = read_json((folder / "trainer.json").string());
  check_options(step);  // now with the number of steps that --epochs gives
  TORCH_CHECK(state.at("data") == data_->fingerprint(), "--resume: ", folder.string(), " was made with other data");
  TORCH_CHECK(state.at("ranks") == ranks_.size(), "--resume: ", folder.string(), " was made by ",
              state.at("ranks").dump(), " processes, and these are ", ranks_.size());
  std::vector<SafetensorsFile> files;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename().string().starts_with("optimizer")) files.emplace_back(entry.path().string());
  optimizer_->load(files);
  done_ = step;
  if (ranks_.rank() > 0) return;
  // The log of steps that are made again goes.
  const fs::path log = fs::path(options_.out) / "log.jsonl";
  std::string kept;
  std::ifstream in(log);
  for (std::string line; std::getline(in, line);) {
    const json entry = json::parse(line, nullptr, false);
    if (entry.is_object() && entry.value("step", step + 1) <= step) kept += line + "\n";
  }
  const fs::path beside = log.string() + ".tmp";
  std::ofstream(beside) << kept;
  fs::rename(beside, log);
}

Tensor Trainer::loss_of(const Batch& b, double counted, const Tensor& divisor) {
  const Tensor ids = b.ids.to(device_), labels = b.labels.to(device_);
  nn::CausalLMInputs inputs;
  if (b.positions.defined()) inputs.position_ids = b.positions.to(device_);
  if (!reference_.is_empty()) {
    const auto hidden = [&](nn::LlamaForCausalLM& model) { return model->hidden_states(ids, inputs).slice(1, 0, -1); };
    nn::DPOLoss loss(nn::DPOLossOptions().loss(
        {.loss_type = options_.dpo_loss, .beta = options_.dpo_beta, .pairs = int64_t(counted)}));
    Tensor reference;
    {
      const torch::NoGradGuard no_gradients;
      reference = hidden(reference_);
    }
    return loss
        ->forward(hidden(model_), model_->head_weight(), labels.slice(1, 1), {}, reference, reference_->head_weight())
        .loss;
  }
  inputs.labels = labels, inputs.num_items = counted, inputs.divisor = divisor, inputs.packed = b.packed;
  return model_->forward(ids, inputs).loss;
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
Tensor Trainer::pass(const Batch& batch, double counted) {
  const auto plain = [&](const Batch& b, const Tensor& divisor) {
    const Tensor loss = loss_of(b, counted, divisor);
    loss.backward();
    return loss.detach();
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
      c.graph = std::make_unique<Graph>([&] { c.loss = plain(c.batch, c.divisor); });
    } catch (const std::exception& error) {
      no_graphs_ = error.what();
      no_graphs_ = no_graphs_.substr(0, no_graphs_.find('\n'));
      if (ranks_.rank() == 0) std::fprintf(stderr, "no CUDA graphs: %s\n", no_graphs_.c_str());
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
  return c.loss;
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
  double loss = 0;
  for (const Batch& batch : batches) {
    const Tensor part = pass(batch, double(std::max<int64_t>(1, counted)));
    optimizer_->accumulate();
    loss += part.item<double>();
  }
  loss = ranks_.sum(loss);
  const double lr = learning_rate(options_, step), norm = optimizer_->step(lr);
  const auto now = std::chrono::steady_clock::now();
  const auto since = [&](auto from) { return std::chrono::duration<double>(now - from).count(); };
  log({{"step", step + 1},
       {"loss", loss},
       {"gradient_norm", norm},
       {"lr", lr},
       {"tokens", tokens},
       {"seconds", since(begin)},
       {"since_start", since(start_)},
       {"peak_bytes", peak_bytes(device_)}});
  if (ranks_.rank() == 0)
    std::fprintf(stderr, "%sstep %lld/%lld  loss %.4f  lr %.2e  %.0f tokens/s%s", ::isatty(2) ? "\r\033[K" : "",
                 static_cast<long long>(step + 1), static_cast<long long>(options_.steps), loss, lr,
                 double(tokens) / since(begin), ::isatty(2) && step + 1 < options_.steps ? "" : "\n");
  TORCH_CHECK(std::isfinite(loss), "the loss of step ", step + 1, " is ", loss, ": a smaller --lr may help");
}

double Trainer::evaluate() {
  const torch::NoGradGuard no_gradients;
  model_->eval();  // without dropouts
  double sum = 0, counted = 0;
  for (int64_t at = ranks_.rank() * options_.batch; at < eval_->size(); at += ranks_.size() * options_.batch) {
    std::vector<int64_t> items;
    for (int64_t i = at; i < std::min(at + options_.batch, eval_->size()); ++i) items.push_back(i);
    const Batch batch = eval_->batch(items);
    if (batch.counted == 0) continue;
    sum += loss_of(batch, double(batch.counted)).item<double>() * double(batch.counted);
    counted += double(batch.counted);
  }
  model_->train();
  sum = ranks_.sum(sum), counted = ranks_.sum(counted);
  return sum / std::max(1., counted);
}

void Trainer::save(int64_t step) {
  const fs::path place = checkpoint(step), beside = place.string() + ".tmp";
  const std::string share = options_.shard_optimizer ? "-" + std::to_string(ranks_.rank()) : "";
  const fs::path states = beside / ("optimizer" + share + ".safetensors");
  if (ranks_.rank() == 0) {
    fs::remove_all(beside);
    fs::create_directories(beside);
  }
  ranks_.wait();  // for the folder
  if (ranks_.rank() == 0 || options_.shard_optimizer) save_safetensors(states.string(), optimizer_->state());
  ranks_.wait();  // for all states
  if (ranks_.rank() > 0) return;
  std::vector<const char*> copied{"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                                  "chat_template.jinja"};
  if (!options_.lora()) copied.insert(copied.end(), {"config.json", "generation_config.json"});
  for (const char* name : copied)
    if (fs::exists(fs::path(options_.model) / name)) fs::copy_file(fs::path(options_.model) / name, beside / name);
  if (options_.lora()) model_->save_adapter(beside.string());
  else model_->save_pretrained(beside.string());
  std::ofstream state(beside / "trainer.json");
  state << json{{"step", step},
                {"options", options_.decisive()},
                {"data", data_->fingerprint()},
                {"ranks", ranks_.size()}}
               .dump(2)
        << "\n";
  state.close();
  TORCH_CHECK(state.good(), (beside / "trainer.json").string(), ": cannot be written");
  for (const auto& entry : fs::directory_iterator(beside)) {
    const int file = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    TORCH_CHECK(file >= 0 && ::fsync(file) == 0, entry.path().string(), ": ", std::strerror(errno));
    ::close(file);
  }
  sync_folder(beside);
  fs::rename(beside, place);
  sync_folder(options_.out);
  auto all = checkpoints(options_.out);
  for (; options_.keep > 0 && int64_t(all.size()) > options_.keep; all.erase(all.begin())) {
    const fs::path old = checkpoint(all.front()), gone = old.string() + ".tmp";
    fs::rename(old, gone);  // what has a checkpoint's name is whole
    fs::remove_all(gone);
  }
}

void Trainer::log(const json& line) {
  if (ranks_.rank() > 0) return;
  const std::string text = line.dump() + "\n";
  TORCH_CHECK(std::fwrite(text.data(), 1, text.size(), log_) == text.size() && std::fflush(log_) == 0, options_.out,
              "/log.jsonl: ", std::strerror(errno));
}

void Trainer::describe() {
  if (ranks_.rank() > 0) return;
  int64_t trainable = 0, all = 0;
  for (const Tensor& parameter : model_->parameters())
    all += parameter.numel(), trainable += parameter.requires_grad() ? parameter.numel() : 0;
  if (done_ == 0)
    log({{"step", 0},
         {"rows", data_->rows()},
         {"special_tokens", data_->special_tokens()},
         {"rows_without_labels", data_->without_labels()},
         {"trainable_parameters", trainable},
         {"parameters", all}});
  std::fprintf(stderr, "parameters: %lld, of which %lld are trained\n", static_cast<long long>(all),
               static_cast<long long>(trainable));
  const auto say = [](const char* what, const Data& data) {
    std::fprintf(stderr, "%s: %lld rows; special tokens added: %lld; rows without a label that is learnt: %lld\n", what,
                 static_cast<long long>(data.rows()), static_cast<long long>(data.special_tokens()),
                 static_cast<long long>(data.without_labels()));
  };
  if (device_.is_cuda() && !no_graphs_.empty()) std::fprintf(stderr, "no CUDA graphs: %s\n", no_graphs_.c_str());
  say("data", *data_);
  if (eval_) say("evaluation", *eval_);
}

void Trainer::run() {
  const std::string path = (fs::path(options_.out) / "log.jsonl").string();
  if (ranks_.rank() == 0) {
    log_ = std::fopen(path.c_str(), done_ > 0 ? "a" : "w");
    TORCH_CHECK(log_, path, ": ", std::strerror(errno));
    std::vector<fs::path> halves;  // of a process that was killed
    for (const auto& entry : fs::directory_iterator(options_.out))
      if (const auto name = entry.path().filename().string(); name.starts_with(kCheckpoint) && name.ends_with(".tmp"))
        halves.push_back(entry.path());
    for (const fs::path& half : halves) fs::remove_all(half);
  }
  describe();
  const auto due = [&](int64_t every, int64_t step) {
    return step == options_.steps || (every > 0 && step % every == 0);
  };
  if (done_ >= options_.steps) std::fprintf(stderr, "%s is finished\n", checkpoint(done_).c_str());
  for (int64_t i = done_; i < options_.steps; ++i) {
    step(i);
    if (eval_ && due(options_.eval_steps, i + 1)) {
      const double loss = evaluate();
      log({{"step", i + 1}, {"eval_loss", loss}});
      if (ranks_.rank() == 0)
        std::fprintf(stderr, "%sevaluation after step %lld: loss %.4f\n", ::isatty(2) ? "\n" : "",
                     static_cast<long long>(i + 1), loss);
    }
    if (due(options_.save_steps, i + 1)) save(i + 1);
  }
  if (log_) std::fclose(log_);
  ranks_.wait();  // the first one's store serves all
}

}  // namespace liger::train
