"""What each normalisation makes of weights that are huge, equal, −∞, +∞ or NaN, on every backend, full pass and step.

The answer is torch's in float64. Softmax over nothing but −∞, or with +∞ or NaN, is NaN, as torch's is, and is so in
the filter's own outputs and gradients alone; a tap of −∞ beside others weighs nothing, and has no gradient.
"""

import math

import pytest
import torch

from lightconv_plugin import ops
from tests.ops.test_normalize import FORMULAS

SIZE, PADDING = 4, 3
FILTERS = {
    "large": [1e4, -1e4, 0.0, 1e4],
    "larger-by-one": [9999.0, 1e4, -1e4, 9998.0],
    "equal": [1e4] * 4,
    "equal-negative": [-1e4] * 4,
    "one": [-math.inf, 0.5, -math.inf, -math.inf],
    "some": [0.5, -math.inf, 1.5, -math.inf],
    "none": [-math.inf] * 4,
    "infinite": [0.5, math.inf, 1.0, 2.0],
    "infinities": [math.inf, -math.inf, math.inf, 0.0],
    "nan": [0.5, math.nan, 1.0, 2.0],
}
FINITE = ("large", "larger-by-one", "equal", "equal-negative")


def _arguments(operator, filters, steps=6):
    """x (T, 2, 6), all its rows positive, and the same filter in every place."""
    x = torch.rand(steps, 2, 6, generator=torch.Generator().manual_seed(3)) + 0.5
    weight = torch.tensor(filters)
    return x, weight.expand(2, SIZE).clone() if operator == "lightconv" else weight.expand(steps, 2, 2, SIZE).clone()


def _heads(operator, names, steps=6):
    """x (T, 2, 3 × heads), all its rows positive, and in each head the filter of one name in every place."""
    x = torch.rand(steps, 2, 3 * len(names), generator=torch.Generator().manual_seed(3)) + 0.5
    weight = torch.tensor([FILTERS[name] for name in names])
    return x, weight if operator == "lightconv" else weight.expand(steps, 2, len(names), SIZE).clone()


def _expected(x, taps):
    """Σ_k taps[k] · x[t − PADDING + k] over rows that are there: nothing outside is multiplied."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for k in range(SIZE):
            if t - PADDING + k >= 0:
                out[t] += taps[k] * x[t - PADDING + k].double()
    return out


@pytest.mark.parametrize("normalize", ops.NORMALIZATIONS)
@pytest.mark.parametrize("operator", ["lightconv", "dynamicconv"])
def test_outputs(backend, operator, normalize):
    x, weight = _heads(operator, FILTERS)
    expected = []
    for head, (name, filters) in enumerate(FILTERS.items()):
        taps = FORMULAS[normalize](torch.tensor(filters).double())
        # Whether a tap that is not finite is multiplied by the zeros before the sequence is a backend's own choice.
        first = 0 if taps.isfinite().all() else PADDING
        atol = 1e-6 * taps.nan_to_num(0, 0, 0).abs().max().item() + 1e-30
        channels = slice(3 * head, 3 * head + 3)
        expected.append((name, (slice(first, None), slice(None), channels), _expected(x[..., channels], taps), atol))

    def check(out):
        for name, part, want, atol in expected:
            torch.testing.assert_close(
                out[part].double(), want[part[0]], rtol=2e-6, atol=atol, equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )  # fmt: skip

    check(getattr(ops, operator)(x, weight, PADDING, normalize=normalize))
    state, outs = None, []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = weight if operator == "lightconv" else weight[rows]
        out, state = getattr(ops, operator + "_step")(x[rows], state, part, normalize=normalize)
        outs.append(out)
    check(torch.cat(outs))


@pytest.mark.parametrize("normalize", ops.NORMALIZATIONS)
@pytest.mark.parametrize("operator", ["lightconv", "dynamicconv"])
def test_gradients(backend, operator, normalize):
    # Weights of −∞ have a gradient where what they become is finite.
    names = (*FINITE, "one", "some") if normalize in ("softmax", "sigmoid", "tanh") else FINITE
    x, weight = _heads(operator, names)
    x.requires_grad_(), weight.requires_grad_()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    got = torch.autograd.grad(getattr(ops, operator)(x, weight, PADDING, normalize=normalize), (x, weight), grad)
    # In float64 by autograd: the rows that each position reads, times its normalised filter.
    wide_x, wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    taps = FORMULAS[normalize](wide.movedim(-1, 0)).movedim(0, -1).expand(6, 2, len(names), SIZE)
    padded = torch.cat([wide_x.new_zeros(PADDING, *x.shape[1:]), wide_x]).unfold(0, SIZE, 1).unflatten(2, (-1, 3))
    out = torch.einsum("tbhrk,tbhk->tbhr", padded, taps).flatten(2)
    want = torch.autograd.grad(out, (wide_x, wide), grad.double())

    def by_head(dx, dweight):
        return [*dx.double().unflatten(2, (-1, 3)).unbind(2), *dweight.double().unbind(-2)]

    for name, ours, theirs in zip((*names, *names), by_head(*got), by_head(*want), strict=True):
        limit = 4e-6 * max(theirs.abs().max().item(), 1e-30)
        torch.testing.assert_close(ours, theirs, rtol=4e-6, atol=limit, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("filters", ["none", "infinite", "nan"])
def test_a_filter_that_is_nan_is_so_alone(backend, filters):
    x, weight = _arguments("dynamicconv", [0.1, 0.2, 0.3, 0.4])
    dirty = weight.clone()
    dirty[3, 1, 0] = torch.tensor(FILTERS[filters])
    x.requires_grad_()
    grad, results = torch.randn(x.shape), []
    for filters in (weight, dirty):
        filters.requires_grad_()
        out = ops.dynamicconv(x, filters, PADDING)
        results.append((out, *torch.autograd.grad(out, (x, filters), grad)))
    (clean_out, clean_dx, clean_dweight), (out, dx, dweight) = results
    touched = torch.zeros(6, 2, 6, dtype=torch.bool)
    touched[3, 1, :3] = True
    assert out[touched].isnan().all() and torch.equal(out[~touched], clean_out[~touched])
    touched[0:4, 1, :3] = True
    assert dx[touched].isnan().all() and torch.equal(dx[~touched], clean_dx[~touched])
    touched = torch.zeros(6, 2, 2, dtype=torch.bool)
    touched[3, 1, 0] = True
    assert dweight[touched].isnan().all() and torch.equal(dweight[~touched], clean_dweight[~touched])


@pytest.mark.parametrize(("per_head", "size"), [(1, 2), (2, 2), (16, 2), (2, 20), (16, 20)])
@pytest.mark.parametrize("operator", ["lightconv", "dynamicconv"])
def test_minus_infinity_weighs_nothing_at_all(backend, operator, per_head, size):
    """A row that only such taps meet may be as large as floats are."""
    x = torch.full((2 * size, 1, 2 * per_head), 1.0)
    x[size:] = 3e38
    weight = torch.full((2, size), -math.inf)
    weight[:, 0] = 0.25
    filters = weight if operator == "lightconv" else weight.expand(2 * size, 1, 2, size)
    assert torch.equal(getattr(ops, operator)(x, filters, 0), x)


@pytest.mark.parametrize("normalize", ops.NORMALIZATIONS)
def test_renormalised_over_no_tap_is_nothing_whatever_the_weights(backend, normalize):
    """lengths of 0: no tap of any row meets the sentence."""
    for filters in FILTERS.values():
        x, weight = _arguments("dynamicconv", filters)
        x.requires_grad_(), weight.requires_grad_()
        lengths = torch.tensor([0, 0])
        out = ops.dynamicconv(x, weight, PADDING, normalize=normalize, lengths=lengths, renorm_padding=True)
        dx, dweight = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
        assert not out.any() and not dx.any() and not dweight.any(), filters


def test_renormalised_over_minus_infinity_alone_is_nan(backend):
    """At the first row only the last tap counts: −∞ there is a softmax over nothing but −∞."""
    x, weight = _arguments("dynamicconv", [1.0, 2.0, 3.0, -math.inf])
    out = ops.dynamicconv(x, weight, PADDING, renorm_padding=True)
    assert out[0].isnan().all() and out[1:].isfinite().all()
    torch.testing.assert_close(out[1], x[0])


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4, 6e4, math.inf, -1e4, -math.inf, math.nan])
@pytest.mark.parametrize(("max_left", "max_right"), [(0, 0), (3, 0), (3, 2), (400, 400)])
def test_extreme_offsets(backend, max_left, max_right, offset):
    """Windows of one row, of the whole sequence, or NaN: far beyond any row counts as the sequence's end."""
    x = torch.rand(9, 2, 6, generator=torch.Generator().manual_seed(3)) + 0.5
    left = torch.full((9, 2, 2), offset, requires_grad=True)
    right = torch.full((9, 2, 2), offset, requires_grad=True) if max_right else None
    x.requires_grad_()
    out = ops.talkconv(x, left, right, max_left, max_right)
    rows = torch.arange(9.0).view(-1, 1) - torch.arange(9.0)  # how far a source is to the left
    reach = max(offset, 0.0)
    held = (rows <= reach * max_left if max_left else rows <= 0) & (
        -rows <= reach * max_right if max_right else rows >= 0
    )
    want = torch.einsum("ts,sbc->tbc", held.double(), x.detach().double()) / (max_left + max_right + 1)
    if math.isnan(offset):
        want = torch.full_like(want, math.nan)
    torch.testing.assert_close(out.detach().double(), want, rtol=1e-6, atol=0, equal_nan=True)
    dx, *doffsets = torch.autograd.grad(out, [t for t in (x, left, right) if t is not None], torch.ones_like(out))
    assert dx.isfinite().all() and not any(doffset.any() for doffset in doffsets)
