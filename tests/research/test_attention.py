"""Multi-token and neighborhood attention, as functions and modules, against plain torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases.neighborhood_attention import reference as neighborhood_reference
from cases.softmax import causal_reference as softmax_reference
from cases.sparsemax import causal_reference as sparsemax_reference
from liger_kernel import ops
from liger_kernel.transformers import LigerMultiTokenAttention
from liger_kernel.transformers import fused_neighborhood_attention as neighborhood

close = torch.testing.assert_close  # float: 1.3e-6 of the value, 1e-5


def gradients(f, *inputs):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = f(*leaves)
    return y, torch.autograd.grad(y, leaves, torch.ones_like(y).cumsum(-1))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_token_attention(sparse, bias):
    module = LigerMultiTokenAttention(4, 6, 3, padding=1, groups=2, bias=bias, sparse=sparse)
    assert module.weight.shape == (6, 2, 3, 3) and module.stride == (1, 1) and (module.bias is not None) == bias
    assert module.weight.abs().max() <= 1 / math.sqrt(18) and (module.bias is None or not module.bias.any())
    inputs = [torch.randn(2, 4, 9, 9), module.weight, *([module.bias] if bias else [])]
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)

    def plain(scores, weight, bias=None):
        maps = sparsemax_reference(scores) if sparse else softmax_reference(scores)
        return F.conv2d(maps, weight, bias, padding=1, groups=2).masked_fill(future, 0)

    def ours(scores, weight, bias=None):
        return ops.LigerMultiTokenAttentionFunction.apply(scores, weight, bias, 1, 1, 1, 2, sparse)

    close(gradients(ours, *inputs), gradients(plain, *inputs))
    close(module(inputs[0]), plain(*inputs))


def test_neighborhood_attention():
    x = torch.randn(2, 11, 24)
    module = neighborhood.LigerFusedNeighborhoodAttention(24, 3, kernel_size=5, dilation=2)
    q, k, v = (p(x).view(2, 11, 3, 8).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    attended = neighborhood_reference(q, k, v, 5, 2).transpose(1, 2).reshape(x.shape)
    close(module(x), module.out_proj(attended))
    assert module.head_dim == 8 and module.dropout is None and module.scale == 8**-0.5
    layer = neighborhood.LigerFusedNeighborhoodAttentionLayer(24, 3, dropout=0.5).eval()
    close(layer(x), x + layer.attention(F.layer_norm(x, (24,))))
    assert layer.attention.dropout.p == layer.dropout.p == 0.5
    config = neighborhood.LigerFusedNeighborhoodAttentionConfig(hidden_size=24).to_dict()
    assert config["hidden_size"] == 24 and config["num_heads"] == 12 and config["layer_norm_eps"] == 1e-5
    with pytest.raises(NotImplementedError, match="Attention mask is not yet supported"):
        module(x, torch.ones(2, 11))


@pytest.mark.parametrize(
    "options,text",
    [
        (dict(hidden_size=24, num_heads=5), "must be divisible by num_heads"),
        (dict(hidden_size=24, num_heads=3, kernel_size=0), "must be positive"),
        (dict(hidden_size=24, num_heads=3, kernel_size=4), "must be odd"),
        (dict(hidden_size=24, num_heads=3, dilation=0), "dilation .* must be positive"),
    ],
)
def test_neighborhood_attention_refuses(options, text):
    with pytest.raises(ValueError, match=text):
        neighborhood.LigerFusedNeighborhoodAttention(**options)
