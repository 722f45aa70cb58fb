"""lightconv with a head for every channel, which has kernels of its own on a CPU: it is torch's grouped convolution."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from lightconv_plugin import ops

from .operators import assert_same_bits, random_call

SHAPES = [  # steps, batch, channels, kernel size, padding_l; channels that fill no vector, one, and some and a part
    (1, 1, 1, 1, 0),
    (1, 2, 5, 3, 2),
    (2, 3, 16, 7, 3),
    (9, 2, 17, 4, 1),
    (40, 2, 33, 15, 14),
    (40, 1, 128, 31, 0),
    (300, 1, 40, 31, 15),
    (70, 2, 6, 63, 62),
    (5, 1, 24, 31, 30),
]


def grouped(x, weight, padding_l, bias=None):
    padded = F.pad(x.permute(1, 2, 0), (padding_l, weight.shape[1] - 1 - padding_l))
    return F.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0]).permute(2, 0, 1)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("steps, batch, channels, size, padding_l", SHAPES)
def test_torchs_grouped_convolution(steps, batch, channels, size, padding_l, dtype, tolerance, backend):
    torch.manual_seed(steps + channels)
    wide = [torch.randn(s).to(dtype).double() for s in ((steps, batch, channels), (channels, size), (channels,))]
    grad = torch.randn(steps, batch, channels).to(dtype)
    leaves = [t.to(dtype).requires_grad_() for t in wide]
    out = ops.lightconv(*leaves[:2], padding_l, normalize="none", bias=leaves[2])
    out.backward(grad)
    expected_leaves = [t.requires_grad_() for t in wide]
    expected = grouped(*expected_leaves[:2], padding_l, expected_leaves[2])
    expected.backward(grad.double())
    pairs = [(out.detach(), expected.detach())]
    pairs += [(a.grad, b.grad) for a, b in zip(leaves, expected_leaves, strict=True)]
    for got, want in pairs:
        scale = max(1.0, want.abs().max().item())
        torch.testing.assert_close(got.double(), want, atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("packed", [False, True], ids=["lengths", "packed"])
def test_what_lies_outside_a_sequence_is_never_read(packed, backend):
    """NaN in the rows outside reaches neither outputs nor gradients, and each sequence is as it is alone."""
    lengths, edges = [13, 0, 1, 21], [0, 13, 13, 14, 35]
    if packed:
        steps, batch, options = 35, 1, {"cu_seqlens": torch.tensor(edges, dtype=torch.int32)}
        places = [(slice(first, last), slice(0, 1)) for first, last in pairwise(edges)]
    else:
        steps, batch, options = 21, 4, {"lengths": torch.tensor(lengths)}
        places = [(slice(length), slice(b, b + 1)) for b, length in enumerate(lengths)]
    call = random_call("lightconv", steps, batch, 19, 1, 3, 3, dtype=torch.float32, normalize="none", bias=False)
    outside = torch.ones(steps, batch, dtype=torch.bool)
    for place in places:
        outside[place] = False
    grad = call.randn_like_out().masked_fill(outside.unsqueeze(-1), 0)
    got = call.filled(outside, torch.nan).everything(grad, **options)
    dweight = torch.zeros(19, 7)
    for place in [place for place in places if len(grad[place])]:
        alone = call.part(*place).everything(grad[place])
        dweight += alone.pop("weight")
        assert_same_bits({name: got[name][place] for name in alone}, alone)
    assert got["out"].isfinite().all() and got["x"].isfinite().all()
    torch.testing.assert_close(got["weight"], dweight)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_stays_with_the_taps_that_met_a_row(value, backend):
    """Output 0 of a causal filter meets one row: the other taps' gradients are those of the other outputs."""
    x, weight = torch.randn(5, 1, 18), torch.randn(18, 3, requires_grad=True)
    grad = torch.ones(5, 1, 18)
    grad[0] = value
    ops.lightconv(x, weight, 2, normalize="none").backward(grad)
    assert weight.grad[:, :2].isfinite().all() and not weight.grad[:, 2].isfinite().any()
