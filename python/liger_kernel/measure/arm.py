"""One arm, in a separate process: steps of a model, timed.

A job is a dict:

    model, layers           as config_of takes them
    arm                     a side of build.make_model, with options: "ours+plan"
    batch, lengths          sequences a step, and tokens in each, one length after another
    warm_up, steps          steps; steps None: as many as SECONDS have room for
    shrink                  whether half the batch is tried where it does not fit, and so on
    lora, quantise          the rank of adapters or 0; a format of BASES or None
    checkpointing, dtype    of the layers; of the weights
    budget                  of memory, for the option plan
    cap_gb                  GB of the GPU that the process may take once it has the model, or None
    profile                 whether kernels are listed, too
    device, results         "cuda" or "cpu"; the file that gets a line of JSON for each length
    rival                   the folder of the package that side triton takes as liger_kernel, of side fla's FLA, or of
                            side mamba's mamba-ssm and causal-conv1d

and the options are

    compile  torch.compile of the model
    adamw    LigerAdamW in place of torch's fused AdamW
    graph    liger_kernel.graphs.capture_step
    passes   liger_kernel.graphs.capture_model
    plan     layers keep what fits into the budget, by liger_kernel.memory.plan
    host     layers keep their input on the host, by liger_kernel.memory.keep
    packed   the batch's sequences are the documents of one row, told by position_ids
    ones     the batch has an attention mask of ones, as trainers pass it
    padded   the batch's sequences have half of the tokens to all of them, and padding after them, which is counted
    bf16, nf4, int8, fp8
             the format of frozen weights, in place of the job's `quantise`
"""

import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict

import torch

from liger_kernel.measure.build import make_model
from liger_kernel.measure.meters import Memory, is_out_of_memory, kernel_times

#: Formats of frozen weights, and what a job's `quantise` is for each.
BASES = {"bf16": None, "nf4": "nf4", "int8": "int8", "fp8": "fp8"}
OPTIONS = ("compile", "adamw", "graph", "passes", "plan", "host", "packed", "padded", "ones", *BASES)
FEWEST, MOST = 3, 20  # steps that are measured
SECONDS = 5  # to measure for
MASKED = 0.3  # of the tokens of a masked language model have a label, as in ModernBERT's training
LONG = 20  # seconds of a step after which one more is measured


class Arm:
    """One rank of an arm."""

    def __init__(self, job):
        self.job, self.cuda = job, job["device"] == "cuda"
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        if self.ranks > 1:
            torch.distributed.init_process_group("nccl" if self.cuda else "gloo")
        side, *self.options = job["arm"].split("+")
        bases = [BASES[option] for option in self.options if option in BASES]
        self.model = make_model({**job, "quantise": [job["quantise"], *bases][-1]}, side, self.device, self.ranks)
        if self.cuda and job["cap_gb"]:  # a checkpoint is quantised tensor by tensor, these weights all at once
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, job["cap_gb"] * 1e9 / total))
        self.vocabulary = self.model.config.get_text_config().vocab_size
        self.masked = getattr(self.model, "loss_type", None) == "ForMaskedLM"
        self.memory = Memory(job["device"])
        self.optimizer = self._make_optimizer()
        self.mixed = job["lora"] and job["dtype"] == "bfloat16"
        self.captured = self.plan = None
        if "host" in self.options:
            from liger_kernel.memory import keep

            keep(self.model, "host")
        if "passes" in self.options:
            from liger_kernel.graphs import capture_model

            capture_model(self.model, warmup=1, shapes=len(job["lengths"]))
        if "compile" in self.options:
            self.model = torch.compile(self.model)

    def _make_optimizer(self):
        """PyTorch's fused AdamW, as transformers' Trainer takes it; None where nothing is trained."""
        lr = 1e-4 if self.job["lora"] else 1e-5
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not parameters:
            return None
        if "adamw" in self.options:
            from liger_kernel.optim import LigerAdamW

            return LigerAdamW(parameters, lr=lr)
        return torch.optim.AdamW(parameters, lr=lr, fused=True)

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def batch(self, length, batch, number):
        """Random tokens, which number, the rank and the shape draw."""
        generator = torch.Generator().manual_seed(number * self.ranks + self.rank)
        ids = torch.randint(self.vocabulary, (batch, length), generator=generator).to(self.device)
        if self.masked:
            chosen = torch.rand(batch, length, generator=generator) < MASKED
            return {"input_ids": ids, "labels": ids.masked_fill(~chosen.to(self.device), -100)}
        if "padded" in self.options:
            counts = torch.randint(length // 2, length + 1, (batch, 1), generator=generator)
            mask = (torch.arange(length) < counts).long().to(self.device)
            return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
        if "packed" in self.options:
            row = ids.view(1, -1)
            positions = torch.arange(length, device=self.device).repeat(batch)[None]
            return {"input_ids": row, "labels": row, "position_ids": positions}
        return {"input_ids": ids, "labels": ids} | (
            {"attention_mask": torch.ones_like(ids)} if "ones" in self.options else {}
        )

    def loss_of(self, model, batch):
        with torch.autocast(self.device.type, torch.bfloat16) if self.mixed else nullcontext():
            return model(**batch).loss

    def step(self, length, batch, number):
        """The mean loss of this rank's tokens."""
        inputs = self.batch(length, batch, number)
        if "graph" in self.options:
            if self.captured is None:
                from liger_kernel.graphs import capture_step

                self.captured = capture_step(self.model, self.optimizer, inputs, loss=self.loss_of, warmup=1)
            return self.captured(inputs)
        loss = self.loss_of(self.model, inputs)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def make_plan(self, length, batch):
        from liger_kernel.memory import plan

        if self.plan is not None:
            self.plan.undo()
        inputs = self.batch(length, batch, 0)
        budget = self.job["budget"]
        self.plan = plan(self.model, inputs, budget, loss=self.loss_of, optimizer=self.optimizer).apply()
        if self.rank == 0:
            print(self.plan, flush=True)

    def _most(self, seconds):
        """The most of all ranks, which take as many steps."""
        if self.ranks == 1:
            return seconds
        every = torch.tensor(seconds).to(self.device)
        torch.distributed.all_reduce(every, torch.distributed.ReduceOp.MAX)
        return every.item()

    def warm_up(self, length, batch, losses, bar):
        """Steps that are not measured; returns the seconds of the last."""
        for number in range(self.job["warm_up"]):
            begin = time.perf_counter()
            losses.append(self.step(length, batch, number))
            self.synchronize()
            seconds = self._most(time.perf_counter() - begin)
            bar.update()
            if seconds > LONG and not set(self.options) & {"compile", "graph", "passes"}:
                break
        if self.cuda and not set(self.options) & {"graph", "passes"}:  # which allocate when they capture, and no more
            torch.cuda.reset_peak_memory_stats()
        return seconds

    def timed(self, length, batch, steps, losses, bar):
        """The seconds of each of some steps; on a GPU, from the beginning of one to that of the next."""
        marks = []
        if self.cuda:
            mark = lambda: marks.append(torch.cuda.Event(enable_timing=True)) or marks[-1].record()
        else:
            mark = lambda: marks.append(time.perf_counter())
        self.synchronize()
        mark()
        first = len(losses)
        bar.total = first + steps
        for number in range(first, first + steps):
            losses.append(self.step(length, batch, number))
            mark()
            bar.update()
        self.synchronize()
        pairs = zip(marks, marks[1:])
        return [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairs]

    def steps_of(self, seconds):
        """How many steps to measure, of which one takes so many seconds."""
        return self.job["steps"] or (1 if seconds > LONG else min(MOST, max(FEWEST, int(SECONDS / seconds))))

    def measure(self, length, batch):
        """The result of some steps: "seconds" is the median of "times"."""
        losses, self.captured = [], None
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        if "plan" in self.options:
            self.make_plan(length, batch)
        with self._bar() as bar:
            one = self.warm_up(length, batch, losses, bar)
            warm_up = time.perf_counter() - begin
            times = self.timed(length, batch, self.steps_of(one), losses, bar)
            if one > LONG:  # perhaps only because kernels were tuned in it
                steps = self.steps_of(self._most(times[0]))
                if steps > len(times):
                    times = self.timed(length, batch, steps, losses, bar)
        if not self.cuda:  # measuring it makes a step slower
            self.memory.start()
            self.step(length, batch, len(losses))
        result = {
            "batch": batch,
            "seconds": statistics.median(times),
            "times": times,
            "warm_up_seconds": warm_up,
            "tokens_per_second": batch * length / statistics.median(times),
            "losses": [loss.item() for loss in losses],
            "peak_gb": self.memory.since_start() / 1e9,
            "note": self.captured.reason if self.captured else None,
        }
        if self.plan is not None:
            result["predicted_gb"], result["predicted_seconds"] = self.plan.peak_bytes / 1e9, self.plan.seconds
            result["levels"] = dict(Counter(self.plan.levels.values()))
            result["costs"] = [{level: asdict(cost) for level, cost in costs.items()} for costs in self.plan.costs]
        if self.cuda:
            result["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
            if self.job["profile"]:
                result["profile"] = kernel_times(lambda: self.step(length, batch, 99))
        return result

    def _bar(self):
        try:
            from tqdm import tqdm
        except ImportError:
            return _NoBar()
        return tqdm(
            desc=self.job.get("title", self.job["arm"]), unit="step", leave=False, disable=self.rank > 0 or None
        )

    def forget(self):
        """Frees what a step that did not fit holds."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        if self.cuda:
            torch.cuda.empty_cache()

    def fitting(self, length):
        """The result with the largest batch that fits; None where not even one sequence does."""
        batch = self.job["batch"]
        while batch:
            result = None
            try:
                result = self.measure(length, batch)
            except Exception as error:  # what the failed step holds goes with its frame
                if not is_out_of_memory(error):
                    raise
            self.forget()
            if result:
                return result
            if self.ranks > 1:
                self.write({"length": length, "out_of_memory": batch})
                sys.exit(1)  # the other ranks wait in a collective: torchrun ends them
            batch //= 2
        return None

    def write(self, line):
        write(self.job, line)

    def run(self):
        """Measures every length, or what `largest` asks for."""
        if largest := self.job.get("largest"):
            from liger_kernel.measure.largest import search

            self.write({"result": search(self, **largest)})
            return
        for length in self.job["lengths"]:
            result = self.fitting(length) if self.job["shrink"] else self.measure(length, self.job["batch"])
            if self.rank == 0:
                self.write({"length": length, "result": result})
        if self.ranks > 1:
            torch.distributed.destroy_process_group()


class _NoBar:
    """In place of a progress bar, where tqdm is not installed."""

    total = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def update(self):
        pass


def write(job, line):
    with open(job["results"], "a") as file:
        file.write(json.dumps(line) + "\n")


def main(text: str) -> None:
    """Runs a job, given as JSON. What it fails with is its last line of results, and the exit status is 1."""
    job = json.loads(text)
    warnings.filterwarnings(
        "ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning
    )  # its name in 4.57, too
    try:
        Arm(job).run()
    except Exception as error:
        if is_out_of_memory(error):
            write(job, {"out_of_memory": job["batch"]})
        else:
            traceback.print_exc()
            message = str(error).strip().splitlines() or [""]
            write(job, {"error": f"{type(error).__name__}: {message[0]}"})
        sys.exit(1)
