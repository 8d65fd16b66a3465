"""Times steps of TRL's trainers on one GPU: plain TRL, with liger-kernel's layers, and with this library, in turns.

    python benchmarks/trl_steps.py --trl DIR --method dpo --models llama-8b
    python benchmarks/trl_steps.py --trl DIR --method grpo --models llama-1b --batch 16 --completion 1024
    python benchmarks/trl_steps.py --trl DIR --method dpo --models tiny --batch 2 --prompt 8 --completion 8    on a CPU

DIR has trl 1.16 and what it needs beside transformers (datasets, dill, multiprocess), unpacked. Weights and tokens are
random; weights, gradients and AdamW's moments are bfloat16, with --lora adapters in float32; layers are checkpointed,
as TRL's configurations have it.

    plain   TRL and transformers
    triton  use_liger_kernel=True with the liger-kernel that --triton-liger names
    ours    use_liger_kernel=True and liger_kernel.trl.patch(); "ours+256MiB" keeps as many bytes of logits for backward

dpo takes --batch pairs of sequences a step, and a reference model, which with adapters is the model without them. grpo
takes --batch completions of groups of eight and no reference model. Nothing is generated: rollout_func gives random
completions, so that a step is what training takes. A sequence is --prompt and --completion tokens. Results are added to
the file --out as they come: a run that was cut off goes on where it was.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from liger_kernel.measure.meters import Memory, is_out_of_memory
from liger_kernel.measure.shapes import SHAPES, config_of

WARM_UP, GROUP = 2, 8
SPECIAL = "<unk>", "<end>", "<pad>"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--trl", required=True, metavar="DIR", help="a folder that holds trl, datasets, dill and multiprocess")
    add("--method", choices=("dpo", "grpo"), default="dpo", help="default: %(default)s")
    add("--models", default="llama-1b", help=f"of {', '.join(SHAPES)} (default: %(default)s)")
    add("--arms", default="plain,triton,ours", help="default: %(default)s")
    add("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank on all linear layers")
    add("--batch", type=int, default=4, help="pairs or completions a step (default: %(default)s)")
    add("--prompt", type=int, default=512, help="tokens (default: %(default)s)")
    add("--completion", type=int, default=512, help="tokens (default: %(default)s)")
    add("--steps", type=int, default=6, help=f"that are measured, after {WARM_UP} (default: %(default)s)")
    add("--triton-liger", metavar="DIR", default="", help="a folder that holds liger_kernel with Triton")
    add("--out", type=Path, default=Path("out/trl.json"), help="default: %(default)s")
    args = parser.parse_args()
    if not Path(args.trl, "trl").is_dir():
        parser.error("--trl names a folder that holds the package trl")
    return args


def tokenizer_of(vocabulary):
    """A word for each id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: i for i, name in enumerate(SPECIAL)} | {f"w{i}": i for i in range(len(SPECIAL), vocabulary)}
    unknown, end, padding = SPECIAL
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, eos_token=end, pad_token=padding, padding_side="left"
    )


class Steps:
    """The seconds of each step, and the peak after the first."""

    def __init__(self, device):
        self.cuda, self.memory, self.marks = device == "cuda", Memory(device), []

    def end(self):
        if self.cuda:
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())
        if len(self.marks) == WARM_UP and self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def result(self, tokens, losses):
        times = [b - a for a, b in zip(self.marks[WARM_UP - 1 :], self.marks[WARM_UP:])]
        found = {
            "seconds": statistics.median(times),
            "times": times,
            "tokens_per_second": tokens / statistics.median(times),
            "losses": losses,
            "peak_gb": self.memory.since_start() / 1e9,
        }
        return found | ({"reserved_gb": torch.cuda.max_memory_reserved() / 1e9} if self.cuda else {})


def texts(vocabulary, count, length, seed):
    """Random words; none is a special one."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(SPECIAL), vocabulary, (count, length), generator=generator).tolist()
    return [" ".join(f"w{i}" for i in row) for row in ids]


def trainer_of(job, folder):
    import transformers
    import trl
    from datasets import Dataset

    config, _ = config_of(job["model"])
    config.use_cache = False
    cuda = job["device"] == "cuda"

    def made():
        torch.manual_seed(0)
        with torch.device(job["device"]):
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16 if cuda else torch.float32
            )

    tokenizer = tokenizer_of(config.vocab_size)
    options = {
        "output_dir": folder, "max_steps": WARM_UP + job["steps"], "per_device_train_batch_size": job["batch"],
        "bf16": cuda, "use_cpu": not cuda, "dataloader_pin_memory": cuda, "learning_rate": 1e-6, "report_to": [],
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "optim": "adamw_torch_fused",
        "use_liger_kernel": job["arm"] != "plain",
    }  # fmt: skip
    given = {"model": made(), "processing_class": tokenizer}
    if job["lora"]:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(
            r=job["lora"], lora_alpha=2 * job["lora"], target_modules="all-linear", task_type="CAUSAL_LM"
        )
    count = (WARM_UP + job["steps"]) * job["batch"]
    make = lambda length, seed: texts(config.vocab_size, count, length, seed)
    if job["method"] == "dpo":
        rows = zip(make(job["prompt"], 1), make(job["completion"], 2), make(job["completion"], 3))
        data = [{"prompt": prompt, "chosen": " " + one, "rejected": " " + two} for prompt, one, two in rows]
        settings = trl.DPOConfig(max_length=job["prompt"] + job["completion"] + 1, **options)
        if not job["lora"]:
            given["ref_model"] = made()
        return trl.DPOTrainer(args=settings, train_dataset=Dataset.from_list(data), **given)

    def completions(prompts, trainer):
        seed = trainer.state.global_step
        drawn = lambda length, seed: torch.randint(
            len(SPECIAL), config.vocab_size, (len(prompts), length), generator=torch.Generator().manual_seed(seed)
        )
        of_prompts = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
        ids = drawn(job["completion"], seed).tolist()
        return {"prompt_ids": of_prompts, "completion_ids": ids, "logprobs": None}

    data = [{"prompt": prompt} for prompt in make(job["prompt"], 1)]
    settings = trl.GRPOConfig(
        num_generations=min(GROUP, job["batch"]), max_completion_length=job["completion"], **options
    )
    reward = lambda completion_ids, **_: [float(ids[0] % 7) for ids in completion_ids]
    return trl.GRPOTrainer(
        args=settings, train_dataset=Dataset.from_list(data), reward_funcs=reward, rollout_func=completions, **given
    )


def work(job):
    """An arm, in a process of its own: its result, or that it was out of memory, goes to the file of the job."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    sys.path.append(job["trl"])
    import transformers

    if job["arm"] == "triton":
        from liger_kernel.measure.build import check_rival

        check_rival(job["rival"])
    elif job["arm"].startswith("ours"):
        import liger_kernel.trl

        mebibytes = job["arm"].partition("+")[2].removesuffix("MiB") or 0
        print(liger_kernel.trl.patch(max_bytes=int(mebibytes) << 20), flush=True)
    steps = Steps(job["device"])

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            steps.end()

    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(job, folder)
            trainer.add_callback(Watch())
            trainer.train()
            if job["arm"].startswith("ours"):
                import liger_kernel

                print(liger_kernel.report(trainer.model), flush=True)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        result = steps.result(tokens_of(job), losses)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        result = None
    Path(job["results"]).write_text(json.dumps(result))


def tokens_of(job):
    """Of all sequences of a step."""
    return job["batch"] * (1 + (job["method"] == "dpo")) * (job["prompt"] + job["completion"])


def main():
    from liger_kernel.measure.launch import run
    from liger_kernel.measure.machine import machine, version_of
    from liger_kernel.measure.report import table
    from provenance import save

    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    report["machine"] = machine(device, sources=Path(__file__).parent, rival=args.triton_liger)
    sys.path.append(args.trl)
    report["machine"]["trl"] = version_of("trl")
    names = "method", "model", "lora", "batch", "prompt", "completion", "arm"
    rows = {tuple(row[name] for name in names): row for row in report["rows"]}
    failed = False
    for model in args.models.split(","):
        for arm in args.arms.split(","):
            key = args.method, model, args.lora, args.batch, args.prompt, args.completion, arm
            if key in rows:
                continue
            rival = args.triton_liger if arm == "triton" else None
            with tempfile.TemporaryDirectory() as folder:
                results = Path(folder, "result")
                job = dict(zip(names, key)) | {
                    "steps": args.steps,
                    "device": device,
                    "trl": str(Path(args.trl).resolve()),
                }
                job |= {"rival": rival, "results": str(results)}
                code = run(str(Path(__file__).resolve()), json.dumps(job), rival=rival)
                if not results.exists():
                    print(*key, f"failed with status {code}", flush=True)
                    failed = True
                    continue
                rows[key] = dict(zip(names, key)) | {"result": json.loads(results.read_text())}
            report["rows"] = [*rows.values()]
            save(args.out, report)
    lines = []
    for row in rows.values():
        found, key = row["result"], [str(row[name]) for name in names]
        if found is None:
            lines.append([*key, "out of memory", "", ""])
        else:
            lines.append(
                [*key, f"{found['seconds']:.3f}", f"{found['tokens_per_second']:,.0f}", f"{found['peak_gb']:.1f}"]
            )
    print(table([*names, "s a step", "tokens/s", "GB"], lines))
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        work(json.loads(sys.argv[1]))
    else:
        main()
