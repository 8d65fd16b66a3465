#include "liger/train/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <type_traits>
#include <variant>

namespace liger::train {

namespace {

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

const std::vector<Option>& table() {
  using O = Options;
  using CLI::IsMember, CLI::NonNegativeNumber, CLI::PositiveNumber, CLI::ExistingDirectory, CLI::ExistingFile,
      CLI::Range;
  static const std::vector<Option> all = {
      {"model", &O::model, "folder of config.json, *.safetensors and tokenizer.json", ExistingDirectory, Resume::Same,
       /*required=*/true},
      // trainer.json has a fingerprint of what the files hold.
      {"--data", &O::data, "files to train on", ExistingFile, Resume::Any, /*required=*/true},
      {"--out", &O::out, "folder for checkpoints and the log", {}, Resume::Any, /*required=*/true},
      {"--loss", &O::loss, "what is learnt", IsMember({"causal", "dpo"})},
      {"--dpo-loss", &O::dpo_loss, "sigmoid, hinge, exo_pair, nca_pair, robust, bco_pair, sppo_hard, ..."},
      {"--dpo-beta", &O::dpo_beta, "weight of the reference in DPO", PositiveNumber},

      {"--length", &O::length, "tokens of a row", Range(int64_t(2), int64_t(1) << 40)},
      {"--batch", &O::batch, "rows, or pairs, in a pass", PositiveNumber},
      {"--accumulate", &O::accumulate, "passes in a step", PositiveNumber},
      {"--packing", &O::packing,
       "how documents fill rows: apart (one does not see another), join (it does), none (a row each)",
       IsMember({"apart", "join", "none"})},
      {"--special-tokens,!--no-special-tokens", &O::special_tokens,
       "add the tokens that the tokenizer's post_processor adds, such as one at the beginning of a text"},
      {"--shuffle,!--no-shuffle", &O::shuffle, "draw the rows' order anew for each epoch"},

      // It gives the number of steps, which is compared.
      {"--epochs", &O::epochs, "passes over the data, where --steps is not given", PositiveNumber, Resume::Any},
      {"--steps", &O::steps, "steps of the optimiser; 0: what --epochs gives", NonNegativeNumber},
      {"--lr", &O::lr, "highest learning rate", NonNegativeNumber},
      {"--schedule", &O::schedule, "of the learning rate, after the warm-up",
       IsMember({"cosine", "linear", "constant"})},
      {"--warmup", &O::warmup, "steps in which the learning rate rises from 0", NonNegativeNumber},
      {"--weight-decay", &O::weight_decay, "of matrices", NonNegativeNumber},
      {"--beta1", &O::beta1, "", Range(0., 1.)},
      {"--beta2", &O::beta2, "", Range(0., 1.)},
      {"--eps", &O::eps, "", PositiveNumber},
      {"--clip", &O::clip, "largest norm of all gradients; 0: any", NonNegativeNumber},
      {"--seed", &O::seed, "", NonNegativeNumber},

      {"--dtype", &O::dtype, "of the model's weights", IsMember({"float32", "bfloat16"})},
      {"--master-weights,!--no-master-weights", &O::master_weights,
       "the optimiser keeps float copies of bfloat16 weights, and adds up their gradients in float"},
      {"--device", &O::device, "cpu, cuda, cuda:1, ...", {}, Resume::Any},
      {"--deterministic,!--no-deterministic",
       &O::deterministic,
       "the same bits in each run; on a GPU the fastest attention adds up in its own order",
       {},
       Resume::Any},
      {"--cuda-graphs", &O::cuda_graphs,
       "auto: on a GPU, forward and backward of rows of one length are launched as one graph, where that can be; off",
       IsMember({"auto", "off"}), Resume::Any},
      {"--threads", &O::threads, "of the CPU; 0: torch's choice", NonNegativeNumber, Resume::Any},
      {"--shard-optimizer", &O::shard_optimizer,
       "each of torchrun's processes keeps the optimiser's state of a share of the weights"},
      {"--gradient-checkpointing", &O::gradient_checkpointing, "less memory, more time", {}, Resume::Any},
      {"--fresh", &O::fresh, "begin with weights drawn from the seed: the model's folder needs none"},

      {"--lora-rank", &O::lora_rank, "train LoRA adapters of this rank, and freeze the model; 0: train the model",
       NonNegativeNumber},
      {"--lora-alpha", &O::lora_alpha, "adapters are scaled by alpha / rank", PositiveNumber},
      {"--lora-target", &O::lora_target,
       "layers with adapters: all, attention, mlp, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
       "down_proj, with commas"},
      {"--lora-dropout", &O::lora_dropout, "of the adapters' input", Range(0., 0.999)},
      {"--lora-rslora", &O::lora_rslora, "scale adapters by alpha / sqrt(rank)"},
      {"--adapter", &O::adapter,
       "begin with the adapters in this folder, which PEFT or liger-train has saved: its adapter_config.json says what "
       "--lora-rank and its like would",
       ExistingDirectory},

      {"--eval", &O::eval, "files to evaluate on", ExistingFile, Resume::Any},
      {"--eval-steps", &O::eval_steps, "evaluate after so many steps each; 0: at the end", NonNegativeNumber,
       Resume::Any},
      {"--save-steps", &O::save_steps, "write a checkpoint after so many steps each; 0: at the end", NonNegativeNumber,
       Resume::Any},
      {"--keep", &O::keep, "newest checkpoints to keep; 0: all", NonNegativeNumber, Resume::Any},
      {"--resume", &O::resume, "go on from the newest checkpoint in --out, if there is one", {}, Resume::Any},
  };
  return all;
}

}  // namespace

nlohmann::json Options::decisive() const {
  nlohmann::json found = nlohmann::json::object();
  for (const Option& option : table())
    if (option.resume == Resume::Same)
      std::visit([&](auto member) { found[option.name()] = this->*member; }, option.member);
  return found;
}

Options parse(int argc, char** argv) {
  Options o;
  CLI::App app(
      "Fine-tunes a checkpoint of Llama, Mistral, Qwen 2 or Qwen 3 on text, pairs of answers, or tokens.\n\n"
      "Data are files, any number of them:\n"
      "  *.jsonl        a JSON object a line: {\"text\"}, {\"messages\"}, {\"prompt\", \"completion\"}, or "
      "{\"input_ids\"} and,\n"
      "                 if others are to be learnt, {\"labels\"}; with --loss dpo {\"prompt\", \"chosen\", "
      "\"rejected\"}\n"
      "  *.safetensors  input_ids [rows, tokens] and, if others are to be learnt, labels: taken as they are\n"
      "  others         one document of text each\n\n"
      "OUT receives log.jsonl, a line about the data and one for each step, and checkpoint-<step>, which transformers "
      "loads and --resume goes on from; with --lora-rank or --adapter it holds the adapters, which PEFT loads.\n"
      "`torchrun --no-python --nproc-per-node N liger-train ...` trains in N processes, each with --batch rows in a "
      "pass.",
      "liger-train");
  app.option_defaults()->always_capture_default();
  for (const Option& option : table()) {
    const auto add = [&](auto member) {
      if constexpr (std::is_same_v<decltype(member), bool Options::*>)
        return app.add_flag(option.flags, o.*member, option.help);
      else return app.add_option(option.flags, o.*member, option.help)->check(option.check);
    };
    std::visit(add, option.member)->required(option.required);
  }
  for (const char* name : {"--lora-alpha", "--lora-target", "--lora-dropout", "--lora-rslora"})
    app.get_option(name)->needs("--lora-rank");
  app.get_option("--adapter")->excludes("--lora-rank");
  app.get_option("--fresh")->excludes("--lora-rank")->excludes("--adapter");  // no file has what they adapt
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) { std::exit(app.exit(error)); }
  return o;
}

}  // namespace liger::train
