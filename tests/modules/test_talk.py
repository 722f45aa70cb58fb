"""The TaLK module against the paper's formula written out, in pieces, and with wrong arguments."""

import math

import pytest
import torch

from lightconv_plugin.modules import TaLKConv


def talk(max_left=5, max_right=3, **options) -> TaLKConv:
    module = TaLKConv(24, max_left, max_right, 4, **options).eval()
    with torch.no_grad():
        module.offsets.weight.normal_()  # so that windows differ
    return module


def formula(module: TaLKConv, x: torch.Tensor) -> torch.Tensor:
    """Lioutas & Guo 2020, equations 3 to 8, as their code has it: differences of one prefix sum; float64 loops."""
    length, batch, channels = x.shape
    heads, reach_left, reach_right = module.num_heads, module.max_left, module.max_right
    a = torch.sigmoid(x.double() @ module.offsets.weight.double().t() + module.offsets.bias.double())
    scaled = x.double() / (reach_left + reach_right + 1)
    prefix = torch.cat([torch.zeros(1, batch, channels, dtype=torch.double), scaled.cumsum(0)])  # prefix[i] = S[i − 1]
    out = torch.zeros_like(scaled)
    for b in range(batch):
        for t in range(length):
            for h in range(heads):
                c = slice(h * channels // heads, (h + 1) * channels // heads)
                low = max(0.0, t - float(a[t, b, h]) * reach_left)
                high = min(length - 1.0, t + float(a[t, b, heads + h]) * reach_right if reach_right else t)
                gl, gr = math.ceil(low) - low, high - math.floor(high)
                s = prefix[:, b, c]
                out[t, b, c] = (1 - gr) * s[math.floor(high) + 1] + gr * s[math.ceil(high) + 1]
                out[t, b, c] -= gl * s[math.floor(low)] + (1 - gl) * s[math.ceil(low)]
    return out.float()


@pytest.mark.parametrize("max_left, max_right", [(1, 1), (5, 3), (5, 0), (31, 31), (0, 2), (0, 0)])
@pytest.mark.parametrize("length", [1, 4, 13])
@torch.no_grad()
def test_the_papers_formula(length, max_left, max_right):
    module = talk(max_left, max_right)
    x = torch.randn(length, 3, 24)
    torch.testing.assert_close(module(x), formula(module, x), atol=1e-5, rtol=1e-5)


def test_offsets_are_dropped_in_training_only():
    module = talk(weight_dropout=0.5)
    x = torch.randn(9, 2, 24)
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))
    left, right = module.relative_offsets(x)
    assert left.shape == right.shape == (9, 2, 4)
    factors = (left / torch.sigmoid(module.offsets(x))[..., :4]).round(decimals=4)
    assert set(factors.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: TaLKConv(24, 3, 3, 5), ["num_heads", "num_heads=5", "channels=24"]),
        (lambda: TaLKConv(24, -1, 3, 4), ["max_left", "at least 0", "-1"]),
        (lambda: TaLKConv(24, 3, -2, 4), ["max_right", "at least 0", "-2"]),
        (lambda: talk(3, 1).step(torch.randn(1, 2, 24), None), ["max_right = 0", "max_right=1"]),
    ],
)
def test_wrong_arguments_are_named(build, words):
    with pytest.raises(ValueError) as error:
        build()
    for word in words:
        assert word in str(error.value)
