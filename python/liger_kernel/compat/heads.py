"""The loss inside a head, as the API's scripts call it."""

from typing import Any

from torch import Tensor

from liger_kernel.transformers.head import describe, prepare_head
from liger_kernel.transformers.model.loss_utils import CrossEntropyOutput
from liger_kernel.transformers.patching.place import Edits


def lce_maybe_trainable_lm_head(
    self: Any, hidden_states: Tensor, hidden_size: int, labels: Tensor | None, shift_labels: Tensor | None,
    **loss_kwargs: Any,
) -> Any:  # fmt: skip
    """The loss of `self.lm_head` on hidden states, computed inside the call of the head; see LigerForCausalLMLoss.

    Args:
        self: a causal language model with an `lm_head`.
        hidden_states: [..., hidden_size].
        labels, shift_labels: as in LigerForCausalLMLoss.
        loss_kwargs: its other keywords.

    Raises TypeError for a head inside which the loss cannot be computed.
    """
    return _liger_for_causal_lm_loss(self.lm_head, hidden_states, hidden_size, labels, shift_labels, **loss_kwargs)


def _liger_for_causal_lm_loss(lm_head, hidden_states, hidden_size, labels, shift_labels, **loss_kwargs):
    """The loss of a head on hidden states; a CrossEntropyOutput where the accuracy or the predictions are asked for."""
    if not prepare_head(lm_head, Edits()):
        raise TypeError(f"the loss cannot be computed inside {describe(lm_head)}")
    arguments = {"labels": labels, "shift_labels": shift_labels, "hidden_size": hidden_size, **loss_kwargs}
    loss, token_accuracy, predicted_tokens = lm_head(hidden_states, liger_loss=arguments)
    if token_accuracy is None and predicted_tokens is None:
        return loss
    return CrossEntropyOutput(loss=loss, token_accuracy=token_accuracy, predicted_tokens=predicted_tokens)
