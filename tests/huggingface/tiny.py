"""A tiny random model of every class that a row of the table of families names, and inputs for it."""

import functools
import importlib
import importlib.util

import torch
import transformers
from liger_kernel.transformers.patching.by_source import completed
from liger_kernel.transformers.patching.families import FAMILIES
from packaging.version import parse
from random_models import END, IMAGE, MODELS, START
from shrink import shrunk

OMNI = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _ids(rows=2, length=10, seed=0):
    return torch.randint(3, 110, (rows, length), generator=_generator(seed))


def text(seed=0, rows=2, length=10):
    """Token ids and labels, of which some are ignored."""
    ids = _ids(rows, length, seed)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def _with_image(tokens, image=IMAGE, start=True, types=False, **pixels):
    """Two rows that hold an image of so many tokens."""

    def inputs(seed=0):
        ids = _ids(2, tokens + 8, seed)
        ids[:, 3 : 3 + tokens] = image
        if start:
            ids[:, 2], ids[:, 3 + tokens] = START, END
        labels = ids.clone()
        labels[ids == image] = -100
        labels[1, :4] = -100
        made = {name: value(seed) if callable(value) else value for name, value in pixels.items()}
        marks = {types: (ids == image).long()} if types else {}
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), **marks, **made}

    return inputs


def _noise(*shape):
    return lambda seed: torch.randn(*shape, generator=_generator(seed))


# Two images of 4 x 4 patches of 3 x 2 x 4 x 4 numbers, four patches a token.
_GRID = {"pixel_values": _noise(32, 96), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
_QWEN_IMAGE = _with_image(4, types="mm_token_type_ids", **_GRID)


def _mllama(seed=0):
    return {
        **text(seed),
        "pixel_values": _noise(2, 1, 1, 3, 8, 8)(seed),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(2, 10, 1, 1, dtype=torch.long),
    }


def _gemma4(seed=0):
    # 4 x 4 patches of an image, pooled by 2 x 2 into four tokens.
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
    made = _with_image(4, types="mm_token_type_ids", pixel_values=_noise(2, 16, 48))(seed)
    return {**made, "pixel_values": made["pixel_values"].sigmoid(), "image_position_ids": places.repeat(2, 1, 1)}


def _pixtral(seed=0):
    return {"pixel_values": _noise(2, 3, 8, 8)(seed), "image_sizes": torch.tensor([[8, 8], [8, 8]])}


# class -> its inputs, where they are more than text
INPUTS = {
    "Gemma3ForConditionalGeneration": _with_image(4, types="token_type_ids", pixel_values=_noise(2, 3, 8, 8)),
    "Gemma4ForConditionalGeneration": _gemma4,
    "PaliGemmaForConditionalGeneration": _with_image(
        4, start=False, types="token_type_ids", pixel_values=_noise(2, 3, 8, 8)
    ),
    "Llama4ForConditionalGeneration": _with_image(4, pixel_values=_noise(2, 3, 16, 16)),
    "MllamaForConditionalGeneration": _mllama,
    "LlavaForConditionalGeneration": _with_image(4, start=False, pixel_values=_noise(2, 3, 8, 8)),
    "InternVLForConditionalGeneration": _with_image(4, start=False, pixel_values=_noise(2, 3, 16, 16)),
    "SmolVLMForConditionalGeneration": _with_image(4, start=False, pixel_values=_noise(2, 1, 3, 16, 16)),
    "Qwen2VLForConditionalGeneration": _QWEN_IMAGE,
    "Qwen2_5_VLForConditionalGeneration": _QWEN_IMAGE,
    "Qwen3VLForConditionalGeneration": _QWEN_IMAGE,
    "Qwen3VLMoeForConditionalGeneration": _QWEN_IMAGE,
    "Qwen3_5ForConditionalGeneration": _QWEN_IMAGE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_IMAGE,
    "Glm4vForConditionalGeneration": _QWEN_IMAGE,
    "Glm4vMoeForConditionalGeneration": _QWEN_IMAGE,
    "PixtralVisionModel": _pixtral,
}
# family -> class -> (its config, its inputs)
TINY_MODELS = {
    family: {name: (config, INPUTS.get(name, text)) for name, config in classes.items()}
    for family, classes in MODELS.items()
}


TINY_MODELS |= {
    row.name: {name: (functools.partial(shrunk, row.name), text) for name in row.loss}
    for row in FAMILIES.values()
    if row.name not in MODELS
}


def swaps_in(family):
    """(name, swap) of all that a family's row replaces in the installed transformers, by class."""
    return [*completed(FAMILIES[family]).pairs()]


def class_of(family):
    """The first class of a family."""
    return getattr(importlib.import_module(FAMILIES[family].module), next(iter(FAMILIES[family].loss)))


def config_of(family, **fields):
    """The configuration of a text model, with other fields."""
    return MODELS[family][class_of(family).__name__](**fields)


def make(family, config=None, **fields):
    """A model of a family's first class, perhaps with other fields in its configuration."""
    return model_of(family, class_of(family).__name__, config or config_of(family, **fields))


def can_be_made(family):
    """Whether the installed transformers makes the small models of a family: some configurations are those of
    transformers 5."""
    if parse(transformers.__version__) < parse("5") and family in ("phi4_multimodal", *OMNI):
        return False
    return importlib.util.find_spec(FAMILIES[family].module.rpartition(".")[0]) is not None


def kinds_of(family):
    """The names of the small models of a family that run without a patch: Llama 4's with images, in transformers 5.24,
    reads what its output does not have."""
    broken = "Llama4ForConditionalGeneration" if parse(transformers.__version__) >= parse("5.24") else None
    return [name for name in TINY_MODELS[family] if name != broken]


def model_of(family, name, config=None):
    """A model in training mode with random weights."""
    torch.manual_seed(0)
    cls = getattr(importlib.import_module(FAMILIES[family].module), name)
    model = randomised(cls(config or TINY_MODELS[family][name][0]()))
    if family == "phimoe":  # its router draws experts in training: the same ones in every forward
        model.register_forward_pre_hook(_seed)
    return model.train()


def randomised(model):
    """A model with random weights; norms' weights, far from one, and biases too, which transformers starts at
    constants."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
            else:
                parameter.copy_(
                    torch.randn_like(parameter) * 0.1
                )  # experts and projections that transformers leaves empty or tiny
        for module in model.modules():
            # A default of no config: of the size of the activations' variance, so that it counts.
            for eps in ("variance_epsilon", "eps"):
                if isinstance(value := getattr(module, eps, None), float) and 0 < value < 0.03:
                    setattr(module, eps, 0.03)
    return model


def _seed(*_):
    torch.manual_seed(0)
