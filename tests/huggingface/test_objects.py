"""A patched model as an object: what copies, saves, exports, packages or compiles models does so as with a plain one.

test_wrappers.py and test_parity.py copy, save and compile the dense families; experts are here, and torch's packages.
"""

import copy
import io
import pickle

import pytest
import torch
from conftest import assert_close
from tiny import TINY_MODELS, model_of, text
from torch import nn

CLASSES = {"llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
EXPERTS = "qwen3_moe"


class Result(nn.Module):
    """A tensor of a model's output: its loss in training, where a patched one makes no logits, else its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        if self.training:
            return self.model(input_ids=input_ids, labels=labels, use_cache=False).loss
        return self.model(input_ids=input_ids, use_cache=False).logits


@pytest.fixture
def pair_of(patched):
    """family -> (a patched model, its unpatched copy)."""

    def make(family, **fields):
        config = TINY_MODELS[family][CLASSES[family]][0]()
        for name, value in fields.items():
            setattr(config, name, value)
        reference = model_of(family, CLASSES[family], config)
        model = copy.deepcopy(reference)
        report = patched(family, model, strict=True)
        assert {"rms_norm", "rope", "fused_linear_cross_entropy"} <= {entry.switch for entry in report.replaced}
        return model, reference

    return make


def probe(family, pair_of, make=lambda model: model):
    """A patched model after `make` gives the loss and logits of the plain one."""
    model, reference = pair_of(family)
    other = make(model)
    assert type(other) is type(model)
    for training in (True, False):
        found, expected = (Result(m).train(training)(**text()) for m in (other, reference))
        assert_close(found, expected)


@pytest.mark.parametrize("copier", ("deepcopy", "pickle", "save"))
def test_copies_of_experts(pair_of, copier):
    def saved(model):
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        return torch.load(file, weights_only=False)

    copiers = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "save": saved}
    probe(EXPERTS, pair_of, copiers[copier])


def test_saved_experts(pair_of, tmp_path):
    model, reference = pair_of(EXPERTS)
    model.save_pretrained(tmp_path)
    loaded = type(reference).from_pretrained(tmp_path)
    assert type(loaded) is type(reference) and loaded.state_dict().keys() == reference.state_dict().keys()
    assert all(torch.equal(tensor, reference.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_generation_of_experts(pair_of):
    model, reference = pair_of(EXPERTS)
    options = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)
    ids = text()["input_ids"]
    assert torch.equal(model.eval().generate(ids, **options), reference.eval().generate(ids, **options))


@pytest.mark.parametrize("family_name", CLASSES)
def test_data_parallel(family_name, pair_of):
    """Without a GPU it runs the module itself; what it would copy to GPUs has forwards of its own."""
    model, reference = pair_of(family_name)
    parallel = nn.DataParallel(Result(model))
    assert_close(parallel(**text()), Result(reference)(**text()))
    for module in model.modules():
        replica = module._replicate_for_data_parallel()
        assert replica.forward.__self__ is replica


@pytest.mark.parametrize("family_name", CLASSES)
@pytest.mark.parametrize("training", (True, False))
def test_export(family_name, training, pair_of):
    model, reference = pair_of(family_name)
    expected = Result(reference).train(training)(**text(1))
    exported = torch.export.export(Result(model).train(training), (), text())
    names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert {"liger.rms_norm.default", "liger.rope.default", "liger.gated.default"} <= names
    assert ("liger.fused_experts.default" in names) == (family_name == EXPERTS)
    assert ("liger.fused_linear_cross_entropy.default" in names) == training
    assert_close(exported.module()(**text(1)), expected)


@pytest.mark.parametrize("family_name", CLASSES)
@pytest.mark.full(when=lambda p: p["family_name"] != EXPERTS)
def test_packages_of_aot_inductor(family_name, pair_of, tmp_path):
    # What is compiled for a second layer is the same again; of the experts' model only the second has experts.
    model, reference = pair_of(family_name, **({} if family_name == EXPERTS else {"num_hidden_layers": 1}))
    with torch.no_grad():
        expected = Result(reference).eval()(**text(1))
        exported = torch.export.export(Result(model).eval(), (), text())
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        assert_close(torch._inductor.aoti_load_package(package)(**text(1)), expected)


@pytest.mark.parametrize("family_name", CLASSES)
def test_graph_breaks(family_name, pair_of):
    """None, and so no more than the plain model's, once transformers has set its hooks in a first call."""
    model = Result(pair_of(family_name)[0])
    model(**text())
    torch._dynamo.reset()
    assert torch._dynamo.explain(model)(**text()).graph_break_count == 0
