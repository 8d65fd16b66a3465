"""Patched models inside what wraps, copies, compiles, hooks or trains models."""

import copy
import io
import pickle

import accelerate
import peft
import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conftest import VOCABULARY, assert_close, assert_same_step, batch, class_of, make, run
from liger_kernel.transformers.head import LinearWithLoss
from liger_kernel.utils import warn_once
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import Trainer, TrainingArguments

LEVELS = pytest.mark.parametrize("level", ["class", "instance"])


@pytest.fixture
def levels(family, patched, level):
    """A patched model, by patching its class before or the instance after its creation, and its unpatched copy."""
    reference = make(family)
    if level == "instance":
        model = copy.deepcopy(reference)
        patched(family, model, rope=False)
    else:
        patched(family, rope=False)
        model = class_of(family)(copy.deepcopy(reference.config)).train()
        model.load_state_dict(reference.state_dict())
        # The class is patched now; the reference keeps its forward by being none of it.
        reference.forward = type(model).forward.liger_original.__get__(reference)
    return model, reference


@pytest.fixture(scope="module")
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@LEVELS
@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "save"])
def test_copies(levels, copier):
    model, reference = levels
    if copier == "deepcopy":
        other = copy.deepcopy(model)
    elif copier == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert type(other) is type(model) and type(other.lm_head) is type(model.lm_head)
    for parameter in model.parameters():
        parameter.data.zero_()
    output = assert_same_step(other, reference, **batch())
    assert output.logits is None
    assert all(parameter.grad is None for parameter in model.parameters())


@LEVELS
def test_replicas_of_data_parallel(levels):
    model, _ = levels
    for module in (model, model.model.norm, model.model.layers[0].mlp, model.lm_head):
        replica = module._replicate_for_data_parallel()
        assert replica.forward.__self__ is replica


@LEVELS
@pytest.mark.parametrize("kwargs", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_gradient_checkpointing(levels, kwargs):
    model, reference = levels
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    model.enable_input_require_grads()
    assert assert_same_step(model, reference, **batch()).logits is None


@pytest.mark.full(when=lambda p: p["family"] not in ("llama", "gemma2"))
def test_compile(family, patched):
    reference = make(family, num_hidden_layers=1)
    model, expected_gradients = copy.deepcopy(reference), run(reference, **batch())[1]
    patched(family, model)
    torch._dynamo.reset()
    output = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch())
    assert output.logits is None
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected_gradients[name])


def test_compile_of_a_model_from_patched_classes(patched):
    patched("llama")
    torch._dynamo.reset()
    output = torch.compile(make("llama", num_hidden_layers=1), backend="eager", fullgraph=True)(**batch())
    assert output.logits is None


def test_compile_with_a_new_head(patched):
    model = make("llama", num_hidden_layers=1)
    patched("llama", model)
    model.resize_token_embeddings(140)
    assert type(model.lm_head) is nn.Linear
    expected = model(**batch(), skip_logits=False).loss
    torch._dynamo.reset()
    output = torch.compile(model, backend="eager")(**batch())
    assert output.logits is None and isinstance(model.lm_head, LinearWithLoss)
    assert_close(output.loss, expected)


def _lora(model, **kwargs):
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.0, **kwargs))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped


@pytest.mark.parametrize("first", ["patch", "peft"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"target_modules": ["q_proj", "v_proj", "gate_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    ],
    ids=["attention", "saved_head", "saved_norm"],
)
def test_lora(family, patched, first, kwargs):
    reference = make(family, tie_word_embeddings=False)
    model = copy.deepcopy(reference)
    reference = _lora(reference, **kwargs)
    if first == "patch":
        patched(family, model, rope=False, strict=True)
        model = _lora(model, **kwargs)
    else:
        model = _lora(model, **kwargs)
        patched(family, model.get_base_model(), rope=False, strict=True)
    assert assert_same_step(model, reference, **batch()).logits is None
    with model.disable_adapter(), reference.disable_adapter(), torch.no_grad():
        output = model(**batch())
        assert output.logits is None
        assert_close(output.loss, reference(**batch()).loss)


@pytest.mark.parametrize("first", ["patch", "peft"])
def test_lora_on_the_head_takes_the_original_forward(family, patched, first, caplog):
    warn_once.cache_clear()
    kwargs = {"target_modules": ["q_proj", "lm_head"]}
    reference = make(family, tie_word_embeddings=False)
    model = copy.deepcopy(reference)
    reference = _lora(reference, **kwargs)
    if first == "patch":
        patched(family, model, rope=False)
        model = _lora(model, **kwargs)
    else:
        model = _lora(model, **kwargs)
        report = patched(family, model.get_base_model(), rope=False)
        assert "peft.tuners.lora" in report.skipped[0].reason
    output = assert_same_step(model, reference, **batch())
    assert output.logits is not None
    assert ("materialised logits" in caplog.text) == (first == "patch")
    if first == "patch":
        assert model(**batch(), skip_logits=True).logits is None


@LEVELS
def test_hooks_of_the_head_and_the_model_run(levels):
    model, reference = levels
    seen = []
    model.lm_head.register_forward_pre_hook(lambda *_: seen.append("head"))
    model.register_forward_hook(lambda *_: seen.append("model"))
    assert assert_same_step(model, reference, **batch()).logits is None
    assert seen == ["head", "model"]


def test_hooks_of_accelerate_stay(family, patched):
    reference = make(family)
    model = copy.deepcopy(reference)
    calls = []

    class Recording(AlignDevicesHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(module)
            return super().pre_forward(module, *args, **kwargs)

    for module in (model, model.lm_head, model.model.norm):
        add_hook_to_module(module, Recording(execution_device="cpu"))
    report = patched(family, model, rope=False, strict=True)
    assert assert_same_step(model, reference, **batch()).logits is None
    assert calls == [model, model.model.norm, model.lm_head]
    report.undo()
    assert assert_same_step(model, reference, **batch()).logits is not None


@pytest.mark.parametrize("first", ["patch", "offload"])
def test_a_head_that_is_offloaded(family, patched, first):
    reference = make(family, tie_word_embeddings=False).eval()
    model = copy.deepcopy(reference)
    if first == "patch":
        patched(family, model, rope=False)
    accelerate.cpu_offload(model.lm_head, execution_device="cpu")
    if first == "offload":
        patched(family, model, rope=False)
    assert model.lm_head.weight.device.type == "meta"
    with torch.no_grad():
        output = model(**batch(), skip_logits=True)
        assert output.logits is None
        assert_close(output.loss, reference(**batch()).loss)


def test_a_checkpointed_head(pair):
    model, reference = pair
    model.lm_head = checkpoint_wrapper(model.lm_head)
    expected, expected_gradients = run(reference, **batch())
    output, gradients = run(model, **batch())
    assert output.logits is None
    assert_close(output.loss, expected.loss)
    assert_close(gradients["model.norm.weight"], expected_gradients["model.norm.weight"])


def test_a_head_of_another_kind_takes_the_original_forward(family, patched):
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    reference = make(family, tie_word_embeddings=False)
    reference.lm_head.__class__ = Scaled
    model = copy.deepcopy(reference)
    report = patched(family, model, rope=False)
    assert "Scaled" in str(report)
    assert assert_same_step(model, reference, **batch()).logits is not None
    patched(family, rope=False)
    assert_same_step(model, reference, **batch())


def test_a_forward_on_the_instance_stays(family, patched):
    model = make(family)
    for module in (model.lm_head, model.model.norm):
        module.forward = (lambda forward: lambda x: 2 * forward(x))(module.forward)
    expected = model(**batch()).loss
    report = patched(family, model, rope=False)
    assert {entry.switch for entry in report.skipped} == {"rms_norm", "fused_linear_cross_entropy"}
    assert_close(model(**batch()).loss, expected)


@pytest.mark.parametrize("first", ["patch", "shard"])
@pytest.mark.parametrize("own_group", [True, False])
def test_fsdp2(family, patched, one_process, first, own_group):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (1,))
    reference = make(family, tie_word_embeddings=False)
    model = copy.deepcopy(reference)

    def shard():
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if own_group:
            fully_shard([model.model.norm, model.lm_head], mesh=mesh)
            fully_shard(model.model.embed_tokens, mesh=mesh)
        fully_shard(model, mesh=mesh)

    if first == "shard":
        shard()
    patched(family, model, rope=False, strict=True)
    if first == "patch":
        shard()
    expected, expected_gradients = run(reference, **batch())
    output = model(**batch())
    assert output.logits is None
    output.loss.backward()
    assert_close(output.loss, expected.loss)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad.full_tensor(), expected_gradients[name])


@pytest.mark.parametrize("first", ["patch", "shard"])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1(family, patched, one_process, first, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    reference = make(family, tie_word_embeddings=False)
    model = copy.deepcopy(reference)
    if first == "patch":
        patched(family, model, rope=False, strict=True)
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: (
            recurse or isinstance(module, nn.Linear) and module.out_features == VOCABULARY
        ),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    if first == "shard":
        patched(family, sharded, rope=False, strict=True)
    assert isinstance(model.lm_head, FullyShardedDataParallel)
    expected, expected_gradients = run(reference, **batch())
    output = sharded(**batch())
    assert output.logits is None
    output.loss.backward()
    assert_close(output.loss, expected.loss)
    if use_orig_params:
        with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
            for name, parameter in sharded.named_parameters():
                assert_close(parameter.grad, expected_gradients[name.replace("_fsdp_wrapped_module.", "")])


def test_fsdp_redirection(one_process):
    from liger_kernel.transformers.fsdp import _FSDPForwardRedirection
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu"))
    inner, x = wrapped.module, torch.ones(1, 3)
    result = _FSDPForwardRedirection()(wrapped, lambda x: (inner.weight.shape, inner(x)), x)
    assert result[0] == (2, 3) and torch.equal(result[1], wrapped(x))
    with pytest.raises(AssertionError, match="Linear"):
        _FSDPForwardRedirection()(inner, print)


@LEVELS
def test_tensor_parallel_head(family, patched, one_process, level):
    """Over one process; test_distributed.py has two."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    reference = make(family, tie_word_embeddings=False)
    model = copy.deepcopy(reference)
    plan = ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model.lm_head, dist.init_device_mesh("cpu", (1,)), plan)
    expected = reference(**batch()).loss
    patched(family, *([model] if level == "instance" else []), rope=False, strict=True)
    if level == "class":
        model.__class__ = class_of(family)
    output = model(**batch())
    assert output.logits is None
    assert_close(output.loss, expected)
    assert_close(model(**batch(), label_smoothing=0.1, skip_logits=False).loss, expected)


class _Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        row = batch(index, rows=1)
        labels = row["labels"][0].clone()
        # A different number of labels in every row, so that a mean of means is not the mean.
        labels[: index % 5] = -100
        return {"input_ids": row["input_ids"][0], "labels": labels, "unused": torch.zeros(1)}


def _train(model, path, **kwargs):
    arguments = TrainingArguments(
        output_dir=str(path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        **kwargs,
    )
    trainer = Trainer(model, arguments, train_dataset=_Rows(), eval_dataset=_Rows())
    trainer.train()
    losses = torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return losses, torch.tensor(trainer.evaluate()["eval_loss"])


def test_trainer_with_label_smoothing(available, tmp_path):
    reference = make("llama")
    model = copy.deepcopy(reference)
    arguments = {"label_smoothing_factor": 0.2, "prediction_loss_only": True}
    expected = _train(reference, tmp_path, **arguments)
    for ours, plain in zip(
        _train(model, tmp_path, use_liger_kernel=True, liger_kernel_config={"rope": False}, **arguments), expected
    ):
        assert_close(ours, plain, 1e-4)
    assert type(model).forward.liger_original


def test_trainer_of_a_type_without_a_row(available, tmp_path, caplog):
    """It is patched by source and trains alike; with by_source=False it is left alone, with a warning."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    reference = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=VOCABULARY, **dropouts))
    expected = _train(copy.deepcopy(reference), tmp_path)
    for by_source, text in (
        (True, "type 'gpt2': a GPT2LMHeadModel is patched by source. Replaced: 3 layer_norm, 1 masks, 1 fused"),
        (False, "no Liger kernels for a GPT2LMHeadModel of type 'gpt2'"),
    ):
        warn_once.cache_clear()
        caplog.clear()
        model = copy.deepcopy(reference)
        config = {} if by_source else {"by_source": False}
        for ours, plain in zip(
            _train(model, tmp_path, use_liger_kernel=True, liger_kernel_config=config), expected, strict=True
        ):
            assert_close(ours, plain, 1e-4)
        assert text in caplog.text
        assert (type(model) is GPT2LMHeadModel) != by_source


def test_trainer_with_graphs_of_a_model_on_a_cpu(available, tmp_path, caplog):
    """The model runs without them, and says so; columns that its forward does not take are still left out."""
    reference = make("llama")
    model = copy.deepcopy(reference)
    expected = _train(reference, tmp_path)
    config = {"rope": False, "cuda_graphs": True}
    for ours, plain in zip(_train(model, tmp_path, use_liger_kernel=True, liger_kernel_config=config), expected):
        assert_close(ours, plain, 1e-4)
    assert "runs without CUDA graphs: the inputs are not on a GPU" in caplog.text


@pytest.mark.full(when=lambda p: p["family"] not in ("llama", "gemma2"))
def test_trainer(family, available, tmp_path):
    reference = make(family)
    model = copy.deepcopy(reference)
    expected = _train(reference, tmp_path)
    model_losses = _train(model, tmp_path, use_liger_kernel=True, liger_kernel_config={"rope": False})
    assert type(model).forward.liger_original
    # The log rounds to four decimals or so.
    assert_close(model_losses[0], expected[0], 1e-4)
    assert_close(model_losses[1], expected[1], 1e-4)
    for parameter, other in zip(model.parameters(), reference.parameters()):
        assert_close(parameter, other, 1e-2)
