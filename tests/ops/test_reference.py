"""The operators against the oracle: shapes, options, types, strides, long sequences."""

import itertools

import pytest
import torch

from lightconv_plugin import ops

from . import oracle
from .operators import CONVOLUTIONS, KINDS, OPERATORS, pairwise, random_call, relative_error

pytestmark = pytest.mark.usefixtures("backend")
every_operator = pytest.mark.parametrize("operator", OPERATORS)

# The other sizes go round while T and the reaches take every combination.
_OTHERS = itertools.cycle(itertools.product((1, 3), (1, 2, 4), (1, 3, 8, 17)))
_FILTERS = [
    (padding_l, size - 1 - padding_l)
    for size in (1, 2, 3, 4, 7, 8, 31, 33)
    for padding_l in sorted({0, size // 2, (size - 1) // 2, size - 1})
]
_WINDOWS = [(0, 0), (1, 0), (0, 1), (3, 3), (7, 0), (2, 9), (15, 15), (63, 40)]
SHAPES = [
    pytest.param(operator, steps, *next(_OTHERS), left, right, id=f"{operator}-T{steps}-L{left}-R{right}")
    for operator, steps, (left, right) in [
        *itertools.product(CONVOLUTIONS, (1, 2, 5, 17, 40), _FILTERS),
        *itertools.product(["talkconv"], (1, 2, 3, 7, 16, 17, 40), _WINDOWS),
    ]
]


@pytest.mark.parametrize(("operator", "steps", "batch", "heads", "per_head", "left", "right"), SHAPES)
def test_every_shape(operator, steps, batch, heads, per_head, left, right):
    random_call(operator, steps, batch, heads, per_head, left, right).check()


# As many heads as the papers have, each wider than a vector, and more rows than are walked at once.
@pytest.mark.parametrize(
    "kind, size, sequences",
    pairwise(
        ("lightconv", "lightconv-glu", "dynamicconv", "dynamicconv-glu"), (7, 9, 15, 31), ("whole", "lengths", "packed")
    ),
)
@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_sixteen_wide_heads(kind, size, sequences):
    options = {
        "whole": {},
        "lengths": {"lengths": torch.tensor([140, 90])},
        "packed": {"cu_seqlens": torch.tensor([0, 3, 130, 140], dtype=torch.int32)},
    }[sequences]
    batch = 1 if "cu_seqlens" in options else 2
    random_call(kind, 140, batch, 16, 9, size // 2, (size - 1) // 2).check(dropout=0.2, **options)


SEQUENCES = {
    "whole": {},
    "lengths": {"lengths": torch.tensor([9, 0, 4])},
    "lengths-int32": {"lengths": torch.tensor([1, 9, 6], dtype=torch.int32)},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)},
    "packed-one": {"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)},
}


# Every combination with softmax, which has code of its own, and without; of the other normalisations, which the kernels
# tell apart in one place, every pair of two options.
_CONVOLUTIONS = [kind for kind in KINDS if not kind.startswith("talkconv")]
_OTHER_NORMALIZATIONS = [normalize for normalize in ops.NORMALIZATIONS if normalize not in ("softmax", "none")]
_COMBINATIONS = [
    *itertools.product(_CONVOLUTIONS, ("softmax", "none"), (0.0, 0.4), SEQUENCES),
    *pairwise(_CONVOLUTIONS, _OTHER_NORMALIZATIONS, (0.0, 0.4), SEQUENCES),
]


@pytest.mark.parametrize("kind, normalize, dropout, sequences", _COMBINATIONS)
def test_combinations_of_options(kind, normalize, dropout, sequences):
    options = SEQUENCES[sequences] | {"normalize": normalize}
    batch = 1 if "cu_seqlens" in options else 3
    random_call(kind, 9, batch, 2, 3, 4, 1, bias=not kind.endswith("-glu"), **options).check(dropout=dropout)


@pytest.mark.parametrize(
    "sequences, reach, top", pairwise(SEQUENCES, ((0, 0), (2, 0), (0, 2), (3, 4), (20, 20)), (1.0, 3.0))
)
def test_sequences_of_talkconv(sequences, reach, top):
    options = SEQUENCES[sequences]
    random_call("talkconv", 9, 1 if "cu_seqlens" in options else 3, 2, 3, *reach, top=top, **options).check()


@pytest.mark.parametrize(
    "kind, reach, sequences",
    pairwise(("lightconv", "dynamicconv", "dynamicconv-renorm"), ((0, 4), (2, 2), (4, 0)), SEQUENCES),
)
def test_the_formula_in_plain_loops(kind, reach, sequences):
    call = random_call(kind, 9, 1 if "packed" in sequences else 3, 2, 2, *reach, **SEQUENCES[sequences])
    torch.manual_seed(3)
    out = call(dropout=0.3)
    torch.manual_seed(3)
    factors = oracle.dropout_factors(int(torch.randint(2**63 - 1, (1,))), call.weight.shape, 0.3)
    want = oracle.loops(**call.tensors, **call.options, factors=factors)
    torch.testing.assert_close(out.detach(), want, rtol=0, atol=1e-12)


def test_renorm_padding_without_any_tap_inside_gives_bias_alone_and_no_gradient():
    call = random_call("dynamicconv-renorm", 6, 1, 1, 2, 2)
    out = call(lengths=torch.tensor([2]))
    assert torch.equal(out[4:], call.bias.expand(2, 1, 2))
    gradients = call.gradients(out[4:], torch.ones(2, 1, 2, dtype=torch.float64))
    assert not gradients["x"].any() and not gradients["weight"].any()
    assert torch.equal(gradients["bias"], torch.full((2,), 2.0, dtype=torch.float64))


# ------------------------------------------------------------------------------------------------ talkconv's windows


def talk_tensors(*sizes, most=1.0, **options):
    """x and the offsets of a random call."""
    return (*random_call("talkconv", *sizes, top=most, **options).tensors.values(),)


@pytest.mark.parametrize("top", [1.25, 2.0, 3.5, 40.0])
@pytest.mark.parametrize(("left", "right"), [(1, 1), (5, 0), (4, 9), (15, 15)])
def test_offsets_beyond_one(left, right, top):
    # After a dropout of one half they reach 2; nothing forbids more.
    for seed in range(3):
        random_call("talkconv", 50, 2, 2, 3, left, right, top=top, seed=seed).check()


def test_a_few_windows_that_reach_far_among_many_that_do_not():
    call = random_call("talkconv", 300, 2, 3, 2, 4, 4)
    for t, offset in ((0, 30.0), (10, 7.3), (140, 33.0), (299, 80.0)):
        call.offset_left.data[t, t % 2, t % 3], call.offset_right.data[299 - t, 1, 2] = offset, offset + 0.11
    call.check()


def test_more_rows_than_a_tile_has():
    random_call("talkconv", 700, 1, 2, 4, 15, 15).check()
    random_call("talkconv", 600, 1, 1, 3, 200, 90).check()


@pytest.mark.parametrize(
    "steps, reach, most",
    pairwise((1, 2, 9, 33), ((0, 0), (1, 0), (4, 0), (3, 5), (15, 15), (50, 50)), (1.0, 2.5)),
)
def test_the_formula_of_the_paper(steps, reach, most):
    x, offset_left, offset_right = talk_tensors(steps, 2, 3, 2, *reach, most=most)
    want = oracle.published(x.detach(), offset_left.detach(), offset_right, *reach)
    out = ops.talkconv(x, offset_left, offset_right, *reach)
    torch.testing.assert_close(out.detach(), want.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(oracle.talk(x, offset_left, offset_right, *reach).detach(), want.detach())


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
    x, left, right = talk_tensors(40, 2, 2, 3, 3, 3)
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
    x, left, right = talk_tensors(20, 2, 2, 3, 4, 4)
    clean = ops.talkconv(x, left, right, 4, 4)
    (left if side == "left" else right).data[5, 1, 0] = float("nan")
    out = ops.talkconv(x, left, right, 4, 4)
    there = torch.zeros(20, 2, 6, dtype=torch.bool)
    there[5, 1, :3] = True
    assert torch.equal(out.isnan(), there) and torch.equal(out[~there], clean[~there])
    # In the gradients it counts as 0.
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, left, right), grad)
    (left if side == "left" else right).data[5, 1, 0] = 0
    for ours, theirs in zip(
        got, torch.autograd.grad(ops.talkconv(x, left, right, 4, 4), (x, left, right), grad), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert ops.talkconv(x, torch.full_like(left, float("nan")), None, 0, 0).isnan().all()


def test_whole_windows_have_no_gradient_for_the_offsets():
    x, left, right = talk_tensors(12, 1, 2, 2, 4, 4)
    left.data.fill_(0.5)
    right.data.fill_(0.75)
    out = ops.talkconv(x, left, right, 4, 4)
    _, dleft, dright = torch.autograd.grad(out, (x, left, right), torch.randn_like(out))
    assert not dleft.any() and not dright.any()


def test_a_product_that_rounds_to_a_whole_number_of_rows_is_whole():
    # In float32, 1/3 · 3 is 1, although it is 1 + 3e-8 exactly: a fused multiplication and subtraction would read on.
    x, _, _ = talk_tensors(30, 1, 2, 2, 3, 3, dtype=torch.float32)
    x.data[0] = x.data[29] = float("nan")
    offset = torch.full((30, 1, 2), 1 / 3, requires_grad=True)
    assert float(offset.detach()[0, 0, 0].double()) * 3 > 1
    out = ops.talkconv(x, offset, offset, 3, 3)
    assert out[2:28].isfinite().all() and out[:2].isnan().all() and out[28:].isnan().all()
    (doffset,) = torch.autograd.grad(out, offset, torch.ones_like(out))
    assert not doffset.any()


# ------------------------------------------------------------------------------------------------ types, long sequences

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize(
    "dtype, kind, per_head",
    pairwise(
        TOLERANCE, ("lightconv", "lightconv-glu", "dynamicconv", "dynamicconv-glu", "talkconv"), (1, 5, 8, 16, 40)
    ),
)
def test_types_are_accurate_to_their_own_rounding(dtype, kind, per_head):
    call = random_call(kind, 150, 3, 2, per_head, 15, 15, dtype=dtype, **({"top": 1.3} if kind == "talkconv" else {}))
    grad = call.randn_like_out()
    want = call.expected(grad)
    for name, ours in call.everything(grad).items():
        tolerance = 6e-3 if dtype == torch.bfloat16 and kind != "talkconv" else TOLERANCE[dtype]
        assert ours.dtype == dtype and relative_error(ours, want[name]) < tolerance, name


# The first number of each type to which adding 1 changes nothing.
LARGE = pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float16, 2048), (torch.bfloat16, 256)], ids=["float16", "bfloat16"]
)


@LARGE
@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_sums_are_not_kept_in_half_precision(operator, dtype, large):
    column = torch.tensor([large] + [1] * 8, dtype=dtype).view(9, 1, 1)
    weight = torch.ones((1, 9) if operator == "lightconv" else (9, 1, 1, 9), dtype=dtype)
    x = column.clone().requires_grad_()
    out = getattr(ops, operator)(x, weight, 0, normalize="none")
    assert out[0].item() == large + 8
    (dx,) = torch.autograd.grad(out, x, column)
    assert dx[8].item() == large + 8
    weight = torch.zeros((1, 1), dtype=dtype, requires_grad=True)
    ops.lightconv(column, weight, 0, normalize="none").backward(torch.ones_like(column))
    assert weight.grad.item() == large + 8


@LARGE
def test_sums_of_talkconv_are_not_kept_in_half_precision(dtype, large):
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
        tensor.detach() for tensor in talk_tensors(steps, 1, 2, 2, left, right, dtype=torch.float32)
    )
    x += 1000
    x, offset_left, offset_right = x.to(dtype), offset_left.to(dtype), offset_right.to(dtype)
    want = oracle.shifts(x, offset_left, offset_right, left, right, 16)
    out = ops.talkconv(x, offset_left, offset_right, left, right)
    bound = 3e-7 if dtype == torch.float32 else 4e-3
    error = ((out.double() - want) / want).abs()
    assert error.max() < bound and error[-1000:].max() < bound
    if dtype == torch.float32:
        lossy = oracle.published(x, offset_left, offset_right, left, right, dtype=torch.float32)
        assert ((lossy - want) / want).abs()[-1000:].max() > 100 * error.max()
        # The last rows have the bits that they would have at the beginning of a sequence (64,000 is a whole block).
        part = ops.talkconv(x[64_000:], offset_left[64_000:], offset_right[64_000:], left, right)
        assert torch.equal(part[16:], out[64_016:])


def test_the_gradients_of_long_sequences():
    steps = 40_000
    x, left, right = talk_tensors(steps, 1, 1, 2, 7, 7, dtype=torch.float32)
    grad = 1000 + torch.randn(steps, 1, 2)
    dx, dleft, _ = torch.autograd.grad(ops.talkconv(x, left, right, 7, 7), (x, left, right), grad)
    begin = slice(steps - 200, steps)
    wide = [tensor.detach()[begin].double().requires_grad_() for tensor in (x, left, right)]
    want_x, want_left, _ = torch.autograd.grad(oracle.talk(*wide, 7, 7), wide, grad[begin].double())
    torch.testing.assert_close(dx[begin][20:].double(), want_x[20:], rtol=1e-6, atol=0)
    torch.testing.assert_close(dleft[begin][20:].double(), want_left[20:], rtol=1e-5, atol=1e-2)


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


@pytest.mark.parametrize("kind", ["lightconv", "lightconv-glu", "dynamicconv", "dynamicconv-glu", "talkconv"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__.strip("_"))
def test_strided_inputs(layout, kind):
    dense = random_call(kind, 7, 3, 2, 4, 2, 2)
    strided = dense.replace(**{name: layout(tensor) for name, tensor in dense.given.items() if name != "bias"})
    for name, tensor in strided.given.items():
        assert torch.equal(tensor, dense.tensors[name]) and (name == "bias" or not tensor.is_contiguous())
    strided.check()
    x = strided.x if strided.x.stride(-1) == 1 else strided.x.contiguous()
    assert strided().stride() == torch.empty_like(x[..., :8]).stride()


@every_operator
def test_expanded_inputs(operator):
    row = (
        random_call(operator, 1, 1, 2, 3, 3, bias=False)
        if operator != "talkconv"
        else random_call(operator, 1, 1, 2, 3, 4, 4)
    )
    tensors = {name: t.expand(6, 3, *t.shape[2:]) for name, t in row.given.items() if t.dim() > 2}
    row.replace(**tensors).check()


@every_operator
def test_expanded_and_transposed_gradients(operator):
    call = random_call(operator, 6, 3, 2, 3, 2, 1)
    out = call()
    for grad in (torch.ones((), dtype=torch.float64).expand(6, 3, 6), torch.randn(6, 3, 6).double().permute(2, 1, 0)):
        got = dict(
            zip(call.given, torch.autograd.grad(out, [*call.given.values()], grad, retain_graph=True), strict=True)
        )
        want = call.expected(grad)
        for name, ours in got.items():
            torch.testing.assert_close(ours, want[name], rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_left_as_they_were(kind):
    call = random_call(kind, 6, 3, 2, 3, 2, 1, dtype=torch.float32, lengths=torch.tensor([6, 2, 0]))
    given = [*call.given.values(), call.options["lengths"]]
    before = [tensor.detach().clone() for tensor in given]
    grad = torch.ones(6, 3, 6)
    call.everything(grad, **({} if call.operator == "talkconv" else {"dropout": 0.2}))
    assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))
    assert torch.equal(grad, torch.ones_like(grad))
