"""PackedLinear against float64."""

import pytest
import torch
from torch import nn

from lightconv_plugin.generation.sublayers import PackedLinear, pack

# Of the largest output: what rounding allows.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2}


def exact(x, *linears):
    return torch.cat([nn.functional.linear(x.double(), one.weight.double(), one.bias.double()) for one in linears], 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 20, 33])
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 3), (128, 160), (160, 124)])
def test_close_to_float64(inputs, outputs, rows, dtype):
    linear, x = nn.Linear(inputs, outputs), torch.randn(rows, inputs)
    y = pack(linear, dtype=dtype)(x)
    expected = exact(x, linear)
    assert (y.shape, y.dtype) == ((rows, outputs), torch.float32)
    assert float((y - expected).abs().max()) <= TOLERANCE[dtype] * float(expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_several_layers_at_once(dtype):
    layers = [nn.Linear(128, 64), nn.Linear(128, 96), nn.Linear(128, 8)]
    nn.init.zeros_(layers[2].bias)
    x = torch.randn(6, 128)
    expected = exact(x, *layers)
    layers[2].bias = None
    difference = pack(*layers, dtype=dtype)(x) - expected
    assert float(difference.abs().max()) <= TOLERANCE[dtype] * float(expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_without_bias_and_with_channels_of_zeros(dtype):
    linear = nn.Linear(128, 130, bias=False)
    with torch.no_grad():
        linear.weight[7] = 0
    y = pack(linear, dtype=dtype)(torch.randn(4, 128))
    assert torch.equal(y[:, 7], torch.zeros(4))


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_keeps_the_precision_of_the_model(kind):
    linear, x = nn.Linear(40, 20).to(kind), torch.randn(3, 40, dtype=kind)
    y = pack(linear, dtype="float32")(x)
    assert y.dtype == kind
    torch.testing.assert_close(y, linear(x))


def test_wrong_dtype():
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16 in torch, got 'int8'"):
        PackedLinear(torch.empty(2, 2), None, "int8")
