"""torch.compile of patched models on a GPU, without a GPU: it traces them with fake tensors whose device is "cuda". A
model that makes one graph (fullgraph=True) unpatched makes one patched.

Code that runs only for a GPU's tensors is traced by no other test on a CPU. tests/run.sh runs this file with the
library of emulated kernels, which registers the device guard for CUDA that indexing needs.
"""

import every_type
import liger_kernel
import pytest
import tiny
import torch
from liger_kernel.operators import coverage
from liger_kernel.transformers.patching import mixer_functions
from torch._subclasses.fake_tensor import FakeTensorMode

#: Among them they have most of what a patch replaces; the compiler makes one graph of each.
USUAL = ("llama", "gemma2", "nemotron", "mixtral", "qwen3_next", "qwen2_audio", "falcon_h1", "deepseek_v3")
FAMILIES = [
    (family, name) for family in tiny.TINY_MODELS if tiny.can_be_made(family) for name in tiny.TINY_MODELS[family]
]
TYPES = ("modernbert", "bert", "recurrent_gemma", "mimo_v2_flash")  # that have no row


def constant(value):
    """A function of anything, which the compiler takes as a constant, as those are that it stands for."""
    function = lambda *_: value
    vars(function)["_dynamo_marked_constant"] = True
    return function


def breaking(_):
    """What torch 2.11's compiler does not follow."""
    torch._dynamo.graph_break()
    return True


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """What transformers and this package ask of a GPU."""
    monkeypatch.setattr(torch.amp, "is_autocast_available", breaking)
    monkeypatch.setattr(torch.cuda, "get_device_capability", constant((9, 0)))  # an H100's
    monkeypatch.setattr(coverage, "_has_kernels", constant(True))
    monkeypatch.setattr(mixer_functions, "_shared_bytes", constant(227 << 10))
    yield
    torch._dynamo.reset()


def on_gpu(tensor, dtype=torch.bfloat16):
    return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="cuda")


class Traced(Exception):
    """Ends a run where the compiler has a graph."""


def trace(model, batch, patched):
    """(the operators of this package, and torch's flash attention, in the one graph that the compiler makes of a model,
    or None where it makes more; what ended the run)."""
    model(**batch)  # transformers installs hooks under a lock, which the compiler does not follow
    graphs = []

    def backend(graph, _):
        every = (m for m in graph.modules() if isinstance(m, torch.fx.GraphModule))
        names = [str(node.target) for module in every for node in module.graph.nodes]
        graphs.append([name for name in names if name.startswith(("liger.", "aten._flash"))])
        raise Traced

    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                module._parameters[name] = torch.nn.Parameter(on_gpu(parameter), parameter.requires_grad)
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = on_gpu(buffer, buffer.dtype)
        model.tie_weights()
        if patched:
            liger_kernel.patch(model)
        batch = {name: on_gpu(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        torch._dynamo.reset()
        with pytest.raises(Exception) as ended:
            torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(**batch)
    return graphs[0] if graphs else None, ended.value


@pytest.mark.parametrize("family,name", FAMILIES)
@pytest.mark.full(when=lambda p: p["family"] not in USUAL)
def test_families(family, name):
    batch = tiny.TINY_MODELS[family][name][1]()
    operators, error = trace(tiny.model_of(family, name), batch, True)
    if operators is None and (family in USUAL or trace(tiny.model_of(family, name), batch, False)[0] is not None):
        raise error
    assert operators or operators is None


@pytest.mark.parametrize("kind", TYPES)
def test_types(kind):
    operators, error = trace(every_type.model_of(kind), every_type.inputs(), True)
    if operators is None:
        raise error
    assert operators


@pytest.mark.parametrize("patched", [True, False])
def test_windows_of_encoders(patched):
    """Layers with a window, which tokens of a longer row see, run flash attention; unpatched they get a mask."""
    batch = {name: value.repeat(1, 8) for name, value in every_type.inputs().items()}
    model = every_type.model_of("modernbert")
    windows = model.config.layer_types.count("sliding_attention")
    assert windows and model.config.sliding_window < batch["input_ids"].shape[1]
    operators, _ = trace(model, batch, patched)
    assert operators.count("aten._flash_attention_forward") == windows * patched
