"""The full convolution against a loop, its gates, and decoding in chunks."""

import pytest
import torch

pytest.importorskip("fairseq")

from lightconv_plugin.models.token_mixers import FairseqConvBlock as ConvBlock
from lightconv_plugin.modules import FullConv


def loop(conv: FullConv, x: torch.Tensor) -> torch.Tensor:
    """out[t] = bias + Σ_k weight[..., k] x[t − padding_l + k], then the gates; in float64."""
    weight, bias, x = conv.weight.double(), conv.bias.double(), x.double()
    out = bias.expand(x.shape[0], x.shape[1], -1).clone()
    for t in range(x.shape[0]):
        for k in range(conv.kernel_size):
            source = t - conv.padding_l + k
            if 0 <= source < x.shape[0]:
                out[t] += x[source] @ weight[..., k].t()
    if conv.glu:
        value, gate = out.chunk(2, -1)
        out = value * gate.sigmoid()
    return out.float()


@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("kernel_size, padding_l", [(1, 0), (3, 1), (3, 2), (4, 1), (7, 6)])
@pytest.mark.parametrize("length", [1, 2, 9])
@torch.no_grad()
def test_definition(length, kernel_size, padding_l, glu):
    conv = FullConv(6, kernel_size, padding_l, glu=glu)
    conv.bias.normal_()
    x = torch.randn(length, 2, 6)
    torch.testing.assert_close(conv(x), loop(conv, x), atol=1e-5, rtol=1e-5)


def test_weights_are_dropped_in_training_only():
    conv = FullConv(6, 3, 1, weight_dropout=0.5)
    x = torch.randn(9, 2, 6)
    assert not torch.equal(conv(x), conv(x))
    conv.eval()
    assert torch.equal(conv(x), conv(x))


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: FullConv(6, 0, 0), ["kernel_size", "at least 1", "0"]),
        (lambda: FullConv(6, 3, 3), ["padding_l", "0 … kernel_size - 1 = 2", "3"]),
        (lambda: FullConv(6, 3, 1).step(torch.randn(1, 2, 6), None), ["padding_l = kernel_size - 1", "padding_l=1"]),
        (lambda: ConvBlock(8, FullConv(6, 3, 1), glu=False, project=False), ["conv.channels = embed_dim", "6 != 8"]),
    ],
)
def test_wrong_geometry_is_named(build, words):
    with pytest.raises(ValueError) as error:
        build()
    for word in words:
        assert word in str(error.value)
