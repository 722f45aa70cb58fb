"""What talkconv's kernels promise besides numbers: far windows, NaN, large rows.

test_guarantees.py has what all operators promise.
"""

import math

import pytest
import torch

from .calls import DTYPES, check_both
from .host import HostError
from .talk_calls import WIDTHS, TalkCase


@pytest.mark.parametrize("heads, per_head", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows_reach_as_far_as_they_like(on_host, dtype, heads, per_head):
    """A few outputs far away, up to infinitely, whose rows' owners must find them."""
    case = TalkCase(330, 1, heads, per_head, 3, 2, dtype)
    made = case.tensors()
    left, right = made["offset_left"], made["offset_right"]
    left[300, 0, 0] = math.inf
    left[250, 0, 1] = 61.0 + 1 / 16
    right[5, 0, 0] = 120.5
    right[170, 0, 1] = 6e4
    left[40, 0, 1] = -math.inf
    check_both(case, on_host, made)


@pytest.mark.parametrize("heads, per_head", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_goes_no_further_than_windows(on_host, dtype, heads, per_head):
    case = TalkCase(50, 2, heads, per_head, 9, 5, dtype)
    made = case.tensors()
    made["x"][20, 0, 2] = math.nan
    made["x"][31, 0, 1] = math.inf
    made["x"][33, 0, 1] = -math.inf
    made["grad"][33, 1, 2] = math.nan
    made["grad"][12, 0, 0] = -math.inf
    check_both(case, on_host, made)


@pytest.mark.parametrize("most", [(6, 4), (0, 0)], ids=str)
@pytest.mark.parametrize("heads, per_head", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_offset_that_is_nan(on_host, dtype, heads, per_head, most):
    case = TalkCase(40, 3, heads, per_head, *most, dtype, lengths=torch.int64)
    made = case.tensors()
    made["lengths"] = torch.tensor([40, 21, 9])
    made["x"].nan_to_num_()
    made["offset_left"][[3, 30, 39], [0, 1, 2], 0] = math.nan
    if most[1]:
        made["offset_right"][[3, 17], [1, 0], 1] = math.nan
    check_both(case, on_host, made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_row_takes_nothing_from_its_neighbours(on_host, dtype):
    """Differences of prefix sums would lose all that follows."""
    for heads, per_head in WIDTHS:
        case = TalkCase(60, 1, heads, per_head, 7, 7, dtype)
        made = case.tensors()
        clean = case.forward(on_host, made)
        dirty = made | {"x": made["x"].clone()}
        dirty["x"][30] = 30000
        out = case.forward(on_host, dirty)
        weight = made["x"].new_zeros(60, 1, heads * per_head)
        weight[30] = 1
        touched = case.forward(on_host, made | {"x": weight}) != 0
        assert torch.equal(out[~touched], clean[~touched])
        assert not torch.equal(out[touched], clean[touched])


@pytest.mark.parametrize("heads, per_head", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_packed_sentences(on_host, dtype, heads, per_head):
    """More sequences than a warp has lanes, empty ones among them, and windows that would reach across several."""
    case = TalkCase(120, 1, heads, per_head, 9, 9, dtype, top=3, packed=True)
    made = case.tensors()
    edges = torch.randint(0, 121, (60,), generator=torch.Generator().manual_seed(7)).sort().values
    edges = torch.cat([torch.tensor([0, 0, 0]), edges, torch.tensor([120, 120])])
    made["cu_seqlens"] = edges.int()
    check_both(case, on_host, made)


def test_lengths_and_boundaries_out_of_range_do_no_harm(on_host):
    """Their values are not checked on a device; nothing outside the tensors may be read or written."""
    for dtype in DTYPES:
        case = TalkCase(19, 2, 2, 64, 7, 7, dtype, top=2)
        for lengths in ([1000, -5], [2**31 - 1, 9]):
            made = case.tensors() | {"lengths": torch.tensor(lengths)}
            case.forward(on_host, made)
            case.backward(on_host, made)
        case = TalkCase(19, 1, 2, 64, 7, 7, dtype, top=2)
        for edges in ([0, 100_000, 19], [-7, 3, 2**31 - 1], [5, 2, 1, 9]):
            made = case.tensors() | {"cu_seqlens": torch.tensor(edges, dtype=torch.int32)}
            case.forward(on_host, made)
            case.backward(on_host, made)


def test_grids_beyond_all_limits_are_errors(on_host):
    case = TalkCase(3, 2, 1, 4, 3, 1)
    made = case.tensors()
    # Nothing may be launched, so that there need not be so many sentences.
    given = {name: made[name] for name in ("x", "offset_left", "offset_right")}
    numbers = {"talk": 1, "backward": 0, "max_left": 3, "max_right": 1, "type": 0, "steps": 3, "batch": 2**33}
    numbers |= {"channels": 4, "heads": 1, "state_rows": 0, "lengths_int64": 0, "sequences": 0}
    with pytest.raises(HostError, match="cudaError_t 9"):
        on_host.runner.call(numbers | on_host.device, {}, given, {"out": made["x"].clone()})
