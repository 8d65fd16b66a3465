#include "liger/train/options.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

namespace liger::train {

nlohmann::json Options::decisive() const {
  return {{"model", model},
          {"loss", loss},
          {"dpo_loss", dpo_loss},
          {"dpo_beta", dpo_beta},
          {"schedule", schedule},
          {"dtype", dtype},
          {"packing", packing},
          {"length", length},
          {"batch", batch},
          {"accumulate", accumulate},
          {"steps", steps},
          {"warmup", warmup},
          {"seed", seed},
          {"lr", lr},
          {"weight_decay", weight_decay},
          {"beta1", beta1},
          {"beta2", beta2},
          {"eps", eps},
          {"clip", clip},
          {"shuffle", shuffle},
          {"fresh", fresh},
          {"shard_optimizer", shard_optimizer},
          {"master_weights", master_weights}};
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
      "OUT receives log.jsonl, a line a step, and checkpoint-<step>, which transformers loads and --resume goes on "
      "from.\n"
      "`torchrun --no-python --nproc-per-node N liger-train ...` trains in N processes, each with --batch rows in a "
      "pass.",
      "liger-train");
  app.option_defaults()->always_capture_default();
  app.add_option("model", o.model, "folder of config.json, *.safetensors and tokenizer.json")
      ->required()
      ->check(CLI::ExistingDirectory);
  app.add_option("--data", o.data, "files to train on")->required()->check(CLI::ExistingFile);
  app.add_option("--out", o.out, "folder for checkpoints and the log")->required();
  app.add_option("--loss", o.loss, "what is learnt")->check(CLI::IsMember({"causal", "dpo"}));
  app.add_option("--dpo-loss", o.dpo_loss, "sigmoid, hinge, exo_pair, nca_pair, robust, bco_pair, sppo_hard, ...");
  app.add_option("--dpo-beta", o.dpo_beta, "weight of the reference in DPO")->check(CLI::PositiveNumber);

  app.add_option("--length", o.length, "tokens of a row")->check(CLI::Range(int64_t(2), int64_t(1) << 40));
  app.add_option("--batch", o.batch, "rows, or pairs, in a pass")->check(CLI::PositiveNumber);
  app.add_option("--accumulate", o.accumulate, "passes in a step")->check(CLI::PositiveNumber);
  app.add_option("--packing", o.packing,
                 "how documents fill rows: apart (one does not see another), join (it does), none (a row each)")
      ->check(CLI::IsMember({"apart", "join", "none"}));
  app.add_flag("--shuffle,!--no-shuffle", o.shuffle, "draw the rows' order anew for each epoch");

  app.add_option("--epochs", o.epochs, "passes over the data, where --steps is not given")->check(CLI::PositiveNumber);
  app.add_option("--steps", o.steps, "steps of the optimiser; 0: what --epochs gives")->check(CLI::NonNegativeNumber);
  app.add_option("--lr", o.lr, "highest learning rate")->check(CLI::NonNegativeNumber);
  app.add_option("--schedule", o.schedule, "of the learning rate, after the warm-up")
      ->check(CLI::IsMember({"cosine", "linear", "constant"}));
  app.add_option("--warmup", o.warmup, "steps in which the learning rate rises from 0")->check(CLI::NonNegativeNumber);
  app.add_option("--weight-decay", o.weight_decay, "of matrices")->check(CLI::NonNegativeNumber);
  app.add_option("--beta1", o.beta1)->check(CLI::Range(0., 1.));
  app.add_option("--beta2", o.beta2)->check(CLI::Range(0., 1.));
  app.add_option("--eps", o.eps)->check(CLI::PositiveNumber);
  app.add_option("--clip", o.clip, "largest norm of all gradients; 0: any")->check(CLI::NonNegativeNumber);
  app.add_option("--seed", o.seed)->check(CLI::NonNegativeNumber);

  app.add_option("--dtype", o.dtype, "of the model's weights")->check(CLI::IsMember({"float32", "bfloat16"}));
  app.add_flag("--master-weights,!--no-master-weights", o.master_weights,
               "the optimiser keeps float copies of bfloat16 weights, and adds up their gradients in float");
  app.add_option("--device", o.device, "cpu, cuda, cuda:1, ...");
  app.add_flag("--deterministic,!--no-deterministic", o.deterministic,
               "the same bits in each run; on a GPU the fastest attention adds up in an order of its own");
  app.add_option("--threads", o.threads, "of the CPU; 0: torch's choice")->check(CLI::NonNegativeNumber);
  app.add_flag("--shard-optimizer", o.shard_optimizer,
               "each of torchrun's processes keeps the optimiser's state of a share of the weights");
  app.add_flag("--gradient-checkpointing", o.gradient_checkpointing, "less memory, more time");
  app.add_flag("--fresh", o.fresh, "begin with weights drawn from the seed: the model's folder needs none");

  app.add_option("--eval", o.eval, "files to evaluate on")->check(CLI::ExistingFile);
  app.add_option("--eval-steps", o.eval_steps, "evaluate after so many steps each; 0: at the end")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--save-steps", o.save_steps, "write a checkpoint after so many steps each; 0: at the end")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--keep", o.keep, "newest checkpoints to keep; 0: all")->check(CLI::NonNegativeNumber);
  app.add_flag("--resume", o.resume, "go on from the newest checkpoint in --out, if there is one");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) { std::exit(app.exit(error)); }
  return o;
}

}  // namespace liger::train
