"""Cross entropy with the gradient made in the same pass over the logits; formulas in liger/ops/loss/cross_entropy.h."""

from liger_kernel._library import ops
from liger_kernel.ops.utils import check_label, reduction_code

REDUCTIONS = ("none", "mean", "sum")
_DEFAULTS = (-100, 0, 0, "mean", None, False, False, False, False)


def loss_options(
    ignore_index,
    lse_square_scale,
    label_smoothing,
    reduction,
    softcap,
    return_z_loss,
    return_token_accuracy,
    return_predicted_tokens,
    use_token_scaling=False,
):
    """The options as libliger's schemas carry them: flags and scales, None for the defaults.

    Raises ValueError for an unknown reduction, TypeError where ignore_index is no integer.
    """
    if (
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        return_token_accuracy,
        return_predicted_tokens,
        use_token_scaling,
    ) == _DEFAULTS:
        return None, None
    check_label("ignore_index", ignore_index)
    for name, flag in (
        ("return_token_accuracy", return_token_accuracy),
        ("return_predicted_tokens", return_predicted_tokens),
    ):
        if flag not in (True, False):
            raise AssertionError(f"{name} must be True or False, got {flag!r}")
    return (
        [
            ignore_index,
            reduction_code(reduction, REDUCTIONS),
            bool(use_token_scaling),
            bool(return_z_loss),
            bool(return_token_accuracy),
            bool(return_predicted_tokens),
        ],
        [float(label_smoothing), float(lse_square_scale), float(softcap or 0)],
    )


def asked_for(results, *asked):
    """(loss, z_loss, token_accuracy, predicted_tokens) with None for what `asked` is false for, which the operators
    return empty."""
    return results[0], *(result if wanted else None for result, wanted in zip(results[1:], asked))


class LigerCrossEntropyFunction:
    @staticmethod
    def apply(
        _input,
        target,
        weight,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
    ):
        """(loss, z_loss, token_accuracy, predicted_tokens), None where not asked for; only the loss is differentiable.

        _input [..., classes] logits, which are left alone; target [...]; weight [classes] or None. A label that is
        neither a class nor ignore_index raises IndexError on the CPU and is a device assertion on CUDA. Only ignored
        labels: loss 0.
        """
        return asked_for(
            ops.cross_entropy(
                _input,
                target,
                weight,
                *loss_options(
                    ignore_index,
                    lse_square_scale,
                    label_smoothing,
                    reduction,
                    softcap,
                    return_z_loss,
                    return_token_accuracy,
                    return_predicted_tokens,
                ),
            ),
            return_z_loss,
            return_token_accuracy,
            return_predicted_tokens,
        )


def cross_entropy_forward(
    _input,
    target,
    weight,
    ignore_index,
    lse_square_scale,
    label_smoothing,
    reduction,
    softcap,
    return_z_loss=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
):
    """The results and the gradient of the logits (the logits themselves where they want none), without autograd.

    The gradient of float16 logits is float: in 16 bits a mean's would vanish before a loss scale reaches it.
    """
    options = loss_options(
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        return_token_accuracy,
        return_predicted_tokens,
    )
    *results, gradient, scale = ops.cross_entropy_forward(
        _input.detach(), target, weight, *options, _input.requires_grad
    )
    if scale.ndim == 0:
        gradient = gradient.float() / scale
    return *asked_for(
        results, return_z_loss, return_token_accuracy, return_predicted_tokens
    ), gradient if _input.requires_grad else _input


def cross_entropy_backward(_input, grad_output):
    """The gradient that cross_entropy_forward returned, times the upstream gradient."""
    return _input * (grad_output.unsqueeze(-1) if grad_output.ndim > 0 else grad_output)
