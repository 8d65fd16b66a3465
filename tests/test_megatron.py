"""The classes of liger_kernel.megatron against plain torch, and its patch of a stand-in for megatron-core.

tests/downstream/test_megatron.py has the real one."""

import importlib
import logging
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from liger_kernel.megatron import (
    LigerMegatronCrossEntropy,
    LigerMegatronRMSNorm,
    LigerMegatronSwiGLU,
    apply_liger_kernel_to_megatron,
)

EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(64,), (4, 16)])
def test_rms_norm(shape, zero_centered, dtype, device):
    config = SimpleNamespace(
        normalization="RMSNorm", sequence_parallel=True, layernorm_zero_centered_gamma=zero_centered
    )
    norm = LigerMegatronRMSNorm(config, shape if len(shape) > 1 else shape[0], eps=1e-4).to(device, dtype)
    assert norm.weight.sequence_parallel and norm.hidden_size == torch.Size(shape)
    assert (norm.weight == (0 if zero_centered else 1)).all()
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.add_(torch.randn(shape).to(device, dtype))
    x, dy = torch.randn(2, 3, 5, *shape).to(device, dtype)
    x.requires_grad_()
    y = norm(x)
    found = (y.detach(), *torch.autograd.grad(y, (x, norm.weight), dy))
    x64, w64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    dims = tuple(range(-len(shape), 0))
    y64 = x64 * (x64.square().mean(dims, keepdim=True) + 1e-4).rsqrt() * (w64 + float(zero_centered))
    expected = (y64.detach(), *torch.autograd.grad(y64, (x64, w64), dy.double()))
    assert found[0].dtype == dtype
    for a, b in zip(found, expected):
        assert (a - b).norm() <= EPS[dtype] * b.norm()


def test_rms_norm_of_another_config():
    with pytest.raises(ValueError, match="RMSNorm"):
        LigerMegatronRMSNorm(SimpleNamespace(normalization="LayerNorm"), 8)
    assert LigerMegatronRMSNorm(object(), 8, zero_centered_gamma=True).zero_centered_gamma


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", [(6, 32), (3, 2, 32)])
def test_swiglu(shape, in_place, device):
    torch.manual_seed(0)
    x = torch.randn(shape, device=device, requires_grad=True)
    y = LigerMegatronSwiGLU(in_place=in_place)(x.clone())
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    x64 = x.detach().double().requires_grad_()
    gate, up = x64.chunk(2, -1)
    y64 = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dx.double(), torch.autograd.grad(y64, x64, dy.double())[0], rtol=1e-5, atol=1e-6)
    if in_place:
        with pytest.raises(RuntimeError, match="in_place=True"):
            torch.autograd.grad(y, x, dy)


def test_what_swiglu_does_not_compute(caplog):
    calls = []
    x = torch.randn(4, 8)
    module = LigerMegatronSwiGLU(lambda *arguments: calls.append(arguments) or x)
    with caplog.at_level(logging.INFO, "liger_kernel.megatron.swiglu"):
        for _ in range(2):
            assert module(x, torch.zeros(8)) is x
        module(x, None, True)
    assert len(calls) == 3 and calls[2][1:] == (None, True, False)
    assert caplog.text.count("falling back") == 2
    with pytest.raises(RuntimeError, match="apply_liger_kernel_to_megatron"):
        LigerMegatronSwiGLU()(x, None, False, True)
    with pytest.raises(ValueError, match="2D"):
        module(x[0])
    with pytest.raises(ValueError, match="even"):
        module(x[:, :7])


def test_cross_entropy(device):
    """With Megatron-LM's label smoothing: a · K / (K − 1) of the mean over this rank's classes."""
    torch.manual_seed(0)
    logits, target = torch.randn(3, 2, 11, device=device), torch.randint(11, (3, 2), device=device)
    found = LigerMegatronCrossEntropy(label_smoothing=0.1)(logits, target)
    logp = logits.double().log_softmax(-1)
    a = 0.1 * 11 / 10
    expected = -(1 - a) * logp.gather(-1, target[..., None])[..., 0] - a * logp.mean(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


class Provider:
    def layer_norm(self, rms_norm=False, for_qk=False):
        return "original", rms_norm, for_qk


def modules():
    """A stand-in for megatron-core, by module."""
    torch_norm = type("WrappedTorchNorm", (), {"__new__": lambda cls, **kwargs: ("original", kwargs)})
    return {
        "models.backends": {"LocalSpecProvider": type("LocalSpecProvider", (Provider,), dict(vars(Provider)))},
        "transformer.torch_norm": {"WrappedTorchNorm": torch_norm},
        "transformer.transformer_block": {"LayerNormImpl": torch_norm},
        "fusions.fused_cross_entropy": {"fused_vocab_parallel_cross_entropy": lambda *a: "original"},
        "tensor_parallel.cross_entropy": {"vocab_parallel_cross_entropy": lambda *a: "original"},
        "fusions.fused_bias_swiglu": {
            "SwiGLUFunction": type("SwiGLUFunction", (), {"apply": staticmethod(lambda *a: ("original", *a))})
        },
    }


@pytest.fixture
def core(monkeypatch):
    for name in ("megatron", "megatron.core"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    for name, members in modules().items():
        folder = f"megatron.core.{name.split('.')[0]}"
        if folder not in sys.modules:
            package = types.ModuleType(folder)
            package.__path__ = []
            monkeypatch.setitem(sys.modules, folder, package)
        module = types.ModuleType(f"megatron.core.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(sys.modules[folder], name.split(".")[1], module)
    return lambda path: getattr(
        importlib.import_module("megatron.core." + path.rpartition(".")[0]), path.split(".")[-1]
    )


SYMBOLS = {
    "rms_norm": ["transformer.transformer_block.LayerNormImpl"],
    "cross_entropy": [
        "fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy",
        "tensor_parallel.cross_entropy.vocab_parallel_cross_entropy",
    ],
    "swiglu": ["fusions.fused_bias_swiglu.SwiGLUFunction"],
}


@pytest.mark.parametrize("flag", SYMBOLS)
def test_patches_what_is_asked(flag, core):
    before = {path: core(path) for paths in SYMBOLS.values() for path in paths}
    reports = []
    for _ in range(2):  # the second changes nothing
        reports.append(apply_liger_kernel_to_megatron(**{name: name == flag for name in SYMBOLS}))
        for name, paths in SYMBOLS.items():
            for path in paths:
                found = core(path)
                if name == flag:
                    assert found.__liger_patched__ and found.__wrapped__ is before[path]
                else:
                    assert found is before[path]
    assert reports[0].replaced == reports[1].replaced and {entry.switch for entry in reports[0].replaced} == {flag}
    reports[0].undo()
    assert {path: core(path) for path in before} == before


def test_what_the_replacements_compute(core):
    provider = core("models.backends.LocalSpecProvider")
    apply_liger_kernel_to_megatron(True, True, True)
    assert provider().layer_norm(rms_norm=True) is LigerMegatronRMSNorm
    assert provider().layer_norm(for_qk=True) == ("original", False, True)
    norm = core("transformer.transformer_block.LayerNormImpl")
    assert isinstance(norm(SimpleNamespace(normalization="RMSNorm"), 8), LigerMegatronRMSNorm)
    assert norm(SimpleNamespace(normalization="LayerNorm"), 8)[0] == "original"
    logits, target = torch.randn(3, 2, 11), torch.randint(11, (3, 2))
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(3, 2)
    torch.testing.assert_close(core(SYMBOLS["cross_entropy"][0])(logits, target), plain)
    unfused = core(SYMBOLS["cross_entropy"][1])
    torch.testing.assert_close(unfused(logits, target), plain)
    torch.testing.assert_close(
        unfused(logits, target, 0.2), LigerMegatronCrossEntropy(label_smoothing=0.2)(logits, target)
    )
    swiglu, x = core(SYMBOLS["swiglu"][0]), torch.randn(4, 8)
    torch.testing.assert_close(swiglu.apply(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
    assert swiglu.apply(x, True)[0] == "original"


def test_another_norm_of_the_block_stays(core, monkeypatch):
    chosen = type("TENorm", (), {})
    monkeypatch.setattr(sys.modules["megatron.core.transformer.transformer_block"], "LayerNormImpl", chosen)
    report = apply_liger_kernel_to_megatron()
    assert core("transformer.transformer_block.LayerNormImpl") is chosen
    assert [entry.reason for entry in report.skipped] == ["it is TENorm"]


@pytest.mark.parametrize("flag", ["cross_entropy", "swiglu"])
def test_without_what_is_patched(flag, core, monkeypatch):
    asked = {"rms_norm": False, flag: True}
    module, _, name = SYMBOLS[flag][0].rpartition(".")
    monkeypatch.delattr(sys.modules[f"megatron.core.{module}"], name)
    with pytest.raises(ImportError, match="symbol path may have changed"):
        apply_liger_kernel_to_megatron(**asked)
    monkeypatch.setitem(sys.modules, f"megatron.core.{module}", None)
    with pytest.raises(ImportError, match=f"megatron.core.{module}.{name}.*requires megatron-core"):
        apply_liger_kernel_to_megatron(**asked)
