"""talkconv against three independent oracles: shapes, windows, sequences, types, strides, long sequences."""

import itertools

import pytest
import torch

from lightconv_plugin import ops

from .talk_oracle import arguments, band, check, gradients, published, relative_error, taps

pytestmark = pytest.mark.usefixtures("backend")

# The other sizes go round while T and the reaches take every combination.
_OTHERS = itertools.cycle(itertools.product((1, 3), (1, 2, 4), (1, 3, 8, 17)))
SHAPES = [
    pytest.param(steps, *next(_OTHERS), left, right, id=f"T{steps}-L{left}-R{right}")
    for steps in (1, 2, 3, 7, 16, 17, 40)
    for left, right in ((0, 0), (1, 0), (0, 1), (3, 3), (7, 0), (2, 9), (15, 15), (63, 40))
]


@pytest.mark.parametrize(("steps", "batch", "heads", "per_head", "left", "right"), SHAPES)
def test_every_shape(steps, batch, heads, per_head, left, right):
    check(*arguments(steps, batch, heads, per_head, left, right), left, right)


@pytest.mark.parametrize("most", [1.25, 2.0, 3.5, 40.0])
@pytest.mark.parametrize(("left", "right"), [(1, 1), (5, 0), (4, 9), (15, 15)])
def test_offsets_beyond_one(left, right, most):
    # After a dropout of one half they reach 2; nothing forbids more.
    for seed in range(3):
        check(*arguments(50, 2, 2, 3, left, right, most=most, seed=seed), left, right)


def test_a_few_windows_that_reach_far_among_many_that_do_not():
    x, left, right = arguments(300, 2, 3, 2, 4, 4)
    for t, offset in ((0, 30.0), (10, 7.3), (140, 33.0), (299, 80.0)):
        left.data[t, t % 2, t % 3], right.data[299 - t, 1, 2] = offset, offset + 0.11
    check(x, left, right, 4, 4)


def test_more_rows_than_a_tile_has():
    check(*arguments(700, 1, 2, 4, 15, 15), 15, 15)
    check(*arguments(600, 1, 1, 3, 200, 90), 200, 90)


SEQUENCES = {
    "whole": {},
    "lengths": {"lengths": torch.tensor([9, 0, 4])},
    "lengths-int32": {"lengths": torch.tensor([1, 9, 6], dtype=torch.int32)},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)},
    "packed-one": {"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)},
}


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (0, 2), (3, 4), (20, 20)])
@pytest.mark.parametrize("most", [1.0, 3.0])
def test_sequences(sequences, left, right, most):
    options = SEQUENCES[sequences]
    batch = 1 if "cu_seqlens" in options else 3
    check(*arguments(9, batch, 2, 3, left, right, most=most), left, right, **options)


@pytest.mark.parametrize("most", [1.0, 2.5])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (1, 0), (4, 0), (3, 5), (15, 15), (50, 50)])
@pytest.mark.parametrize("steps", [1, 2, 9, 33])
def test_the_formula_of_the_paper(steps, left, right, most):
    x, offset_left, offset_right = arguments(steps, 2, 3, 2, left, right, most=most)
    want = published(x.detach(), offset_left.detach(), offset_right, left, right)
    out = ops.talkconv(x, offset_left, offset_right, left, right)
    torch.testing.assert_close(out.detach(), want.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(band(x, offset_left, offset_right, left, right).detach(), want.detach())


def test_by_hand():
    # Row 2 of 1, 10, 100, 1000, 10000: half of the second row back, 0.75 of the first row on.
    x = torch.tensor([1.0, 10, 100, 1000, 10000]).view(5, 1, 1)
    left, right = torch.full((5, 1, 1), 0.75), torch.full((5, 1, 1), 0.375)
    out = ops.talkconv(x, left, right, 2, 2)
    torch.testing.assert_close(out[2].item(), (0.5 * 1 + 10 + 100 + 0.75 * 1000) / 5)
    torch.testing.assert_close(ops.talkconv(x, left, None, 2, 0)[2].item(), (0.5 * 1 + 10 + 100) / 3)
    assert torch.equal(ops.talkconv(x, left, None, 0, 0), x)


# ------------------------------------------------------------------------------------------------ special offsets


def test_negative_and_infinite_offsets():
    x, left, right = arguments(40, 2, 2, 3, 3, 3)
    negative = torch.full_like(left, -0.5, requires_grad=True)
    out = ops.talkconv(x, negative, -right, 3, 3)
    torch.testing.assert_close(out, x / 7)
    assert not torch.autograd.grad(out.sum(), negative)[0].any()
    for limit in (1, 3):
        infinite = torch.full_like(left, float("inf"), requires_grad=True)
        out = ops.talkconv(x, infinite, None, limit, 0)
        torch.testing.assert_close(out, x.cumsum(0) / (limit + 1))
        grad = torch.randn_like(x)
        dx, dleft = torch.autograd.grad(out, (x, infinite), grad)
        torch.testing.assert_close(dx, grad.flip(0).cumsum(0).flip(0) / (limit + 1))
        assert not dleft.any()
    assert torch.equal(ops.talkconv(x, infinite, None, 0, 0), x)
    out = ops.talkconv(x, infinite, infinite, 3, 3, lengths=torch.tensor([40, 7]))
    torch.testing.assert_close(out[:, 1], x[:7, 1].sum(0).expand(40, 6) / 7)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_nan_offset_makes_its_own_output_nan_and_nothing_else(side):
    x, left, right = arguments(20, 2, 2, 3, 4, 4)
    clean = ops.talkconv(x, left, right, 4, 4)
    (left if side == "left" else right).data[5, 1, 0] = float("nan")
    out = ops.talkconv(x, left, right, 4, 4)
    there = torch.zeros(20, 2, 6, dtype=torch.bool)
    there[5, 1, :3] = True
    assert torch.equal(out.isnan(), there) and torch.equal(out[~there], clean[~there])
    # In the gradients it counts as 0.
    grad = torch.randn_like(out)
    got = gradients(out, (x, left, right), grad)
    (left if side == "left" else right).data[5, 1, 0] = 0
    for ours, theirs in zip(got, gradients(ops.talkconv(x, left, right, 4, 4), (x, left, right), grad), strict=True):
        assert torch.equal(ours, theirs)
    assert ops.talkconv(x, torch.full_like(left, float("nan")), None, 0, 0).isnan().all()


def test_whole_windows_have_no_gradient_for_the_offsets():
    x, left, right = arguments(12, 1, 2, 2, 4, 4)
    left.data.fill_(0.5)
    right.data.fill_(0.75)
    out = ops.talkconv(x, left, right, 4, 4)
    _, dleft, dright = gradients(out, (x, left, right), torch.randn_like(out))
    assert not dleft.any() and not dright.any()


def test_a_product_that_rounds_to_a_whole_number_of_rows_is_whole():
    # In float32, 1/3 · 3 is 1, although it is 1 + 3e-8 exactly: a fused multiplication and subtraction would read on.
    x, _, _ = arguments(30, 1, 2, 2, 3, 3, dtype=torch.float32)
    x.data[0] = x.data[29] = float("nan")
    offset = torch.full((30, 1, 2), 1 / 3, requires_grad=True)
    assert float(offset.detach()[0, 0, 0].double()) * 3 > 1
    out = ops.talkconv(x, offset, offset, 3, 3)
    assert out[2:28].isfinite().all() and out[:2].isnan().all() and out[28:].isnan().all()
    (doffset,) = torch.autograd.grad(out, offset, torch.ones_like(out))
    assert not doffset.any()


# ------------------------------------------------------------------------------------------------ types, long sequences

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("per_head", [1, 5, 16, 40])
def test_types_are_accurate_to_their_own_rounding(dtype, per_head):
    x, left, right = arguments(150, 3, 2, per_head, 15, 15, most=1.3, dtype=dtype)
    out = ops.talkconv(x, left, right, 15, 15)
    grad = torch.randn(out.shape).to(dtype)
    got = gradients(out, (x, left, right), grad)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, left, right)]
    want = band(*wide, 15, 15)
    assert out.dtype == dtype and all(tensor.dtype == dtype for tensor in got)
    assert relative_error(out, want.detach()) < TOLERANCE[dtype]
    for name, ours, theirs in zip(
        ("x", "offset_left", "offset_right"), got, gradients(want, wide, grad.double()), strict=True
    ):
        assert relative_error(ours, theirs) < TOLERANCE[dtype], f"gradient of {name}"


# The first number of each type to which adding 1 changes nothing.
@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float16, 2048), (torch.bfloat16, 256)], ids=["float16", "bfloat16"]
)
def test_sums_are_not_kept_in_half_precision(dtype, large):
    column = torch.tensor([large] + [1] * 16, dtype=dtype).view(17, 1, 1)
    x, offset = column.clone().requires_grad_(), torch.zeros(17, 1, 1, dtype=dtype)
    offset[16] = 1  # one window over all, the others of one row
    out = ops.talkconv(x, offset, None, 16, 0)
    assert out[16].item() == (torch.tensor((large + 16) / 17)).to(dtype)
    (dx,) = torch.autograd.grad(ops.talkconv(x, torch.ones_like(offset), None, 16, 0), x, column)
    assert dx[0].item() == (torch.tensor((large + 16) / 17)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_long_sequences_keep_fractions_and_cancel_nothing(dtype):
    # 65,536 rows whose mean is not 0: the prefix sums of the paper's formula grow to 6.5e7, and float32 loses the rest;
    # a position near the end in float32 has 7 bits left for its fraction.
    steps, left, right = 65_536, 15, 15
    x, offset_left, offset_right = (
        tensor.detach() for tensor in arguments(steps, 1, 2, 2, left, right, dtype=torch.float32)
    )
    x += 1000
    x, offset_left, offset_right = x.to(dtype), offset_left.to(dtype), offset_right.to(dtype)
    want = taps(x, offset_left, offset_right, left, right, 16)
    out = ops.talkconv(x, offset_left, offset_right, left, right)
    bound = 3e-7 if dtype == torch.float32 else 4e-3
    error = ((out.double() - want) / want).abs()
    assert error.max() < bound and error[-1000:].max() < bound
    if dtype == torch.float32:
        lossy = published(x, offset_left, offset_right, left, right, dtype=torch.float32)
        assert ((lossy - want) / want).abs()[-1000:].max() > 100 * error.max()
        # The last rows have the bits that they would have at the beginning of a sequence (64,000 is a whole block).
        part = ops.talkconv(x[64_000:], offset_left[64_000:], offset_right[64_000:], left, right)
        assert torch.equal(part[16:], out[64_016:])


def test_the_gradients_of_long_sequences():
    steps = 40_000
    x, left, right = arguments(steps, 1, 1, 2, 7, 7, dtype=torch.float32)
    grad = 1000 + torch.randn(steps, 1, 2)
    dx, dleft, _ = gradients(ops.talkconv(x, left, right, 7, 7), (x, left, right), grad)
    begin = slice(steps - 200, steps)
    wide = [tensor.detach()[begin].double().requires_grad_() for tensor in (x, left, right)]
    want_x, want_left, _ = gradients(band(*wide, 7, 7), wide, grad[begin].double())
    torch.testing.assert_close(dx[begin][20:].double(), want_x[20:], rtol=1e-6, atol=0)
    torch.testing.assert_close(dleft[begin][20:].double(), want_left[20:], rtol=1e-5, atol=1e-2)


def test_a_large_row_does_not_disturb_windows_without_it():
    x, left, right = arguments(64, 1, 2, 3, 3, 3, dtype=torch.float32)
    clean = ops.talkconv(x, left, right, 3, 3)
    dirty = x.detach().clone()
    dirty[30] = 1e30
    out = ops.talkconv(dirty, left, right, 3, 3)
    others = [t for t in range(64) if abs(t - 30) > 3]
    assert torch.equal(out[others], clean[others])


# ------------------------------------------------------------------------------------------------ strides


def _transposed(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _every_second_step(x):
    return x.repeat_interleave(2, 0)[::2]


def _part_of_a_wider_batch(x):
    return torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]]


def _first_channels(x):
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def _channels_apart(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


LAYOUTS = [_transposed, _every_second_step, _part_of_a_wider_batch, _first_channels, _channels_apart]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__.strip("_"))
def test_strided_inputs(layout):
    inputs = arguments(7, 3, 2, 4, 3, 3)
    strided = [layout(tensor.detach()).requires_grad_() for tensor in inputs]
    assert all(not ours.is_contiguous() and torch.equal(ours, tensor) for ours, tensor in zip(strided, inputs))  # noqa: B905
    check(*strided, 3, 3)
    x = strided[0] if strided[0].stride(-1) == 1 else strided[0].contiguous()
    assert ops.talkconv(*strided, 3, 3).stride() == torch.empty_like(x).stride()


def test_expanded_inputs_and_gradients():
    x, left, right = (tensor.detach() for tensor in arguments(1, 1, 2, 3, 4, 4))
    inputs = [x.expand(6, 3, 6), left.expand(6, 3, 2), right.expand(6, 3, 2)]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    check(*inputs, 4, 4)
    out, want = ops.talkconv(*inputs, 4, 4), band(*inputs, 4, 4)
    for grad in (torch.ones((), dtype=torch.float64).expand(6, 3, 6), torch.randn(6, 3, 6).double().permute(2, 1, 0)):
        got = torch.autograd.grad(out, inputs, grad, retain_graph=True)
        for ours, theirs in zip(got, torch.autograd.grad(want, inputs, grad, retain_graph=True), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_arguments_are_left_as_they_were():
    inputs = arguments(6, 3, 2, 3, 4, 4, dtype=torch.float32)
    lengths = torch.tensor([6, 2, 0])
    before = [tensor.detach().clone() for tensor in (*inputs, lengths)]
    out = ops.talkconv(*inputs, 4, 4, lengths=lengths)
    grad = torch.ones_like(out)
    gradients(out, inputs, grad)
    assert all(torch.equal(now, then) for now, then in zip((*inputs, lengths), before, strict=True))
    assert torch.equal(grad, torch.ones_like(out))
