#include "liger/train/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <numeric>
#include <type_traits>
#include <variant>
#include "liger/version.h"

namespace liger::train {

namespace {

namespace fs = std::filesystem;

/// What --resume asks of an option.
enum class Resume {
  Same,  // the value that the run had before
  Any
};

struct Option {
  std::string flags;  // as CLI11 has them
  std::variant<std::string Options::*, std::vector<std::string> Options::*, int64_t Options::*, double Options::*,
               bool Options::*>
      member;
  std::string help = {};
  CLI::Validator check = {};
  Resume resume = Resume::Same;
  bool required = false;

  /// As trainer.json has it: dpo_loss of --dpo-loss, shuffle of --shuffle,!--no-shuffle.
  std::string name() const {
    std::string name = flags.substr(0, flags.find(','));
    name.erase(0, name.find_first_not_of('-'));
    std::replace(name.begin(), name.end(), '-', '_');
    return name;
  }
};

std::string shown(double value) {
  std::ostringstream out;
  out << std::setprecision(15) << value;
  return out.str();
}

constexpr double kMost = 9e15;  // whole numbers up to this are exact in double

/// A number of a range, whose ends may be left out of it.
struct Bounds {
  double least = 0, most = kMost;
  bool above = false, below = false;

  std::string words() const {
    std::string text = above ? "above " + shown(least) : "of at least " + shown(least);
    if (most < kMost) text += (below ? " and below " : " and at most ") + shown(most);
    return text;
  }
};

CLI::Validator number(Bounds bounds, bool whole) {
  const auto check = [=](const std::string& text) -> std::string {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    const bool digits = text.find_first_not_of("+-0123456789") == std::string::npos;
    const bool is_number = !text.empty() && *end == 0 && std::isfinite(value) && (!whole || digits);
    if (is_number && (bounds.above ? value > bounds.least : value >= bounds.least) &&
        (bounds.below ? value < bounds.most : value <= bounds.most))
      return {};
    return text + " is no " + (whole ? "whole " : "") + "number " + bounds.words();
  };
  return CLI::Validator(check, "");
}
CLI::Validator whole(double least, double most = kMost) { return number({least, most}, true); }
CLI::Validator real(Bounds bounds) { return number(bounds, false); }

CLI::Validator one_of(const std::vector<std::string>& names) {
  const std::string all = CLI::detail::join(names, ", ");
  const auto check = [=](const std::string& text) {
    return std::find(names.begin(), names.end(), text) != names.end() ? "" : text + " is none of " + all;
  };
  return CLI::Validator(check, "");
}

CLI::Validator device() {
  const auto check = [](const std::string& text) -> std::string {
    const std::string index = text.starts_with("cuda:") ? text.substr(5) : "0";
    const bool digits = index.size() < 4 && !index.empty() && std::all_of(index.begin(), index.end(), ::isdigit);
    if (text == "cpu" || text == "cuda" || (text.starts_with("cuda:") && digits)) return {};
    return text + " is none of cpu, cuda, cuda:0, cuda:1, ...";
  };
  return CLI::Validator(check, "");
}

std::string ending(const std::string& file) {
  std::string text = fs::path(file).extension().string();
  std::transform(text.begin(), text.end(), text.begin(), ::tolower);
  return text;
}

bool is_in(const std::string& name, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Files that are there and are no other data than liger-train reads.
CLI::Validator data_file() {
  const auto check = [](const std::string& file) -> std::string {
    std::error_code error;
    const auto status = fs::status(file, error);
    if (!fs::exists(status)) return file + ": " + std::generic_category().message(ENOENT);
    if (fs::is_directory(status)) return file + " is a folder: name its files";
    if (is_in(ending(file), {".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".xlsx", ".pdf"}))
      return file + ": " + ending(file) + " is not read: make it *.jsonl, a JSON object a line";
    if (is_in(ending(file), {".npy", ".npz", ".pt", ".pth", ".pkl", ".bin", ".h5", ".gguf"}))
      return file + ": " + ending(file) + " is not read: make it *.safetensors with input_ids";
    if (is_in(ending(file), {".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".7z"}))
      return file + ": " + ending(file) + " is not read: unpack it";
    return {};
  };
  return CLI::Validator(check, "");
}

/// A folder that is there.
CLI::Validator folder() {
  const auto check = [](const std::string& path) -> std::string {
    std::error_code error;
    const auto status = fs::status(path, error);
    if (fs::is_directory(status)) return {};
    return path + (fs::exists(status) ? " is no folder" : ": " + std::generic_category().message(ENOENT));
  };
  return CLI::Validator(check, "");
}

struct Group {
  const char* name;
  std::vector<Option> options;
};

const std::vector<Group>& table() {
  using O = Options;
  const auto any = Resume::Any;
  static const std::vector<Group> all = {
      {"Model and data",
       {{"model", &O::model, "folder of config.json, *.safetensors and tokenizer.json", folder(), Resume::Same, true},
        // trainer.json has a fingerprint of what the files hold.
        {"--data", &O::data, "files to train on", data_file(), any, /*required=*/true},
        {"--out", &O::out, "folder for checkpoints and the log", {}, any, /*required=*/true},
        {"--length", &O::length, "tokens of a row", whole(2)},
        {"--packing", &O::packing,
         "how documents fill rows: apart (one does not see another), join (it does), none (a row each)",
         one_of({"apart", "join", "none"})},
        {"--special-tokens,!--no-special-tokens", &O::special_tokens,
         "add the tokens that the tokenizer's post_processor adds, such as one at the beginning of a text"},
        {"--shuffle,!--no-shuffle", &O::shuffle, "draw the rows' order anew for each epoch"},
        {"--fresh", &O::fresh, "begin with weights drawn from the seed: the model's folder needs none"},
        {"--seed", &O::seed, "of what is drawn", whole(0)}}},
      {"Loss",
       {{"--loss", &O::loss, "what is learnt: causal (the next token), dpo (pairs of answers)",
         one_of({"causal", "dpo"})},
        {"--dpo-loss", &O::dpo_loss,
         "sigmoid, hinge, exo_pair, nca_pair, robust, bco_pair, sppo_hard, apo_zero, apo_down, discopop",
         one_of({"sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
                 "discopop"})},
        {"--dpo-beta", &O::dpo_beta, "weight of the reference in DPO", real({.above = true})},
        {"--dpo-label-smoothing", &O::dpo_label_smoothing, "share of pairs that are the wrong way round",
         real({.most = 1, .below = true})}}},
      {"Steps",
       {{"--batch", &O::batch, "rows, or pairs, in a pass", whole(1, 1 << 24)},
        {"--accumulate", &O::accumulate, "passes in a step", whole(1, 1 << 24)},
        // It gives the number of steps, which is compared.
        {"--epochs", &O::epochs, "passes over the data, where --steps is not given", real({.above = true}), any},
        {"--steps", &O::steps, "steps of the optimiser; 0: what --epochs gives", whole(0)},
        {"--lr", &O::lr, "highest learning rate", real({})},
        {"--schedule", &O::schedule, "of the learning rate, after the warm-up",
         one_of({"cosine", "linear", "constant"})},
        {"--warmup", &O::warmup, "steps in which the learning rate rises from 0", whole(0)},
        {"--weight-decay", &O::weight_decay, "of matrices", real({})},
        {"--beta1", &O::beta1, "of AdamW's mean of gradients", real({.most = 1, .below = true})},
        {"--beta2", &O::beta2, "of AdamW's mean of squares", real({.most = 1, .below = true})},
        {"--eps", &O::eps, "of AdamW's denominator", real({.above = true})},
        {"--clip", &O::clip, "largest norm of all gradients; 0: any", real({})}}},
      {"LoRA",
       {{"--lora-rank", &O::lora_rank, "train LoRA adapters of this rank, and freeze the model; 0: train the model",
         whole(0, 1 << 20)},
        {"--lora-alpha", &O::lora_alpha, "adapters are scaled by alpha / rank", real({.above = true})},
        {"--lora-target", &O::lora_target,
         "layers with adapters: all, attention, mlp, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
         "down_proj, with commas"},
        {"--lora-dropout", &O::lora_dropout, "of the adapters' input", real({.most = 1, .below = true})},
        {"--lora-rslora", &O::lora_rslora, "scale adapters by alpha / sqrt(rank)"},
        {"--adapter", &O::adapter,
         "begin with the adapters in this folder, which PEFT or liger-train has saved: its adapter_config.json says "
         "what --lora-rank and its like would",
         folder()},
        {"--base", &O::base,
         "frozen weights in 8 bits: int8, fp8. Not exact; about half of the memory, and on Hopper, in bfloat16, faster",
         one_of({"int8", "fp8"})}}},
      {"Evaluation, checkpoints and log",
       {{"--eval", &O::eval, "files to evaluate on", data_file(), any},
        {"--eval-steps", &O::eval_steps, "evaluate after so many steps each; 0: at the end", whole(0), any},
        {"--save-steps", &O::save_steps, "write a checkpoint after so many steps each; 0: at the end", whole(0), any},
        {"--keep", &O::keep, "newest checkpoints to keep; 0: all", whole(0), any},
        {"--resume", &O::resume, "go on from the newest checkpoint in --out, if there is one", {}, any},
        {"--log-steps", &O::log_steps, "log every so many steps, and the last one", whole(1), any}}},
      {"Devices and numbers",
       {{"--device", &O::device, "cpu, cuda, cuda:1, ...", device(), any},
        {"--dtype", &O::dtype, "of the model's weights: float32, bfloat16", one_of({"float32", "bfloat16"})},
        {"--master-weights,!--no-master-weights", &O::master_weights,
         "the optimiser keeps float copies of bfloat16 weights, and adds up their gradients in float"},
        {"--gradient-checkpointing", &O::gradient_checkpointing, "less memory, more time", {}, any},
        {"--shard-optimizer", &O::shard_optimizer,
         "each of torchrun's processes keeps the optimiser's state of a share of the weights"},
        {"--deterministic,!--no-deterministic",
         &O::deterministic,
         "the same bits in each run; on a GPU the fastest attention adds up in its own order",
         {},
         any},
        {"--cuda-graphs", &O::cuda_graphs,
         "auto: on a GPU, forward and backward of rows of one length are launched as one graph, where that can be; off",
         one_of({"auto", "off"}), any},
        {"--threads", &O::threads, "of the CPU; 0: torch's choice", whole(0, 1 << 16), any}}},
  };
  return all;
}  // NOLINT(clang-analyzer-cplusplus.NewDeleteLeaks): std::function's own, in CLI11

/// Options that do nothing beside the others: an error says what they need, or a note says why.
struct Idle {
  const char* option;
  std::function<bool(const Options&)> is_idle;
  const char* needs;  // null: only a note
  const char* why = nullptr;
};

bool all_tensors(const Options& o) {
  const auto is_tensors = [](const auto& file) { return ending(file) == ".safetensors"; };
  return std::all_of(o.data.begin(), o.data.end(), is_tensors) && std::all_of(o.eval.begin(), o.eval.end(), is_tensors);
}

const std::vector<Idle>& idle_options() {
  const auto no_dpo = [](const Options& o) { return o.loss != "dpo"; };
  const auto no_rank = [](const Options& o) { return o.lora_rank == 0; };
  const auto on_cpu = [](const Options& o) { return o.device == "cpu"; };
  static const std::vector<Idle> all = {
      {"--dpo-loss", no_dpo, "--loss dpo"},
      {"--dpo-beta", no_dpo, "--loss dpo"},
      {"--dpo-label-smoothing", no_dpo, "--loss dpo"},
      {"--dpo-label-smoothing", [](const Options& o) { return o.dpo_loss != "exo_pair" && o.dpo_loss != "robust"; },
       "--dpo-loss exo_pair or robust"},
      {"--dpo-loss", [](const Options& o) { return o.dpo_loss == "exo_pair" && o.dpo_label_smoothing == 0; },
       "--dpo-label-smoothing for exo_pair"},
      {"--base", [](const Options& o) { return !o.lora(); }, "--lora-rank or --adapter"},
      {"--lora-alpha", no_rank, "--lora-rank"},
      {"--lora-target", no_rank, "--lora-rank"},
      {"--lora-dropout", no_rank, "--lora-rank"},
      {"--lora-rslora", no_rank, "--lora-rank"},
      {"--eval-steps", [](const Options& o) { return o.eval.empty(); }, "--eval"},
      {"--epochs", [](const Options& o) { return o.steps > 0; }, nullptr, "--steps is given"},
      {"--packing", [](const Options& o) { return o.loss == "dpo" && o.packing != "none"; }, nullptr,
       "a pair has its own rows"},
      {"--packing", [](const Options& o) { return all_tensors(o); }, nullptr, "the data are rows already"},
      {"--length", [](const Options& o) { return all_tensors(o); }, nullptr, "the data are rows already"},
      {"--master-weights", [](const Options& o) { return o.dtype == "float32"; }, nullptr, "the weights are float32"},
      {"--deterministic", on_cpu, nullptr, "a CPU gives the same bits in each run"},
      {"--cuda-graphs", on_cpu, nullptr, "there are none on a CPU"},
      {"--shard-optimizer", [](const Options&) { return std::getenv("WORLD_SIZE") == nullptr; }, nullptr,
       "there is one process"},
      {"--warmup", [](const Options& o) { return o.steps > 0 && o.warmup >= o.steps && o.warmup > 0; }, nullptr,
       "--steps is no larger, so that --lr is not reached"},
  };
  return all;
}

/// The edits that make one word of another: insertions, deletions, exchanges (Levenshtein 1966).
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j)
      diagonal = std::exchange(row[j + 1], std::min({row[j] + 1, row[j + 1] + 1, diagonal + (a[i] != b[j])}));
  }
  return row.back();
}

/// What is said of an option that there is not.
std::string unknown(const CLI::App& app, std::string given) {
  given = given.substr(0, given.find('='));
  std::string nearest;
  size_t least = std::max<size_t>(3, given.size() / 2);
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames())
      if (const size_t edits = distance(given, "--" + name); edits < least) least = edits, nearest = "--" + name;
  return "there is no option " + given + (nearest.empty() ? "" : ": " + nearest + " is the nearest");
}

[[noreturn]] void refuse(const std::string& why) {
  std::fprintf(stderr, "liger-train: %s (liger-train --help lists the options)\n", why.c_str());
  std::exit(2);
}

/// The arguments, and --resume, as a shell reads them.
std::string command_of(int argc, char** argv) {
  std::string all;
  bool resumes = false;
  for (int i = 0; i < argc; ++i) {
    const std::string word = argv[i];
    resumes = resumes || word == "--resume";
    all += i == 0 ? "" : " ";
    if (!word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
          return std::isalnum(c) || std::strchr("-_./,:=+@%", c) != nullptr;
        })) {
      all += word;
      continue;
    }
    all += '\'';
    for (const char c : word) all += c == '\'' ? "'\\''" : std::string(1, c);
    all += '\'';
  }
  return all + (resumes ? "" : " --resume");
}

}  // namespace

nlohmann::json Options::decisive() const {
  nlohmann::json found = nlohmann::json::object();
  for (const Group& group : table())
    for (const Option& option : group.options)
      if (option.resume == Resume::Same)
        std::visit([&](auto member) { found[option.name()] = this->*member; }, option.member);
  return found;
}

Options parse(int argc, char** argv) {
  Options o;
  o.command = command_of(argc, argv);
  CLI::App app(
      "Fine-tunes a checkpoint of Llama, Mistral, Qwen 2, Qwen 3 or Qwen3.5 on text, pairs of answers, or tokens.",
      "liger-train");
  app.footer(
      "Data are files, any number of them:\n"
      "  *.jsonl        a JSON object a line: {\"text\"}, {\"messages\"}, {\"prompt\", \"completion\"}, or "
      "{\"input_ids\"} and,\n"
      "                 if others are to be learnt, {\"labels\"}; with --loss dpo {\"prompt\", \"chosen\", "
      "\"rejected\"}\n"
      "  *.safetensors  input_ids [rows, tokens] and, if others are to be learnt, labels: taken as they are\n"
      "  others         one document of text each\n\n"
      "OUT receives log.jsonl, a line about the data and one for each step, and checkpoint-<step>, which transformers\n"
      "loads and --resume goes on from; with --lora-rank or --adapter it holds the adapters, which PEFT loads.\n"
      "Ctrl-C and SIGTERM finish the step and write a checkpoint.\n\n"
      "Examples:\n"
      "  liger-train Llama-3.2-1B --data notes.txt --out run --dtype bfloat16 --length 2048 --lr 2e-5\n"
      "  liger-train Llama-3.2-1B --data chats.jsonl --eval held-out.jsonl --eval-steps 200 --out run --resume\n"
      "  liger-train Llama-3.2-1B --data notes.txt --out adapted --lora-rank 16 --lora-alpha 32\n"
      "  liger-train run/checkpoint-600 --loss dpo --data pairs.jsonl --out aligned --lr 1e-6\n"
      "  torchrun --no-python --nproc-per-node 2 liger-train Llama-3.2-1B --data notes.txt --out run --device cuda");
  app.set_version_flag("--version", std::string("liger-train ") + version(), "print the version and exit");
  app.option_defaults()->always_capture_default();
  for (const Group& group : table())
    for (const Option& option : group.options) {
      const auto add = [&](auto member) {
        if constexpr (std::is_same_v<decltype(member), bool Options::*>)
          return app.add_flag(option.flags, o.*member, option.help);
        else return app.add_option(option.flags, o.*member, option.help)->check(option.check);
      };
      std::visit(add, option.member)->required(option.required)->group(group.name);
    }
  app.get_option("--adapter")->excludes("--lora-rank");
  app.get_option("--fresh")->excludes("--lora-rank")->excludes("--adapter");  // no file has what they adapt
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) std::exit(app.exit(error));
    for (const std::string& word : app.remaining())
      if (word.starts_with('-')) refuse(unknown(app, word));
    const bool extra = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
    refuse(extra ? "what is " + app.remaining().at(0) + " for" : error.what());
  }
  for (const Idle& idle : idle_options()) {
    if (app.get_option(idle.option)->count() == 0 || !idle.is_idle(o)) continue;
    if (idle.needs) refuse(std::string(idle.option) + " requires " + idle.needs);
    o.notes.push_back(std::string(idle.option) + " has no effect: " + idle.why);
  }
  for (const auto* files : {&o.data, &o.eval})
    for (const std::string& file : *files)
      if (!is_in(ending(file), {".jsonl", ".safetensors", ".txt", ".text", ".md", ""}))
        o.notes.push_back(file + " is read as one document of text");
  return o;
}

}  // namespace liger::train
