"""ops.dropout: the mask of the published definition, its gradient, what it does to torch's machinery."""

import pytest
import torch

from lightconv_plugin import ops

from .operators import numbers_of_threads, pairwise
from .test_residual import drawn

pytestmark = pytest.mark.usefixtures("backend")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize(
    "dtype, shape, p", pairwise(DTYPES, ((), (1,), (7, 3, 5), (0, 4), (33, 65)), (0.1, 0.5, 0.999999999)), ids=str
)
def test_mask_and_gradient_are_those_of_the_definition(dtype, shape, p):
    x = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
    factors = drawn(x.shape, p)
    out = ops.dropout(x, p)
    grad = torch.randn(shape, dtype=torch.float64).to(dtype)
    (dx,) = torch.autograd.grad(out, x, grad)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12}.get(dtype, 1e-2)
    for got, source in ((out.detach(), x.detach()), (dx, grad)):
        # A scale of 1e9 is beyond float16: its infinity is right.
        want = (source.double() * factors).to(dtype)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_and_threads_do_not_show(dtype):
    x = torch.ones(5, 12_345, dtype=dtype)
    factors, results = drawn(x.shape, 0.3), []
    for _ in numbers_of_threads(1, 2, 3):
        torch.manual_seed(3)
        results.append(ops.dropout(x, 0.3))
    assert torch.equal(results[0], factors.to(dtype))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_any_strides_take_the_mask_of_their_logical_order():
    x = torch.randn(6, 4, 10)
    torch.manual_seed(1)
    want = ops.dropout(x, 0.4)
    torch.manual_seed(1)
    got = ops.dropout(x.transpose(0, 2).contiguous().transpose(0, 2), 0.4)
    assert torch.equal(got, want) and got.is_contiguous()


def test_zero_probability_hands_x_back():
    x = torch.randn(3)
    assert ops.dropout(x, 0.0) is x


def test_keeps_the_share_it_promises():
    kept = (ops.dropout(torch.ones(1_000_000), 0.1) > 0).float().mean().item()
    assert abs(kept - 0.9) < 5 * (0.09 / 1e6) ** 0.5


@pytest.mark.parametrize("p", [1.0, -0.1, "x", True, None])
def test_wrong_probabilities(p):
    with pytest.raises((ValueError, TypeError), match="p must"):
        ops.dropout(torch.ones(2), p)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="x must have one of the dtypes"):
        ops.dropout(torch.ones(2, dtype=torch.int64), 0.1)


def test_opcheck_and_compile():
    x = torch.randn(4, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.lightconv.dropout.default, (x, torch.tensor([5]), 0.2))
    compiled = torch.compile(lambda x: ops.dropout(x, 0.2) * 2, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    want = ops.dropout(x, 0.2) * 2
    torch.manual_seed(0)
    assert torch.equal(compiled(x), want)


def test_second_derivatives_are_those_of_a_linear_function():
    torch.manual_seed(0)
    x = torch.randn(9, dtype=torch.float64, requires_grad=True)

    def function(x):
        torch.manual_seed(5)
        return ops.dropout(x, 0.5).square()

    assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)


def test_only_the_seed_is_kept_for_the_backward_pass():
    leaf, kept = torch.randn(5, 7, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        x = leaf.clone()
        out = ops.dropout(x, 0.5)
    x.zero_()
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(grad, torch.where(out == 0, 0.0, 2.0))
    assert [tensor.shape for tensor in kept] == [(1,)]
