"""What the kernels promise besides numbers: the same bits, nothing read that is not there, offsets of any size."""

import dataclasses
import itertools
import math

import pytest
import torch

from lightconv_plugin.ops.philox import dropout_scale
from lightconv_plugin.ops.sequences import Sequence

from . import talk_calls
from .calls import DTYPES, check_both, compare
from .convolution_calls import Case
from .host import HostError, Sparse
from .operators import values
from .talk_calls import TalkCase

OPERATORS = ("lightconv", "dynamicconv")
# Short filters take kernels of their own, wide rows of half types the matrix units, the rest the tiles.
WIDTHS = [(4, 3, 5), (2, 8, 4), (8, 1, 4), (4, 16, 7), (2, 8, 9), (2, 64, 3), (2, 64, 31), (2, 64, 49)]


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def batches():
    for operator, dtype, (heads, per_head, size) in itertools.product(OPERATORS, DTYPES, WIDTHS):
        glu = per_head == 8
        yield (
            Case(operator, 37, 4, heads, per_head, size, size // 2, dtype, lengths=torch.int64, glu=glu),
            [37, 20, 1, 36],
        )
    for dtype, (heads, per_head) in itertools.product(DTYPES, talk_calls.WIDTHS):
        yield TalkCase(100, 3, heads, per_head, 15, 7, dtype, top=1.5, lengths=torch.int64), [100, 20, 83]


@pytest.mark.parametrize("case, lengths", list(batches()), ids=str)
def test_a_sentence_does_not_depend_on_its_batch(on_host, case, lengths):
    made = case.tensors()
    made["lengths"] = torch.tensor(lengths)
    for b, length in enumerate(lengths):
        made["x"][length:, b] = math.nan
        made["x"][:length, b].nan_to_num_()
        # Rows of the gradient beyond the end reach rows before it, so they belong to the sentence as a batch sees it.
        made["grad"][length:, b] = 0
    out, gradients = case.forward(on_host, made), case.backward(on_host, made)
    for b, length in enumerate(lengths):
        rows = (slice(length), slice(b, b + 1))
        alone = made | {name: made[name][rows].clone() for name in case.by_row} | {"lengths": None}
        assert torch.equal(bits(case.forward(on_host, alone)), bits(out[rows]))
        for name, ours, theirs in zip(case.RESULTS["backward"], case.backward(on_host, alone), gradients, strict=True):
            if name != "dweight" or case.dynamic:
                assert torch.equal(bits(ours), bits(theirs[rows])), name
        assert not gradients[0][length:, b].any()


def test_a_call_does_not_lower_the_shared_memory_of_another(on_host):
    """Both need more than 48 KB; between one host thread's request and its launch another may ask for less."""
    for size in (101, 31):
        case = Case("dynamicconv", 140, 1, 1, 64, size, size // 2, torch.bfloat16)
        check_both(case, on_host, case.tensors())


@pytest.mark.parametrize("heads, per_head, size", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_nan_goes_no_further_than_the_filter(on_host, operator, dtype, heads, per_head, size):
    case = Case(operator, 50, 2, heads, per_head, size, size // 3, dtype)
    made = case.tensors()
    made["x"][20, 0, 3] = math.nan
    made["grad"][33, 1, 5] = math.nan
    if case.dynamic:
        made["weight"][41, 0, 1, 2] = math.nan
    check_both(case, on_host, made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("glu", [False, True])
def test_many_packed_sentences(on_host, dtype, glu):
    """More sequences than a warp has lanes, empty ones among them, and weights that are NaN where no tap reads."""
    case = Case("dynamicconv", 200, 1, 1, 16, 9, 4, dtype, packed=True, renorm=True, glu=glu)
    made = case.tensors()
    edges = torch.randint(0, 201, (70,)).sort().values
    edges = torch.cat([torch.tensor([0, 0, 0]), edges, torch.tensor([200, 200])])
    made["cu_seqlens"] = edges.int()
    outside = ~Sequence(made["x"], None, made["cu_seqlens"]).inside(case.size, -case.padding_l)
    made["weight"].masked_fill_(outside.movedim(0, -1), math.nan)
    check_both(case, on_host, made)


@pytest.mark.parametrize("heads, per_head, size", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_sentence_is_the_sentence(on_host, dtype, heads, per_head, size):
    case = Case("dynamicconv", 37, 1, heads, per_head, size, size - 1, dtype, packed=True, renorm=True)
    made = case.tensors()
    edges = [0, 17, 18, 18, 37]
    made["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32)
    out, (dx, dweight) = case.forward(on_host, made), case.backward(on_host, made)
    for first, last in ((0, 17), (17, 18), (18, 37)):
        alone = {name: made[name][first:last].clone() for name in ("x", "grad", "weight")}
        alone = made | alone | {"cu_seqlens": None}
        compare("out", out[first:last], case.forward(on_host, alone).double())
        alone_dx, alone_dweight = case.backward(on_host, alone)
        compare("dx", dx[first:last], alone_dx.double())
        compare("dweight", dweight[first:last], alone_dweight.double())


def gradients_of():
    for operator, dtype, per_head in itertools.product(OPERATORS, DTYPES, (8, 64)):
        yield Case(operator, 40, 2, 2, per_head, 15, 7, dtype, glu=True, dropout=0.3)
    for operator in OPERATORS:
        yield Case(operator, 4, 3, 2, 8, 5, 4, torch.bfloat16, seen=3, dropout=0.2)
    for dtype, per_head in itertools.product(DTYPES, (3, 64)):
        yield TalkCase(40, 2, 2, per_head, 7, 4, dtype)
        yield TalkCase(5, 2, 2, per_head, 7, 0, dtype, seen=4)


@pytest.mark.parametrize("case", list(gradients_of()), ids=str)
def test_gradients_can_be_asked_for_alone(on_host, case):
    made = case.tensors()
    call = case.backward if case.seen is None else case.step_backward
    together = call(on_host, made)
    for only in range(len(together)):
        needs = [i == only for i in range(len(together))]
        for needed, ours, all_of_them in zip(needs, call(on_host, made, needs), together, strict=True):
            assert torch.equal(bits(ours), bits(all_of_them)) if needed else ours.numel() == 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9999999])
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_dropout_mask_is_that_of_the_definition(on_host, operator, p):
    """Weights of 1 on an x of 1 at one row: the outputs are the factors themselves."""
    case = Case(operator, 5, 3, 3, 1, 5, 0, normalize="none", dropout=p)
    made = case.tensors()
    made["weight"] = torch.ones_like(made["weight"])
    factors = dropout_scale(made["seed"], made["weight"].shape, p, torch.float32)
    for row in range(5):
        made["x"] = torch.zeros(5, 3, 3)
        made["x"][row] = 1
        out = case.forward(on_host, made)
        for t in range(row + 1):
            want = factors[t, :, :, row - t] if case.dynamic else factors[:, row - t].expand(3, 3)
            assert torch.equal(out[t], want)


@pytest.mark.parametrize("size", [3, 7, 8, 13, 14, 17, 18, 28, 30, 31, 32])
def test_dropout_of_filters_in_registers(on_host, size):
    """Filters that begin at every place of a Philox block, with as many blocks as a length can have."""
    case = Case("dynamicconv", 21, 1, 3, 64, size, size // 2, torch.bfloat16, dropout=0.4)
    check_both(case, on_host, case.tensors())
    light = Case("lightconv", 21, 1, 3, 64, size, size // 2, torch.bfloat16, dropout=0.4)
    check_both(light, on_host, light.tensors())


@pytest.mark.parametrize("batch", [64, 65, 130])
@pytest.mark.parametrize("heads, per_head, size", [(2, 64, 31), (3, 8, 3), (7, 5, 9)], ids=["band", "short", "tiles"])
def test_lightconv_adds_up_many_slabs(on_host, heads, per_head, size, batch):
    """Up to 64 slabs are added up by the last kernel, more by one before it."""
    case = Case("lightconv", 5, batch, heads, per_head, size, size // 2, torch.bfloat16)
    check_both(case, on_host, case.tensors())


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**63 - 2], ids=hex)
def test_all_bits_of_the_seed_count(on_host, seed):
    case = Case("dynamicconv", 9, 2, 2, 8, 7, 3, dropout=0.5)
    made = case.tensors() | {"seed": torch.tensor([seed])}
    compare("out", case.forward(on_host, made), case.expected("forward", made))


# Strides that take the offset of the second row, or of the second sentence, beyond 2^31 and 2^32 elements.
STRIDES = {"time": (2**31 + 64, 256), "batch": (256, 2**31 + 64), "both": (2**30 + 2**29, 2**31 + 2**29)}


def wide_rows():
    for dtype in (torch.float32, torch.bfloat16):
        for operator in OPERATORS:
            yield Case(operator, 3, 2, 2, 64, 3, 1, dtype)
        yield TalkCase(3, 2, 2, 64, 3, 1, dtype)


@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("case", list(wide_rows()), ids=str)
def test_offsets_have_64_bits(on_host, case, strides):
    made = case.tensors()
    far = {name: Sparse(made[name], (*strides, *[8] * (made[name].dim() - 3), 1)) for name in case.by_row}
    compare("out", case.forward(on_host, made | far).values, case.expected("forward", made))
    wanted = case.expected("backward", made)
    for name, got, want in zip(case.RESULTS["backward"], case.backward(on_host, made | far), wanted, strict=True):
        compare(name, values(got), want)


def tall():
    """A call of each path, and a number of rows."""
    for operator, (per_head, size, rows) in itertools.product(OPERATORS, ((1, 4, 1500), (64, 15, 200), (8, 255, 150))):
        yield Case(operator, 1, 1, 1, per_head, size, 1, torch.bfloat16), rows
    for per_head, rows in ((1, 1500), (64, 200)):
        yield TalkCase(1, 1, 1, per_head, 3, 3, torch.bfloat16), rows


@pytest.mark.parametrize("call, rows", list(tall()), ids=str)
def test_no_size_is_limited_by_the_height_of_a_grid(on_host, call, rows):
    """A grid has 2^31 blocks along x, but 65,535 along y and z: here 8, less than there are of anything but taps."""
    low = on_host.on(grid_height=8)
    for steps, batch, heads in ((rows, 1, 1), (3, 20, 1), (3, 1, 20)):
        case = dataclasses.replace(call, steps=steps, batch=batch, heads=heads)
        check_both(case, low, case.tensors())


@pytest.mark.parametrize("size", [7, 63, 255, 600])
@pytest.mark.parametrize("operator", [*OPERATORS, "talkconv"])
def test_a_device_with_little_shared_memory(on_host, operator, size):
    """Compute capability 7.5: no bfloat16 matrix products, no asynchronous copies, 64 KB of shared memory."""
    if operator == "talkconv":
        case = TalkCase(20, 1, 2, 128, size, size, torch.float16, compute_capability=75)
    else:
        case = Case(operator, 20, 1, 2, 128, size, size // 2, torch.float16, compute_capability=75)
    check_both(case, on_host.on(shared_at_most=64 * 1024), case.tensors())


@pytest.mark.parametrize(
    "case, name",
    [(Case("dynamicconv", 4, 1, 2, 8, 3, 1), "weight"), (TalkCase(4, 1, 2, 8, 3, 1), "offset_left")],
    ids=str,
)
def test_the_sanitizer_watches_the_tensors(on_host, case, name):
    """The guard itself: a tensor with one row less than the launcher is told ends the call."""
    made = case.tensors()
    with pytest.raises(HostError, match="heap-buffer-overflow"):
        case.forward(on_host, made | {name: made[name][:-1].clone()})
    # A new process serves the next call.
    compare("out", case.forward(on_host, made), case.expected("forward", made))
