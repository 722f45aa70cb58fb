"""Dropout with a residual's norm or with a ReLU on the host: both passes against float64."""

import dataclasses

import pytest
import torch

from .calls import check
from .dropout_calls import TYPES, NormCase, ReluCase

# Channels in packs of 16 bytes and one by one; more threads than one warp; the most there may be.
CHANNELS = [1, 7, 8, 40, 257, 1024, 1030, 4096]


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
def test_norm(on_host, channels, dtype, what):
    # With one channel, what is normalised is 0.
    check(NormCase(dtype, channels=channels), what, on_host)


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("rows", [1, 8, 9, 300])
def test_rows_of_several_blocks(on_host, rows, what):
    check(NormCase(rows=rows, channels=16), what, on_host)


@pytest.mark.parametrize("wanted", [("dx",), ("dresidual",), ("dweight", "dbias"), ("dx", "dweight", "dbias"), ()])
def test_gradients_that_are_wanted(on_host, wanted):
    check(NormCase(wanted=wanted), "backward", on_host)


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("case", [NormCase, ReluCase])
@pytest.mark.parametrize(
    "options",
    [{"dropout": 0.0}, {"on_device": False}, {"dropout": 0.999}, {"unaligned": True, "dtype": torch.bfloat16}],
    ids=["none", "seed of the host", "nearly all", "not at 16 bytes"],
)
def test_seeds_and_layouts(on_host, options, case, what):
    check(case(**options), what, on_host)


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("elements", [1, 3, 8, 255, 256, 2048, 5001])
def test_relu(on_host, elements, dtype, what):
    check(ReluCase(dtype, elements=elements), what, on_host)


def test_a_row_without_spread_and_one_of_large_numbers(on_host):
    """Equal numbers give the bias; the variance is that of the differences, so a large mean costs no digits."""
    case = NormCase(dropout=0.0, rows=2, channels=64)
    made = case.tensors()
    made["x"].zero_()
    made["residual"][0] = 3.0
    made["residual"][1] = 10_000 + torch.arange(64) % 3
    out = case.forward(on_host, made)
    assert torch.equal(out[0], made["bias"])
    torch.testing.assert_close(out[1].double(), case.expected("forward", made)[0][1], rtol=1e-4, atol=1e-4)


def test_nan(on_host):
    """It stays in its row, and in its element of a ReLU."""
    case = NormCase(dropout=0.0)
    made = case.tensors()
    made["x"][1, 3] = torch.nan
    assert case.forward(on_host, made).isnan().any(1).tolist() == [False, True, False, False, False]
    relu = ReluCase(dropout=0.0, elements=16)
    found = relu.forward(on_host, {"x": torch.tensor([torch.nan, -1.0, 1.0, torch.inf] * 4)})
    assert found[:4].nan_to_num(7).tolist() == [7, 0, 1, torch.finfo(torch.float32).max]


def test_nothing(on_host):
    assert not len(dataclasses.replace(NormCase(), rows=0).forward(on_host, NormCase(rows=0).tensors()))
    assert not len(ReluCase(elements=0).forward(on_host, {"x": torch.zeros(0)}))
