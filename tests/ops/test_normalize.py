"""The normalisations of a filter: their formulas, their gradients, filters of zeros."""

import pytest
import torch

from lightconv_plugin import ops
from lightconv_plugin.ops.normalize import EPSILON, normalize, normalize_backward

FORMULAS = {
    "softmax": lambda w: torch.softmax(w, 0),
    "none": lambda w: w,
    "l2": lambda w: w / ((w**2).sum(0).sqrt() + EPSILON),
    "abs_l2": lambda w: w.abs() / ((w**2).sum(0).sqrt() + EPSILON),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "l1": lambda w: w / (w.abs().sum(0) + EPSILON),
    "abs": torch.abs,
    "square": lambda w: w**2,
}


def test_all_are_here():
    assert set(FORMULAS) == set(ops.NORMALIZATIONS)
    assert ops.NORMALIZATIONS[0] == "softmax"


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("kind", FORMULAS)
def test_formula_and_gradient(kind, size):
    weight = torch.randn(size, 3, 5, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(size, 3, 5, dtype=torch.float64)
    want = FORMULAS[kind](weight)
    got = normalize(weight.detach(), kind)
    torch.testing.assert_close(got, want.detach(), rtol=1e-13, atol=1e-15)
    (want_gradient,) = torch.autograd.grad(want, weight, grad)
    torch.testing.assert_close(
        normalize_backward(grad, weight.detach(), got, kind), want_gradient, rtol=1e-11, atol=1e-13
    )


@pytest.mark.parametrize("kind", FORMULAS)
def test_arguments_are_left_as_they_were(kind):
    weight, grad = torch.randn(4, 6), torch.randn(4, 6)
    weight_before, grad_before = weight.clone(), grad.clone()
    normalize_backward(grad, weight, normalize(weight, kind), kind)
    assert torch.equal(weight, weight_before) and torch.equal(grad, grad_before)


@pytest.mark.parametrize("kind", FORMULAS)
def test_a_filter_of_zeros_is_finite_forward_and_backward(kind):
    weight = torch.zeros(4, 2)
    got = normalize(weight, kind)
    assert got.isfinite().all()
    assert normalize_backward(torch.ones(4, 2), weight, got, kind).isfinite().all()


@pytest.mark.parametrize("operator", ["lightconv", "dynamicconv"])
def test_softmax_is_the_default(operator):
    x, weight = torch.randn(4, 2, 6), torch.randn((3, 5) if operator == "lightconv" else (4, 2, 3, 5))
    run = getattr(ops, operator)
    assert torch.equal(run(x, weight, 2), run(x, weight, 2, normalize="softmax"))
