"""PackedLinear against float64."""

import pytest
import torch
from torch import nn

from lightconv_plugin.generation.linear import PackedLinear, check_dtype, round_rows

CPU = torch.device("cpu")
# Of the largest output: what rounding allows, (float32, bfloat16, int8).
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2, "int8": 3e-2}


def exact(x, *linears):
    return torch.cat([nn.functional.linear(x.double(), one.weight.double(), one.bias.double()) for one in linears], 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 20, 33])
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 3), (128, 160), (160, 124)])
def test_close_to_float64(inputs, outputs, rows, dtype):
    linear, x = nn.Linear(inputs, outputs), torch.randn(rows, inputs)
    y = PackedLinear.of(linear, dtype=dtype)(x)
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
    difference = PackedLinear.of(*layers, dtype=dtype)(x) - expected
    assert float(difference.abs().max()) <= TOLERANCE[dtype] * float(expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_without_bias_and_with_channels_of_zeros(dtype):
    linear = nn.Linear(128, 130, bias=False)
    with torch.no_grad():
        linear.weight[7] = 0
    y = PackedLinear.of(linear, dtype=dtype)(torch.randn(4, 128))
    assert torch.equal(y[:, 7], torch.zeros(4))


def test_channels_of_very_different_sizes_in_int8():
    """Each output channel has its own scale."""
    linear, x = nn.Linear(64, 32, bias=False), torch.randn(9, 64)
    with torch.no_grad():
        linear.weight *= torch.logspace(-4, 4, 32).unsqueeze(1)
    y = PackedLinear.of(linear, dtype="int8")(x)
    expected = nn.functional.linear(x, linear.weight)
    assert float(((y - expected).abs().amax(0) / expected.abs().amax(0)).max()) < 5e-2


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_keeps_the_precision_of_the_model(kind):
    linear, x = nn.Linear(40, 20).to(kind), torch.randn(3, 40, dtype=kind)
    y = PackedLinear.of(linear)(x)
    assert y.dtype == kind
    torch.testing.assert_close(y, linear(x))


def test_row_counts():
    rounded = [round_rows(rows, CPU) for rows in range(2048)]
    assert rounded[:17] == list(range(17))
    assert all(rows <= after <= rows * 9 / 8 for rows, after in enumerate(rounded))
    assert rounded == sorted(rounded)
    assert len({after for after in rounded if 1024 < after <= 2048}) == 8
    assert [round_rows(rows, CPU) for rows in (17, 18, 33, 160, 161)] == [18, 18, 36, 160, 176]


def test_wrong_dtype():
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, int8, got 'half'"):
        check_dtype("half")
    with pytest.raises(ValueError, match="needs a CPU"):
        PackedLinear(torch.empty(2, 2, device="meta"), None, "int8")


def test_bfloat16_where_onednn_has_none_is_one_error(monkeypatch):
    def refuse(weight):
        raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx_ne_convert or avx512bw")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    with pytest.raises(ValueError, match='dtype "bfloat16" needs a CPU with AVX-512: use "float32" or "int8"'):
        PackedLinear.of(nn.Linear(256, 256), dtype="bfloat16")
    with pytest.raises(RuntimeError, match="bf16 path needs"):
        PackedLinear.of(nn.Linear(256, 256))
