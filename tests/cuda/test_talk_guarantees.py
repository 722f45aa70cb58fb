"""What talkconv's kernels promise besides numbers: far windows, NaN, the same bits, offsets of any size."""

import math

import pytest
import torch

from .convolution_calls import compare
from .host import HostError, Sparse
from .talk_calls import Oracle, TalkCase, check
from .test_guarantees import STRIDES, bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One channel a head, vectors of four, the matrix units' in half types.
WIDTHS = [(3, 1), (4, 4), (2, 64)]


def check_both(case, operators, made):
    check(case, "forward", operators, made)
    check(case, "backward", operators, made)


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
def test_a_sentence_does_not_depend_on_its_batch(on_host, dtype, heads, per_head):
    case = TalkCase(100, 3, heads, per_head, 15, 7, dtype, top=1.5, lengths=torch.int64)
    made = case.tensors()
    made["lengths"] = torch.tensor([100, 20, 83])
    for b, length in enumerate(made["lengths"].tolist()):
        made["x"][length:, b] = math.nan
        made["x"][:length, b].nan_to_num_()
        # Outputs beyond the end reach rows before it, so their gradient belongs to the sentence as a batch sees it.
        made["grad"][length:, b] = 0
    out, (dx, dleft, dright) = case.forward(on_host, made), case.backward(on_host, made)
    for b, length in enumerate(made["lengths"].tolist()):
        rows = (slice(length), slice(b, b + 1))
        alone = {name: made[name][rows].clone() for name in ("x", "grad", "offset_left", "offset_right")}
        alone = made | alone | {"lengths": None}
        assert torch.equal(bits(case.forward(on_host, alone)), bits(out[rows]))
        for ours, theirs in zip(case.backward(on_host, alone), (dx, dleft, dright), strict=True):
            assert torch.equal(ours, theirs[rows])
        assert not dx[length:, b].any()


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


@pytest.mark.parametrize("per_head", [3, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_can_be_asked_for_alone(on_host, dtype, per_head):
    for case in (TalkCase(40, 2, 2, per_head, 7, 4, dtype), TalkCase(5, 2, 2, per_head, 7, 0, dtype, seen=4)):
        made = case.tensors()
        call = case.backward if case.seen is None else case.step_backward
        together = call(on_host, made)
        for needs in ((True, False, False), (False, True, False), (False, False, True)):
            for needed, ours, all_of_them in zip(needs, call(on_host, made, needs), together, strict=True):
                assert torch.equal(ours, all_of_them) if needed else ours.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
def test_offsets_have_64_bits(on_host, strides, dtype):
    case = TalkCase(3, 2, 2, 64, 3, 1, dtype)
    made = case.tensors()
    far = {name: Sparse(made[name], (*strides, 1)) for name in ("x", "grad", "offset_left", "offset_right")}
    compare("out", case.forward(on_host, made | far).values, case.forward(Oracle(), made))
    wanted = case.backward(Oracle(), made)
    for name, got, want in zip(("dx", "dleft", "dright"), case.backward(on_host, made | far), wanted, strict=True):
        compare(name, got.values, want)


@pytest.mark.parametrize("per_head, rows", [(1, 1500), (64, 200)], ids=str)
def test_no_size_is_limited_by_the_height_of_a_grid(on_host, per_head, rows):
    """A grid has 2^31 blocks along x, but 65,535 along y and z: here 8, less than there are of anything."""
    low = on_host.on(grid_height=8)
    for steps, batch, heads in ((rows, 1, 1), (3, 20, 1), (3, 1, 20)):
        case = TalkCase(steps, batch, heads, per_head, 3, 3, torch.bfloat16)
        made = case.tensors()
        case.forward(low, made)
        case.backward(low, made)


def test_grids_beyond_all_limits_are_errors(on_host):
    case = TalkCase(3, 2, 1, 4, 3, 1)
    made = case.tensors()
    # Nothing may be launched, so that there need not be so many sentences.
    given = {name: made[name] for name in ("x", "offset_left", "offset_right")}
    numbers = {"talk": 1, "backward": 0, "max_left": 3, "max_right": 1, "type": 0, "steps": 3, "batch": 2**33}
    numbers |= {"channels": 4, "heads": 1, "state_rows": 0, "lengths_int64": 0, "sequences": 0}
    with pytest.raises(HostError, match="cudaError_t 9"):
        on_host.runner.call(numbers | on_host.device, {}, given, {"out": made["x"].clone()})


@pytest.mark.parametrize("left", [7, 63, 255, 600])
def test_a_device_with_little_shared_memory(on_host, left):
    """Compute capability 7.5: no bfloat16 matrix products, no asynchronous copies, 64 KB of shared memory."""
    case = TalkCase(20, 1, 2, 128, left, left, torch.float16)
    small = on_host.on(compute_capability=75, shared_at_most=64 * 1024)
    made = case.tensors()
    for what in ("forward", "backward"):
        got, want = getattr(case, what)(small, made), getattr(case, what)(Oracle(), made)
        got, want = ((result,) if isinstance(result, torch.Tensor) else result for result in (got, want))
        for ours, theirs in zip(got, want, strict=True):
            compare(what, ours, theirs)


def test_the_sanitizer_watches_the_offsets(on_host):
    """The guard itself: offsets with one row less than the launcher is told end the call."""
    case = TalkCase(4, 1, 2, 8, 3, 1)
    made = case.tensors()
    with pytest.raises(HostError, match="heap-buffer-overflow"):
        case.forward(on_host, made | {"offset_left": made["offset_left"][:-1].clone()})
    compare("out", case.forward(on_host, made), case.forward(Oracle(), made))
