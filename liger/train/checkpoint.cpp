#include "liger/train/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include "liger/models/json.h"
#include "liger/train/log.h"

namespace liger::train {

using nlohmann::json;
namespace fs = std::filesystem;

namespace {

constexpr const char* kCheckpoint = "checkpoint-";

void sync(const fs::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  TORCH_CHECK(file >= 0 && ::fsync(file) == 0, path.string(), ": ", std::strerror(errno));
  ::close(file);
}

std::vector<int64_t> steps_in(const fs::path& folder) {
  std::vector<int64_t> steps;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string(),
                      number = name.substr(std::min(name.size(), std::strlen(kCheckpoint)));
    const bool digits = !number.empty() && number.size() < 19 && std::all_of(number.begin(), number.end(), ::isdigit);
    if (name.starts_with(kCheckpoint) && digits) steps.push_back(std::stoll(number));
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

/// Of processes that were killed.
void remove_halves(const fs::path& folder) {
  std::vector<fs::path> halves;
  for (const auto& entry : fs::directory_iterator(folder))
    if (const auto name = entry.path().filename().string(); name.starts_with(kCheckpoint) && name.ends_with(".tmp"))
      halves.push_back(entry.path());
  for (const fs::path& half : halves) fs::remove_all(half);
}

/// What a checkpoint has of the model's folder.
std::vector<fs::path> copied(const fs::path& model, bool lora) {
  std::vector<const char*> names{"tokenizer.json",    "tokenizer_config.json", "special_tokens_map.json",
                                 "added_tokens.json", "chat_template.jinja",   "additional_chat_templates"};
  if (!lora) names.insert(names.end(), {"config.json", "generation_config.json"});
  std::vector<fs::path> found;
  for (const char* name : names)
    if (fs::exists(model / name)) found.push_back(model / name);
  return found;
}

/// trainer.json.
json state_of(const fs::path& checkpoint) {
  const std::string path = (checkpoint / "trainer.json").string();
  const json state = read_json(path);
  for (const char* name : {"options", "data", "ranks"}) TORCH_CHECK(state.contains(name), path, ": there is no ", name);
  TORCH_CHECK(state["options"].is_object(), path, ": options is no object");
  return state;
}

double bytes_of(const NamedTensors& tensors) {
  double bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += double(tensor.numel()) * double(tensor.element_size());
  return bytes;
}

}  // namespace

Checkpoints::Checkpoints(const Options& options, const Ranks& ranks)
    : out_(options.out),
      model_(options.model),
      lora_(options.lora()),
      shards_(options.shard_optimizer),
      keep_(options.keep),
      ranks_(ranks) {
  std::error_code error;
  fs::create_directories(out_, error);
  TORCH_CHECK(!error, "--out ", out_, ": ", error.message());
  steps_ = steps_in(out_);
  if (ranks_.rank() > 0) return;
  remove_halves(out_);
  const std::string probe = (fs::path(out_) / ".liger-train").string();
  const int file = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  TORCH_CHECK(file >= 0, "--out ", out_, ": ", std::strerror(errno));
  ::close(file), ::unlink(probe.c_str());
}

std::string Checkpoints::path(int64_t step) const {
  return (fs::path(out_) / (kCheckpoint + std::to_string(step))).string();
}

void Checkpoints::check_options(int64_t step, const Options& options) const {
  const fs::path folder = path(step);
  const json before = state_of(folder)["options"], now = options.decisive(),
             defaults = Options().decisive();  // of options that it did not know
  std::string changed;
  for (const auto& [name, value] : now.items())
    if (const json of_before = before.value(name, defaults[name]);
        of_before != value && !(name == "steps" && options.steps == 0))
      changed += (changed.empty() ? "" : "; ") + name + " " + of_before.dump() + ", not " + value.dump();
  TORCH_CHECK(changed.empty(), "--resume: ", folder.string(), " was made with ", changed);
}

void Checkpoints::check_space(const nn::LlamaForCausalLM& model, const Optimizer& optimizer) const {
  double needed = shards_ ? ranks_.sum(bytes_of(optimizer.state())) : bytes_of(optimizer.state());
  if (ranks_.rank() > 0) return;
  for (const at::Tensor& parameter : model->parameters())
    if (!lora_ || parameter.requires_grad()) needed += double(parameter.numel()) * double(parameter.element_size());
  std::error_code error;
  const auto space = fs::space(out_, error);
  if (error || space.capacity == 0) return;  // a file system that does not say
  TORCH_CHECK(double(space.available) >= needed, "--out ", out_, ": a checkpoint needs ", size(needed),
              ", and the disk has ", size(double(space.available)), " left");
}

void Checkpoints::save(int64_t step, const nn::LlamaForCausalLM& model, const Optimizer& optimizer, const Data& data,
                       const Options& options) {
  const std::string place = path(step), beside = place + ".tmp";
  try {
    write(beside, step, model, optimizer, data, options);
  } catch (...) {
    std::error_code ignored;
    if (ranks_.rank() == 0) fs::remove_all(beside, ignored);  // a full disk gets its space back
    throw;
  }
  if (steps_.empty() || steps_.back() < step) steps_.push_back(step);
  if (ranks_.rank() > 0) return;
  fs::rename(beside, place);
  sync(out_);
  for (; keep_ > 0 && int64_t(steps_.size()) > keep_; steps_.erase(steps_.begin())) {
    const fs::path old = path(steps_.front()), gone = old.string() + ".tmp";
    fs::rename(old, gone);  // what has a checkpoint's name is whole
    fs::remove_all(gone);
  }
}

void Checkpoints::write(const std::string& to, int64_t step, const nn::LlamaForCausalLM& model,
                        const Optimizer& optimizer, const Data& data, const Options& options) const {
  const fs::path folder = to;
  if (ranks_.rank() == 0) {
    fs::remove_all(folder);
    fs::create_directories(folder);
  }
  ranks_.wait();  // for the folder
  const std::string share = shards_ ? "-" + std::to_string(ranks_.rank()) : "";
  const fs::path states = folder / ("optimizer" + share + ".safetensors");
  if (ranks_.rank() == 0 || shards_) save_safetensors(states.string(), optimizer.state());
  ranks_.wait();  // for all states
  if (ranks_.rank() > 0) return;
  for (const fs::path& file : copied(model_, lora_)) {
    std::error_code error;
    fs::copy(file, folder / file.filename(), fs::copy_options::recursive, error);
    TORCH_CHECK(!error, (folder / file.filename()).string(), ": ", error.message());
  }
  if (lora_) model->save_adapter(folder.string());
  else model->save_pretrained(folder.string());
  write_json((folder / "trainer.json").string(),
             {{"step", step}, {"options", options.decisive()}, {"data", data.fingerprint()}, {"ranks", ranks_.size()}});
  for (const auto& entry : fs::recursive_directory_iterator(folder)) sync(entry.path());
  sync(folder);
}

void Checkpoints::resume(int64_t step, Optimizer& optimizer, const Data& data, const Options& options) const {
  const fs::path folder = path(step);
  const json state = state_of(folder);
  check_options(step, options);  // now with the number of steps that --epochs gives
  TORCH_CHECK(state["data"] == data.fingerprint(), "--resume: ", folder.string(), " was made with other data");
  TORCH_CHECK(state["ranks"] == ranks_.size(), "--resume: ", folder.string(), " was made by ", state["ranks"].dump(),
              " processes, and these are ", ranks_.size());
  std::vector<SafetensorsFile> files;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename().string().starts_with("optimizer")) files.emplace_back(entry.path().string());
  optimizer.load(files);
}

}  // namespace liger::train
