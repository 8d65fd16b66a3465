"""Align a small Llama by preferences or rewards, with plain torch's losses on logits and with this library's; compare.

The prompts are beginnings of real text. A completion is how the text goes on, with a share of its tokens replaced by
others of the text; the more were replaced, the worse it is: that makes the preferences, the rewards and who is liked.
Each run has a process of its own, the same seed and the same data; what "the same loss" means, comparison.py says.
"""

import json
import math
import os
import sys
import tempfile
from argparse import Namespace
from typing import Callable, NamedTuple

import comparison
import numpy
import text
import torch
import torch.nn.functional as F

IGNORE = -100
BETA, KL, CLIP = (
    0.1,
    0.04,
    0.2,
)  # of the preferences; of GRPO, its weight of the divergence and how far its ratio may go


class Batch(Namespace):
    """hidden and ref_hidden [rows, tokens, width] with their heads' weights, labels [rows, tokens], advantages and
    liked [rows], old [rows, tokens], the log-probabilities under the policy that made the completions."""

    def logp(self):
        return log_probs(self.hidden, self.weight, self.labels)

    @torch.no_grad()
    def ref_logp(self):
        return log_probs(self.ref_hidden, self.ref_weight, self.labels)

    @property
    def mask(self):
        return self.labels != IGNORE


def log_probs(hidden, weight, labels):
    logp = F.linear(hidden, weight).float().log_softmax(-1)
    return logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0].where(labels != IGNORE, 0)


def nll(logp, b):
    """The mean over the chosen tokens, which the losses without a reference add."""
    half = len(logp) // 2
    return -logp[:half].sum() / b.mask[:half].sum()


def dpo(b):
    chosen, rejected = (b.logp().sum(1) - b.ref_logp().sum(1)).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def orpo(b):
    logp = b.logp()
    average = logp.sum(1) / b.mask.sum(1)
    chosen, rejected = (average - torch.log1p(-average.exp())).chunk(2)
    return nll(logp, b) - BETA * F.logsigmoid(chosen - rejected).mean()


def cpo(b):
    logp = b.logp()
    chosen, rejected = logp.sum(1).chunk(2)
    return nll(logp, b) - F.logsigmoid(BETA * (chosen - rejected)).mean()


def simpo(b):
    logp = b.logp()
    chosen, rejected = (logp.sum(1) / b.mask.sum(1)).chunk(2)
    return nll(logp, b) - F.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean()


def kto(b):
    gain = BETA * (b.logp().sum(1) - b.ref_logp().sum(1))
    return (1 - torch.sigmoid(gain.where(b.liked, -gain))).mean()


def grpo(b):
    logp, ref_logp, advantages = b.logp(), b.ref_logp(), b.advantages[:, None]
    ratio = (logp - b.old).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    loss = loss + KL * ((ref_logp - logp).exp() - (ref_logp - logp) - 1)
    return (loss * b.mask).sum() / b.mask.sum()


def jsd(b):
    labels = b.labels[b.mask]
    student, teacher = (F.linear(hidden[b.mask], weight).float().log_softmax(-1)
                        for hidden, weight in ((b.hidden, b.weight), (b.ref_hidden, b.ref_weight)))  # fmt: skip
    middle = torch.log((student.exp() + teacher.exp()) / 2)
    soft = sum(F.kl_div(middle, part, reduction="sum", log_target=True) for part in (student, teacher)) / 2
    return 0.5 * F.nll_loss(student, labels) + 0.5 * soft / len(labels)


def of_sequences(args):
    """Their log-probabilities, in a loss: half of the tokens are a completion, and a fresh model finds all alike."""
    return BETA * args.length / 2 * math.log(comparison.SIZES[args.config][0][0])


class Loss(NamedTuple):
    plain: Callable  # (batch) -> loss
    ours: Callable  # (liger_kernel.chunked_loss, batch) -> loss
    group: int = 2  # completions of a prompt; all first ones come first in a batch
    other: str | None = None  # the model beside the trained one: its first state, or a teacher
    repeats: int = 1  # steps with the same batch, the first of which says what `old` is
    sums: Callable = lambda args: 0.0  # how large the numbers are that it takes differences of, where larger than it


LOSSES = {
    "dpo": Loss(
        dpo,
        lambda c, b: c.LigerFusedLinearDPOLoss(beta=BETA)(
            b.weight, b.hidden, b.labels, None, b.ref_hidden, b.ref_weight
        )[0],
        other="first state",
        sums=of_sequences,
    ),
    "orpo": Loss(orpo, lambda c, b: c.LigerFusedLinearORPOLoss(beta=BETA)(b.weight, b.hidden, b.labels)[0]),
    "cpo": Loss(cpo, lambda c, b: c.LigerFusedLinearCPOLoss(beta=BETA)(b.weight, b.hidden, b.labels)[0]),
    "simpo": Loss(
        simpo, lambda c, b: c.LigerFusedLinearSimPOLoss(beta=2.0, gamma=0.5)(b.weight, b.hidden, b.labels)[0]
    ),
    "kto": Loss(
        kto,
        lambda c, b: c.LigerFusedLinearKTOLoss(beta=BETA, use_ref_model=True)(
            b.hidden, b.weight, b.labels, preference_labels=b.liked, ref_input=b.ref_hidden, ref_weight=b.ref_weight
        )[0],
        other="first state",
        sums=of_sequences,
    ),
    "grpo": Loss(
        grpo,
        lambda c, b: c.LigerFusedLinearGRPOLoss(beta=KL, epsilon_low=CLIP, epsilon_high=CLIP, loss_type="dapo")(
            b.hidden,
            b.weight,
            b.labels,
            b.mask,
            b.advantages,
            ref_input=b.ref_hidden,
            ref_weight=b.ref_weight,
            old_per_token_logps=b.old,
        )[0],
        group=4,
        other="first state",
        repeats=2,
        sums=lambda args: 1.0,  # advantages
    ),
    "jsd": Loss(
        jsd,
        lambda c, b: c.LigerFusedLinearJSDLoss(beta=0.5)(
            *(t.flatten(0, -2) for t in (b.hidden, b.weight, b.ref_hidden, b.ref_weight)), b.labels.flatten()
        ),
        other="teacher",
    ),
}


def arguments(argv=None):
    parser = comparison.parser(__doc__)
    add = parser.add_argument
    add("--loss", default="dpo,grpo", help=f"some of {','.join(LOSSES)} (default: %(default)s)")
    add(
        "--batch",
        type=int,
        help="sequences in a step, a multiple of 4 (default: 4 on a CPU, up to 8 on a GPU, by its memory)",
    )
    add("--length", type=int, help="tokens in a sequence (default: 512 on a CPU, 2048 on a GPU)")
    args = parser.parse_args(argv)
    if args.worker:
        return args
    comparison.settle(parser, args)
    args.length = args.length or (512 if args.device == "cpu" else 2048)
    # GB of the model, its optimiser and the reference.
    args.batch = args.batch or max(4, comparison.fitting_batch(args.device, 15) // 4 * 4)
    args.lr = args.lr or comparison.SIZES[args.config][1] / 10
    if args.batch % 4:
        parser.error(f"--batch must be a multiple of 4, the completions of a prompt, and is {args.batch}")
    if unknown := set(args.loss.split(",")) - LOSSES.keys():
        parser.error(f"there is no loss {', '.join(sorted(unknown))}: take some of {', '.join(LOSSES)}")
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched
    return args


def completions(blocks, group, seed):
    """(ids [rows, length], labels [rows, length - 1], rewards [rows]) of prompts from blocks [prompts, length]: `group`
    completions of each, the first ones of all prompts first. The n-th has n / group of its tokens replaced, which its
    reward says, and a length of its own."""
    generator = numpy.random.default_rng(seed)
    prompts, length = blocks.shape
    ids = numpy.tile(blocks, (group, 1))
    places = numpy.arange(length)
    ends = generator.integers(3 * length // 4, length + 1, len(ids))[:, None]
    completed = (places >= length // 4) & (places < ends)
    shares = numpy.arange(group).repeat(prompts) / group
    replaced = completed & (generator.random(ids.shape) < shares[:, None])
    ids[replaced] = generator.choice(blocks.flatten(), replaced.sum())
    labels = numpy.where(completed, ids, IGNORE)[:, 1:]
    return ids, labels, 1 - replaced.sum(1) / completed.sum(1)


def write_batches(args, texts, tokenizer, path):
    loss = LOSSES[args.loss]
    count = -(-args.steps // loss.repeats)
    prompts = args.batch // loss.group
    blocks = text.blocks(texts, tokenizer, count * prompts, args.length + 1, args.seed)
    made = [completions(b, loss.group, args.seed + i) for i, b in enumerate(blocks.reshape(count, prompts, -1))]
    numpy.savez(path, **dict(zip(("ids", "labels", "rewards"), map(numpy.stack, zip(*made)))))


def batches(run, group):
    """A Batch for each line of the file, on the device."""
    made = {name: torch.from_numpy(values) for name, values in numpy.load(run.tokens).items()}
    for ids, labels, rewards in zip(*(made[name] for name in ("ids", "labels", "rewards"))):
        rewards = rewards.float()
        of_prompt = rewards.view(group, -1)
        advantages = (of_prompt - of_prompt.mean(0)) / (of_prompt.std(0) + 1e-4)
        liked = torch.arange(len(rewards)) < len(rewards) // 2
        values = dict(ids=ids[:, :-1], labels=labels, advantages=advantages.flatten(), liked=liked)
        yield Batch(**{name: value.to(run.device) for name, value in values.items()})


def models(run, loss):
    """The model that is trained, and the one beside it or None."""
    from transformers import AutoModelForCausalLM, set_seed

    def fresh(seed):
        set_seed(seed)
        with torch.device(run.device):
            return AutoModelForCausalLM.from_config(comparison.llama_config(run), dtype=getattr(torch, run.dtype))

    model = fresh(run.seed)
    if run.side == "noise":
        comparison.flip_a_last_bit(model)
    if loss.other is None:
        return model, None
    other = fresh(run.seed + (loss.other == "teacher")).requires_grad_(False)
    if loss.other == "teacher":
        with torch.no_grad():
            other.lm_head.weight *= 10  # a fresh model finds all tokens alike; this one has something to teach
    return model, other


def work(run):
    """One run, in a process of its own: its result goes to the file run.result."""
    from tqdm import tqdm

    loss, old_log_probs = LOSSES[run.loss], log_probs
    loss_of = loss.plain
    if run.side == "liger":
        from liger_kernel import chunked_loss
        from liger_kernel.ops.linear_log_prob import linear_log_prob as old_log_probs
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
        loss_of = lambda b: loss.ours(chunked_loss, b)  # noqa: E731
    model, other = models(run, loss)
    optimizer = torch.optim.AdamW(model.parameters(), run.lr)
    with tqdm(total=run.steps, desc=f"{run.loss} {run.side}") as bar:
        steps = comparison.Steps(run, bar, *filter(None, (model, other)))
        try:
            for b in batches(run, loss.group):
                for repeat in range(min(loss.repeats, run.steps - len(steps.losses))):
                    optimizer.zero_grad()
                    steps.begin()
                    b.hidden, b.weight = model.model(b.ids, use_cache=False).last_hidden_state, model.lm_head.weight
                    if other:
                        b.ref_hidden, b.ref_weight = (
                            other.model(b.ids, use_cache=False).last_hidden_state,
                            other.lm_head.weight,
                        )
                    if loss.repeats > 1 and repeat == 0:
                        with torch.no_grad():
                            b.old = old_log_probs(b.hidden, b.weight, b.labels)
                    value = loss_of(b)
                    value.backward()
                    optimizer.step()
                    b.hidden = b.ref_hidden = None
                    steps.end(value.detach(), optimizer)
        except torch.OutOfMemoryError as error:
            sys.exit(f"{error}\n{comparison.OUT_OF_MEMORY}")
    steps.write()


def main():
    args = arguments()
    if args.worker:
        return work(Namespace(**json.loads(args.worker)))
    texts = text.documents(args.text)
    tokenizer = text.bpe(texts, comparison.SIZES[args.config][0][0])
    print(text.description(args.text, texts, tokenizer), flush=True)
    reports = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.loss.split(","):
            one = Namespace(**{**vars(args), "loss": name, "tokens": os.path.join(folder, f"{name}.npz")})
            write_batches(one, texts, tokenizer, one.tokens)
            reports[name] = comparison.run_sides(__file__, one, LOSSES[name].sums(args))
    comparison.finish(args, "align", {f"{name.upper()} loss": report for name, report in reports.items()}, reports)


if __name__ == "__main__":
    main()
