"""Trainings by other people's tools: each in a child process, watched from outside, and compared with another."""

import collections
import contextlib
import functools
import multiprocessing
import sys
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

#: Of float32 losses and logits, relative to the largest: sums of up to some thousand terms in another order, over a few
#: steps that carry the difference on.
TOLERANCE = 2e-5
#: Of what training has changed, relative to the change: the gradients' differences, which SGD adds up.
CHANGE = 1e-3
#: What runs in a patched Llama, besides its loss; a bar stands between two of which one runs. Without dropout an MLP
#: with adapters is one operator.
LAYERS = {"full": ("rms_norm", "gated", "rope"), "LoRA": ("rms_norm", "linear|qkv", "gated_mlp", "rope")}
PROBE = torch.arange(4, 60).reshape(4, 14)


class Seen(TorchDispatchMode):
    """How often each of this library's operators ran."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "liger" and args:  # without any: the table of activations, read at import
            self.counts[function._opname] += 1
        return function(*args, **kwargs or {})


@dataclass
class Run:
    """What was seen of one training."""

    losses: list[float] = field(default_factory=list)  # of every micro batch
    logits: torch.Tensor | None = None  # of the trained model on PROBE
    operators: dict[str, int] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)  # the reports of patches, as text
    imported: bool = False  # whether somebody imported liger_kernel
    error: str | None = None  # the traceback of what the tool raised
    said: str = ""


def logits_of(model):
    """On PROBE, without dropout. The mode stays: of evaluation, some quantised layers have another, coarser kernel."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    with torch.no_grad(), _disable_current_modes():  # none of Seen's business
        return model(input_ids=PROBE).logits.float()


@contextlib.contextmanager
def _watched_trainer(run):
    from transformers import Trainer

    step, train = Trainer.training_step, Trainer.train

    @functools.wraps(step)
    def watched_step(self, *args, **kwargs):
        loss = step(self, *args, **kwargs)
        run.losses.append(loss.item())
        return loss

    @functools.wraps(train)
    def watched_train(self, *args, **kwargs):
        outcome = train(self, *args, **kwargs)
        run.logits = logits_of(self.model)
        return outcome

    Trainer.training_step, Trainer.train = watched_step, watched_train
    yield
    Trainer.training_step, Trainer.train = step, train


@contextlib.contextmanager
def _watched_patches(run):
    from liger_kernel.transformers import monkey_patch

    patch = monkey_patch.patch

    def watched(*args, **kwargs):
        report = patch(*args, **kwargs)
        run.replaced.append(str(report))
        return report

    monkey_patch.patch = watched
    yield
    monkey_patch.patch = patch


def _child(results, log, train, liger):
    with open(log, "w") as file:
        for stream in (1, 2):
            multiprocessing.util.os.dup2(file.fileno(), stream)
    run, seen = Run(), Seen()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_watched_trainer(run))
            if liger:
                stack.enter_context(_watched_patches(run))
            with seen:
                train(run)
    except BaseException:
        run.error = traceback.format_exc()
    run.operators, run.imported = dict(seen.counts), "liger_kernel" in sys.modules
    sys.stdout.flush()
    sys.stderr.flush()
    torch.save(run, results)
    multiprocessing.util.os._exit(0)  # a tool's threads and exit handlers are of no interest here


def watched(train, liger):
    """What train(run) does in a child process, which has what is imported here; `liger` says whether it is to patch."""
    with tempfile.NamedTemporaryFile() as results, tempfile.NamedTemporaryFile("r", errors="replace") as log:
        arguments = results.name, log.name, train, liger
        process = multiprocessing.get_context("fork").Process(target=_child, args=arguments)
        process.start()
        process.join()
        said = log.read()
        assert process.exitcode == 0, said[-4000:]
        run = torch.load(results.name, weights_only=False)
        run.said = said
        return run


def assert_ran(run, operators):
    """A run was patched, and `operators` ran."""
    assert run.error is None, run.error + run.said[-2000:]
    assert run.replaced, "nothing was patched"
    ran = lambda name: any(one in operator for one in name.split("|") for operator in run.operators)
    missing = [name for name in operators if not ran(name)]
    assert not missing, f"{missing} did not run, only {run.operators}"


def assert_same(off, on, initial, operators):
    """Both runs trained the same; `operators` ran in the second, none in the first. What to say of it, in words."""
    assert off.error is None, off.error
    assert not off.operators, "operators ran although the switch was off"
    assert_ran(on, operators)
    expected, found = torch.tensor(off.losses), torch.tensor(on.losses)
    assert len(expected) == len(found) > 1 and len(set(off.losses)) > 1 and expected.isfinite().all()
    size = expected.abs().max()
    assert size > 1e-3, "the losses are zero"
    apart = (expected - found).abs().max() / size
    assert apart <= TOLERANCE, f"{off.losses} without, {on.losses} with"
    change = (off.logits - initial).abs().max()
    assert change > 1e-3 * initial.abs().max(), "nothing was learnt"
    assert (off.logits - on.logits).abs().max() <= CHANGE * change
    calls = f"{sum(on.operators.values())} calls of {len(on.operators)} operators"
    return f"{len(expected)} equal losses ({apart:.0e} apart), {calls}"


def _block():
    sys.modules["liger_kernel"] = None  # an import raises


def _logits_of_saved(folder, base, loader):
    import transformers

    torch.set_num_threads(1)
    if base is None:
        return logits_of(getattr(transformers, loader).from_pretrained(folder, dtype=torch.float32))
    import peft

    model = getattr(transformers, loader).from_pretrained(base, dtype=torch.float32)
    return logits_of(peft.PeftModel.from_pretrained(model, folder))


class Reader:
    """A process where liger_kernel cannot be imported, which loads what a tool has saved."""

    def __init__(self):
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_block)

    def logits(self, folder, base=None, loader="AutoModelForCausalLM"):
        """Of the model in a folder, or of the adapter there on the model `base`, on PROBE."""
        return self.pool.submit(_logits_of_saved, str(folder), base and str(base), loader).result()

    def assert_holds(self, folder, run, base=None, loader="AutoModelForCausalLM"):
        """What is saved in the folder is the model that was trained."""
        found = self.logits(folder, base, loader)
        assert (found - run.logits).abs().max() <= TOLERANCE * run.logits.abs().max()
