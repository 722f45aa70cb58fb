"""lightconv and dynamicconv against the oracle: shapes, options, types, strides."""

import itertools

import pytest
import torch

from lightconv_plugin import ops

from . import oracle
from .convolution_arguments import OPERATORS, arguments, check, expected, gradients, relative_error

pytestmark = pytest.mark.usefixtures("backend")

# The other sizes go round while T, K and padding_l take every combination.
_OTHERS = itertools.cycle(itertools.product((1, 3), (1, 2, 4), (1, 3, 8)))
SHAPES = [
    pytest.param(steps, *next(_OTHERS), size, padding_l, id=f"T{steps}-K{size}-P{padding_l}")
    for steps in (1, 2, 5, 17, 40)
    for size in (1, 2, 3, 4, 7, 8, 31, 33)
    for padding_l in sorted({0, size // 2, (size - 1) // 2, size - 1})
]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("steps", "batch", "heads", "per_head", "size", "padding_l"), SHAPES)
def test_every_shape(operator, steps, batch, heads, per_head, size, padding_l):
    x, weight, bias = arguments(operator, steps, batch, heads, per_head, size, bias=True)
    check(operator, x, weight, bias, padding_l)


# As many heads as the papers have, each wider than a vector, and more rows than are walked at once.
@pytest.mark.parametrize("sequences", ["whole", "lengths", "packed"])
@pytest.mark.parametrize(("size", "glu"), [(7, False), (9, False), (15, False), (15, True), (31, False)])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_sixteen_wide_heads(operator, size, glu, sequences):
    options = {
        "whole": {},
        "lengths": {"lengths": torch.tensor([140, 90])},
        "packed": {"cu_seqlens": torch.tensor([0, 3, 130, 140], dtype=torch.int32)},
    }[sequences]
    batch = 1 if "cu_seqlens" in options else 2
    x, weight, bias = arguments(operator, 140, batch, 16, 9, size, glu=glu, bias=True)
    check(operator, x, weight, bias, size // 2, glu=glu, dropout=0.2, **options)


SEQUENCES = {
    "whole": {},
    "lengths": {"lengths": torch.tensor([9, 0, 4])},
    "lengths-int32": {"lengths": torch.tensor([1, 9, 6], dtype=torch.int32)},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)},
    "packed-one": {"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)},
}


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("dropout", [0.0, 0.4], ids=["whole", "dropped"])
@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("normalize", ops.NORMALIZATIONS)
@pytest.mark.parametrize("operator", ["lightconv", "dynamicconv", "dynamicconv-renorm"])
def test_every_combination_of_options(operator, normalize, glu, dropout, sequences):
    operator, _, renorm = operator.partition("-")
    options = dict(SEQUENCES[sequences], normalize=normalize, dropout=dropout, glu=glu)
    if renorm:
        options["renorm_padding"] = True
    batch = 1 if "cu_seqlens" in options else 3
    x, weight, bias = arguments(operator, 9, batch, 2, 3, 6, glu=glu, bias=not glu)
    check(operator, x, weight, bias, 4, **options)


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("padding_l", [0, 2, 4])
@pytest.mark.parametrize("operator", ["lightconv", "dynamicconv", "dynamicconv-renorm"])
def test_the_formula_in_plain_loops(operator, padding_l, sequences):
    operator, _, renorm = operator.partition("-")
    options = dict(SEQUENCES[sequences], **({"renorm_padding": True} if renorm else {}))
    x, weight, bias = arguments(operator, 9, 1 if "cu_seqlens" in options else 3, 2, 2, 5, bias=True)
    torch.manual_seed(3)
    out = getattr(ops, operator)(x, weight, padding_l, bias=bias, dropout=0.3, **options)
    torch.manual_seed(3)
    factors = oracle.dropout_factors(int(torch.randint(2**63 - 1, (1,))), weight.shape, 0.3)
    want = oracle.loops(x, weight, padding_l, bias=bias, factors=factors, **options)
    torch.testing.assert_close(out.detach(), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_sequence_shorter_than_the_filter_keeps_the_softmax_over_all_taps(operator):
    # T = 2, K = 5, causal, equal logits: each tap weighs 1/5, however few of them meet the sequence.
    x = torch.tensor([1.0, 10.0]).view(2, 1, 1)
    weight = torch.zeros(1, 5) if operator == "lightconv" else torch.zeros(2, 1, 1, 5)
    out = getattr(ops, operator)(x, weight, 4)
    torch.testing.assert_close(out.flatten(), torch.tensor([1 / 5, 11 / 5]))


def test_renorm_padding_divides_by_the_taps_that_are_there():
    x = torch.tensor([1.0, 10.0]).view(2, 1, 1)
    out = ops.dynamicconv(x, torch.zeros(2, 1, 1, 5), 4, renorm_padding=True)
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 11 / 2]))


def test_renorm_padding_without_any_tap_inside_gives_bias_alone_and_no_gradient():
    x, weight, bias = arguments("dynamicconv", 6, 1, 1, 2, 3, bias=True)
    out = ops.dynamicconv(x, weight, 2, bias=bias, renorm_padding=True, lengths=torch.tensor([2]))
    assert torch.equal(out[4:], bias.expand(2, 1, 2))
    dx, dweight, dbias = gradients(out[4:], (x, weight, bias), torch.ones(2, 1, 2, dtype=torch.float64))
    assert not dx.any() and not dweight.any() and torch.equal(dbias, torch.full((2,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("operator", OPERATORS)
def test_padding_l_half_of_an_even_kernel_reaches_further_to_the_left(operator):
    x = torch.eye(9).unsqueeze(1)[:, :, 4:5]  # a single 1 at t = 4
    shape = (1, 4) if operator == "lightconv" else (9, 1, 1, 4)
    out = getattr(ops, operator)(x, torch.ones(shape), 2, normalize="none")
    assert out.flatten().nonzero().flatten().tolist() == [3, 4, 5, 6]


# ------------------------------------------------------------------------------------------------ types

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_types_are_accurate_to_their_own_rounding(dtype, operator, glu):
    x, weight, bias = arguments(operator, 40, 3, 2, 8, 31, glu=glu, bias=True, dtype=dtype)
    out = getattr(ops, operator)(x, weight, 15, bias=bias, glu=glu)
    grad = torch.randn(out.shape).to(dtype)
    got = gradients(out, (x, weight, bias), grad)
    want, want_gradients = expected(x, weight, bias, 15, grad, glu=glu)
    assert out.dtype == dtype and all(tensor.dtype == dtype for tensor in got)
    assert relative_error(out, want) < TOLERANCE[dtype]
    for name, ours, theirs in zip(("x", "weight", "bias"), got, want_gradients, strict=True):
        assert relative_error(ours, theirs) < TOLERANCE[dtype], f"gradient of {name}"


# The first number of each type to which adding 1 changes nothing.
@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float16, 2048), (torch.bfloat16, 256)], ids=["float16", "bfloat16"]
)
@pytest.mark.parametrize("operator", OPERATORS)
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


@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__.strip("_"))
def test_strided_inputs(layout, operator, glu):
    x, weight, bias = arguments(operator, 7, 3, 2, 4, 5, glu=glu, bias=True)
    strided = layout(x.detach()).requires_grad_()
    assert not strided.is_contiguous() and torch.equal(strided, x)
    check(operator, strided, layout(weight.detach()).requires_grad_(), bias, 2, glu=glu)
    out = getattr(ops, operator)(strided, weight, 2, glu=glu)
    channels = strided[..., :8] if strided.stride(-1) == 1 else strided.contiguous()[..., :8]
    assert out.stride() == torch.empty_like(channels).stride()


@pytest.mark.parametrize("operator", OPERATORS)
def test_expanded_inputs(operator):
    row, weight, _ = arguments(operator, 1, 1, 2, 3, 4)
    if operator == "dynamicconv":
        weight = weight.detach().expand(6, 3, 2, 4).requires_grad_()
    check(operator, row.detach().expand(6, 3, 6).requires_grad_(), weight, None, 3)


@pytest.mark.parametrize("operator", OPERATORS)
def test_expanded_and_transposed_gradients(operator):
    x, weight, bias = arguments(operator, 6, 3, 2, 3, 4, bias=True)
    out = getattr(ops, operator)(x, weight, 2, bias=bias)
    for grad in (torch.ones((), dtype=torch.float64).expand(6, 3, 6), torch.randn(6, 3, 6).double().permute(2, 1, 0)):
        got = torch.autograd.grad(out, (x, weight, bias), grad, retain_graph=True)
        _, want = expected(x, weight, bias, 2, grad)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("operator", OPERATORS)
def test_arguments_are_left_as_they_were(operator):
    x, weight, bias = arguments(operator, 6, 3, 2, 3, 4, glu=True, bias=True, dtype=torch.float32)
    lengths = torch.tensor([6, 2, 0])
    before = [tensor.detach().clone() for tensor in (x, weight, bias, lengths)]
    options = {"renorm_padding": True} if operator == "dynamicconv" else {}
    out = getattr(ops, operator)(x, weight, 2, bias=bias, lengths=lengths, glu=True, dropout=0.2, **options)
    grad = torch.ones_like(out)
    torch.autograd.grad(out, (x, weight, bias), grad)
    assert all(torch.equal(now, then) for now, then in zip((x, weight, bias, lengths), before, strict=True))
    assert torch.equal(grad, torch.ones_like(out))
