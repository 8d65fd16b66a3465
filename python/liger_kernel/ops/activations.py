"""The table of activations: their numbers in libliger, and their names in configs of transformers."""

from liger_kernel._library import ops

#: The number of each name in LIGER_ACTIVATIONS (liger/options.h).
ACTIVATIONS = {name: number for number, name in enumerate(ops.activations())}
SILU, GELU_TANH, GELU_ERF, RELU_SQUARED = map(ACTIVATIONS.get, ("silu", "gelu_tanh", "gelu_erf", "relu_squared"))

#: The number of each name in transformers' ACT2FN.
CONFIG_NAMES = {
    "silu": SILU,
    "swish": SILU,
    "gelu": GELU_ERF,
    "gelu_python": GELU_ERF,
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_python_tanh": GELU_TANH,
    "gelu_new": GELU_TANH,
    "gelu_accurate": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "relu2": RELU_SQUARED,
}


def activation_of(config, *allowed, default=None) -> int:
    """The number of config.hidden_activation or hidden_act, `default` where it has neither; raises ValueError where it
    is none of `allowed`."""
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    number = default if name is None else CONFIG_NAMES.get(name)
    if number not in allowed:
        names = [known for known, number in CONFIG_NAMES.items() if number in allowed]
        raise ValueError(f"hidden_act must be one of {names}, got {name!r}")
    return number
