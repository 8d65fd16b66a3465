"""The cases of liger's own tests for rms_norm on the device of libliger_host.so: python test.py build/libliger_host.so

Run it in liger's sources, whose tests/ has the cases.
"""

import pathlib
import sys
import types

import liger_kernel.ops  # noqa: F401
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))
import test_ops  # noqa: E402

torch.ops.load_library(sys.argv[1])
# What torch asks a device's module.
module = types.ModuleType("torch.host")
module._lazy_init, module._is_in_bad_fork, module.manual_seed_all = lambda: None, lambda: False, lambda seed: None
torch._register_device_module("host", module)
for name in ("rms_norm", "rms_norm_float_weight", "fused_add_rms_norm"):
    case = test_ops.CASES[name]
    for dtype in case.dtypes:
        test_ops.test_exact(case, dtype, "host")
test_ops.test_errors(test_ops.CASES["rms_norm"], "host")
x = torch.ones(2, 8, device="host")
for call, words in (
    (lambda: torch.ops.liger.layer_norm(x, x[0], x[0], 1e-5), "only rms_norm"),
    (lambda: torch.ops.liger.softmax(x, 0), "not built for host"),
):
    try:
        call()
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error with {words!r}")

# A patched model runs what the backend has, and its own code for the rest: one that was not patched has the same step.
import copy  # noqa: E402

import transformers  # noqa: E402
from liger_kernel.ops import LigerRMSNormFunction  # noqa: E402
from liger_kernel.transformers import apply_liger_kernel_to_llama  # noqa: E402

config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
)
config._attn_implementation = "eager"
reference = transformers.LlamaForCausalLM(config)
model, reference = copy.deepcopy(reference).to("host"), reference.to("host")
rms_norm, calls = LigerRMSNormFunction.apply, []
apply_liger_kernel_to_llama(model)
LigerRMSNormFunction.apply = lambda x, *args: calls.append(x.device.type) or rms_norm(x, *args)
ids = torch.arange(10).view(1, 10).to("host")
for each in (reference, model):
    each(input_ids=ids, labels=ids).loss.backward()
for (name, expected), parameter in zip(reference.named_parameters(), model.parameters()):
    torch.testing.assert_close(parameter.grad.cpu(), expected.grad.cpu(), msg=name)
assert calls == ["host"] * 2, calls  # the norm after attention is one operator with its sum
print("rms_norm passes its cases, and a patched model trains, on a backend that is plugged in")
