"""lightconv_step and dynamicconv_step: any chunking equals the causal full pass, in values and in gradients."""

import random

import pytest
import torch

from lightconv_plugin import ops

from .convolution_arguments import OPERATORS, arguments, expected, gradients, relative_error

pytestmark = pytest.mark.usefixtures("backend")

KINDS = ("lightconv", "dynamicconv", "dynamicconv-renorm")


def options_of(kind):
    operator, _, renorm = kind.partition("-")
    return operator, {"renorm_padding": True} if renorm else {}


def stepwise(operator, x, weight, chunks, state=None, **options):
    """Feed x in chunks of the given numbers of tokens; return all outputs and the last state."""
    outs, at = [], 0
    for tokens in chunks:
        rows = slice(at, at + tokens)
        part = weight if weight.dim() == 2 else weight[rows]
        out, state = getattr(ops, operator + "_step")(x[rows], state, part, **options)
        outs.append(out)
        at += tokens
    assert at == x.shape[0]
    return torch.cat(outs), state


def chunking(steps, seed):
    """A random way of cutting a sequence, from many single tokens to few long pieces."""
    rng, chunks = random.Random(seed), []
    while sum(chunks) < steps:
        chunks.append(rng.randint(1, min(rng.choice((1, 2, 5, steps)), steps - sum(chunks))))
    return chunks


@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize(("steps", "size"), [(1, 1), (5, 1), (2, 7), (5, 31), (7, 7), (17, 2), (23, 4), (40, 31)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_chunking_equals_the_full_pass(kind, steps, size, glu):
    operator, options = options_of(kind)
    x, weight, bias = arguments(operator, steps, 3, 2, 3, size, glu=glu, bias=True)
    grad = torch.randn(steps, 3, 6, dtype=torch.float64)
    want, want_gradients = expected(x, weight, bias, size - 1, grad, glu=glu, **options)
    for chunks in ([1] * steps, [steps], *(chunking(steps, seed) for seed in range(4))):
        out, state = stepwise(operator, x, weight, chunks, bias=bias, glu=glu, **options)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-11, msg=lambda text: f"{chunks}: {text}")  # noqa: B023
        assert state.shape == (min(steps, size - 1), 3, 6)
        for ours, theirs in zip(gradients(out, (x, weight, bias), grad), want_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("normalize", ops.NORMALIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_normalisation(kind, normalize):
    operator, options = options_of(kind)
    x, weight, _ = arguments(operator, 11, 2, 2, 2, 5)
    full = getattr(ops, operator)(x, weight, 4, normalize=normalize, **options)
    out, _ = stepwise(operator, x, weight, [3, 1, 1, 6], normalize=normalize, **options)
    torch.testing.assert_close(out, full, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_state_loses_nothing_to_rounding(operator, dtype):
    # With a GLU the state holds rounded products; a full pass rounds them as well.
    x, weight, _ = arguments(operator, 29, 2, 2, 8, 7, glu=True, dtype=dtype)
    full = getattr(ops, operator)(x, weight, 6, glu=True)
    out, state = stepwise(operator, x, weight, chunking(29, 1), glu=True)
    assert out.dtype == state.dtype == dtype
    # An output may still round the other way where another order of its sum falls just beside a halfway point.
    assert (out != full).float().mean() < 0.02
    assert relative_error(out, full.double()) < torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_state_is_the_last_inputs(operator, glu):
    x, weight, _ = arguments(operator, 9, 2, 2, 3, 5, glu=glu)
    inputs = torch.nn.functional.glu(x) if glu else x
    for chunks, rows in (([1], 1), ([2, 1], 3), ([4], 4), ([3, 2], 4), ([9], 4)):
        steps = sum(chunks)
        part = weight if operator == "lightconv" else weight[:steps]
        _, state = stepwise(operator, x[:steps], part, chunks, glu=glu)
        torch.testing.assert_close(state, inputs[steps - rows : steps])


@pytest.mark.parametrize("rows", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_any_number_of_rows(kind, rows):
    # The last `rows` tokens of a longer past: the same as a sequence that began with them.
    operator, options = options_of(kind)
    x, weight, _ = arguments(operator, 8, 2, 2, 3, 5)
    begin = 5 - rows
    part = weight if operator == "lightconv" else weight[5:]
    out, state = getattr(ops, operator + "_step")(x[5:], x[begin:5], part, **options)
    whole = weight if operator == "lightconv" else weight[begin:]
    want = getattr(ops, operator)(x[begin:], whole, 4, **options)[rows:]
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    assert torch.equal(state, x[max(begin, 4) :])


@pytest.mark.parametrize("kind", KINDS)
def test_beam_reorder_is_one_index_select(kind):
    operator, options = options_of(kind)
    x, weight, _ = arguments(operator, 12, 4, 2, 3, 5)
    order = torch.tensor([2, 2, 0, 3])
    _, state = stepwise(operator, x[:7], weight if operator == "lightconv" else weight[:7], [3, 4], **options)
    state = state.index_select(1, order)
    rest = weight if operator == "lightconv" else weight[7:]
    out, _ = stepwise(operator, x[7:], rest, [1, 1, 3], state=state, **options)
    joined = torch.cat([x[:7].index_select(1, order), x[7:]])
    filters = weight if operator == "lightconv" else torch.cat([weight[:7].index_select(1, order), weight[7:]])
    want = getattr(ops, operator)(joined, filters, 4, **options)[7:]
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 2, 4, 6])
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_state_shares_no_memory_with_the_arguments(operator, tokens):
    x = torch.randn(tokens, 2, 6)
    weight = torch.randn((2, 5) if operator == "lightconv" else (tokens, 2, 2, 5))
    old = torch.randn(4, 2, 6)
    for before in (None, old):
        _, state = getattr(ops, operator + "_step")(x, before, weight)
        kept, old_kept = state.clone(), old.clone()
        x.add_(1)
        assert torch.equal(state, kept)
        state.zero_()
        assert torch.equal(old, old_kept)


@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize(("rows", "tokens"), [(0, 1), (1, 1), (3, 1), (3, 2), (2, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, rows, tokens, glu):
    operator, options = options_of(kind)
    x, weight, bias = arguments(operator, tokens, 2, 2, 1, 4, glu=glu, bias=True)
    state = torch.randn(rows, 2, 2, dtype=torch.float64, requires_grad=True)

    def step(x, state, weight, bias):
        torch.manual_seed(2)
        return getattr(ops, operator + "_step")(x, state, weight, bias=bias, glu=glu, dropout=0.3, **options)

    assert torch.autograd.gradcheck(step, (x, state, weight, bias), fast_mode=True)


@pytest.mark.parametrize("output", [0, 1], ids=["out", "state"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_of_one_result_alone(operator, output):
    x, weight, bias = arguments(operator, 2, 2, 2, 3, 4, bias=True)
    state = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    results = getattr(ops, operator + "_step")(x, state, weight, bias=bias)
    dx, dstate, dweight, dbias = torch.autograd.grad(
        results[output].sum(), (x, state, weight, bias), allow_unused=True, materialize_grads=True
    )
    if output == 1:  # the state is the last row of the old one and the two new rows
        assert (dx == 1).all() and dstate.sum((1, 2)).tolist() == [0, 0, 12]
        assert not dweight.any() and not dbias.any()
    else:
        assert dx.all() and dstate.all() and dweight.any() and (dbias == 4).all()


def test_gradients_flow_through_the_state_to_earlier_tokens():
    x, weight, _ = arguments("lightconv", 6, 2, 2, 3, 4)
    out, _ = stepwise("lightconv", x, weight, [1] * 6)
    (dx,) = torch.autograd.grad(out[5].sum(), x)
    assert not dx[:2].any() and dx[2:].all()


@pytest.mark.parametrize("operator", OPERATORS)
def test_strided_arguments(operator):
    x, weight, _ = arguments(operator, 3, 4, 2, 3, 4)
    state = torch.randn(3, 4, 6, dtype=torch.float64)
    want = getattr(ops, operator + "_step")(x, state, weight)
    for axes in ((0, 1), (0, 2)):
        x_there = x.transpose(*axes).contiguous().transpose(*axes)
        state_there = state.transpose(*axes).contiguous().transpose(*axes)
        got = getattr(ops, operator + "_step")(x_there, state_there, weight)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))


@pytest.mark.parametrize("operator", OPERATORS)
def test_empty_batch(operator):
    x, weight, _ = arguments(operator, 3, 0, 2, 3, 4)
    out, state = getattr(ops, operator + "_step")(x, None, weight)
    assert out.shape == (3, 0, 6) and state.shape == (3, 0, 6)
    out, state = getattr(ops, operator + "_step")(x, state, weight)
    assert out.shape == (3, 0, 6) and state.shape == (3, 0, 6)


@pytest.mark.parametrize("operator", OPERATORS)
def test_dropout_in_a_step_is_that_of_a_full_pass_over_the_same_tokens(operator):
    x, weight, _ = arguments(operator, 5, 2, 2, 3, 4)
    torch.manual_seed(8)
    full = getattr(ops, operator)(x, weight, 3, dropout=0.5)
    torch.manual_seed(8)
    out, _ = getattr(ops, operator + "_step")(x, None, weight, dropout=0.5)
    torch.testing.assert_close(out, full, rtol=0, atol=1e-12)
    assert not torch.equal(out, getattr(ops, operator + "_step")(x, None, weight)[0])
