"""What the kernels promise besides numbers: the same bits, nothing read that is not there, offsets of any size."""

import math

import pytest
import torch

from lightconv_plugin.ops import reference
from lightconv_plugin.ops.philox import dropout_scale
from lightconv_plugin.ops.sequences import Sequence

from .convolution_calls import Case, compare, doubled
from .host import HostError, Sparse

OPERATORS = ("lightconv", "dynamicconv")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Short filters take kernels of their own, wide rows of half types the matrix units, the rest the tiles.
WIDTHS = [(4, 3, 5), (2, 8, 4), (8, 1, 4), (4, 16, 7), (2, 8, 9), (2, 64, 3), (2, 64, 31), (2, 64, 49)]


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def compare_all(case, operators, made):
    """Output and gradients for these tensors against the reference."""
    wanted = doubled(made)
    compare("out", case.forward(operators, made), case.forward(reference, wanted))
    got, want = case.backward(operators, made), case.backward(reference, wanted)
    for name, ours, theirs in zip(("dx", "dweight"), got, want, strict=True):
        compare(name, ours, theirs)


@pytest.mark.parametrize("heads, per_head, size", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_sentence_does_not_depend_on_its_batch(on_host, operator, dtype, heads, per_head, size):
    case = Case(operator, 37, 4, heads, per_head, size, size // 2, dtype, lengths=torch.int64, glu=per_head == 8)
    made = case.tensors()
    made["lengths"] = torch.tensor([37, 20, 1, 36])
    for b, length in enumerate(made["lengths"].tolist()):
        made["x"][length:, b] = math.nan
        made["x"][:length, b].nan_to_num_()
        # Rows of the gradient beyond the end reach rows before it, so they belong to the sentence as a batch sees it.
        made["grad"][length:, b] = 0
    out, (dx, dweight) = case.forward(on_host, made), case.backward(on_host, made)
    for b, length in enumerate(made["lengths"].tolist()):
        alone = {name: made[name][:length, b : b + 1].clone() for name in ("x", "grad")}
        if case.dynamic:
            alone["weight"] = made["weight"][:length, b : b + 1].clone()
        alone = made | alone | {"lengths": None}
        assert torch.equal(bits(case.forward(on_host, alone)), bits(out[:length, b : b + 1]))
        alone_dx, alone_dweight = case.backward(on_host, alone)
        assert torch.equal(bits(alone_dx), bits(dx[:length, b : b + 1]))
        assert not dx[length:, b].any()
        if case.dynamic:
            assert torch.equal(bits(alone_dweight), bits(dweight[:length, b : b + 1]))


def test_a_call_does_not_lower_the_shared_memory_of_another(on_host):
    """Both need more than 48 KB; between one host thread's request and its launch another may ask for less."""
    for size in (101, 31):
        case = Case("dynamicconv", 140, 1, 1, 64, size, size // 2, torch.bfloat16)
        compare_all(case, on_host, case.tensors())


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
    compare_all(case, on_host, made)


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
    compare_all(case, on_host, made)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_head", [8, 64])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_can_be_asked_for_alone(on_host, operator, per_head, dtype):
    case = Case(operator, 40, 2, 2, per_head, 15, 7, dtype, glu=True, dropout=0.3)
    made = case.tensors()
    dx, dweight = case.backward(on_host, made)
    only_dx, nothing = case.backward(on_host, made, need_weight=False)
    assert torch.equal(bits(only_dx), bits(dx)) and nothing.numel() == 0
    nothing, only_dweight = case.backward(on_host, made, need_x=False)
    assert torch.equal(bits(only_dweight), bits(dweight)) and nothing.numel() == 0


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
    compare_all(case, on_host, case.tensors())
    light = Case("lightconv", 21, 1, 3, 64, size, size // 2, torch.bfloat16, dropout=0.4)
    compare_all(light, on_host, light.tensors())


@pytest.mark.parametrize("batch", [64, 65, 130])
@pytest.mark.parametrize("heads, per_head, size", [(2, 64, 31), (3, 8, 3), (7, 5, 9)], ids=["band", "short", "tiles"])
def test_lightconv_adds_up_many_slabs(on_host, heads, per_head, size, batch):
    """Up to 64 slabs are added up by the last kernel, more by one before it."""
    case = Case("lightconv", 5, batch, heads, per_head, size, size // 2, torch.bfloat16)
    compare_all(case, on_host, case.tensors())


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**63 - 2], ids=hex)
def test_all_bits_of_the_seed_count(on_host, seed):
    case = Case("dynamicconv", 9, 2, 2, 8, 7, 3, dropout=0.5)
    made = case.tensors() | {"seed": torch.tensor([seed])}
    compare("out", case.forward(on_host, made), case.forward(reference, doubled(made)))


# Strides that take the offset of the second row, or of the second sentence, beyond 2^31 and 2^32 elements.
STRIDES = {"time": (2**31 + 64, 256), "batch": (256, 2**31 + 64), "both": (2**30 + 2**29, 2**31 + 2**29)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_offsets_have_64_bits(on_host, operator, strides, dtype):
    case = Case(operator, 3, 2, 2, 64, 3, 1, dtype)
    made = case.tensors()
    far = {name: Sparse(made[name], (*strides, 1)) for name in ("x", "grad")}
    if case.dynamic:
        far["weight"] = Sparse(made["weight"], (*strides, 8, 1))
    far, made = made | far, doubled(made)
    compare("out", case.forward(on_host, far).values, case.forward(reference, made))
    dx, dweight = case.backward(on_host, far)
    want_dx, want_dweight = case.backward(reference, made)
    compare("dx", dx.values, want_dx)
    compare("dweight", dweight.values if case.dynamic else dweight, want_dweight)


@pytest.mark.parametrize("per_head, size, rows", [(1, 4, 1500), (64, 15, 200), (8, 255, 150)], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_size_is_limited_by_the_height_of_a_grid(on_host, operator, per_head, size, rows):
    """A grid has 2^31 blocks along x, but 65,535 along y and z: here 8, less than there are of anything but taps."""
    low = on_host.on(grid_height=8)
    for steps, batch, heads in ((rows, 1, 1), (3, 20, 1), (3, 1, 20)):
        case = Case(operator, steps, batch, heads, per_head, size, 1, torch.bfloat16)
        made = case.tensors()
        case.forward(low, made)
        case.backward(low, made)


@pytest.mark.parametrize("size", [7, 63, 255, 600])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_device_with_little_shared_memory(on_host, operator, size):
    """Compute capability 7.5: no bfloat16 matrix products, no asynchronous copies, 64 KB of shared memory."""
    case = Case(operator, 20, 1, 2, 128, size, size // 2, torch.float16)
    small = on_host.on(compute_capability=75, shared_at_most=64 * 1024)
    made = case.tensors()
    compare_all(case, small, made)


def test_the_sanitizer_watches_the_tensors(on_host):
    """The guard itself: a weight with one row less than the launcher is told ends the call."""
    case = Case("dynamicconv", 4, 1, 2, 8, 3, 1)
    made = case.tensors()
    with pytest.raises(HostError, match="heap-buffer-overflow"):
        case.forward(on_host, made | {"weight": made["weight"][:-1].clone()})
    # A new process serves the next call.
    compare("out", case.forward(on_host, made), case.forward(reference, doubled(made)))
