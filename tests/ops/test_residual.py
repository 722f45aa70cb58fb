"""ops.dropout_add_layer_norm and ops.relu_dropout: the formulas in float64, with the mask of the definition."""

import pytest
import torch
import torch.nn.functional as F

from lightconv_plugin import ops

from . import oracle
from .operators import numbers_of_threads, pairwise

pytestmark = pytest.mark.usefixtures("backend")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
P, EPS = 0.3, 1e-3


def example(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    draw = [
        torch.randn(size, generator=generator, dtype=torch.float64) for size in (shape, shape, shape[-1:], shape[-1:])
    ]
    return [(number + (place == 1)).to(dtype).requires_grad_() for place, number in enumerate(draw)]


def drawn(shape, p=P):
    """The factors of the dropout that comes next."""
    torch.manual_seed(3)
    factors = oracle.dropout_factors(int(torch.randint(2**63 - 1, (1,))), torch.Size(shape), p)
    torch.manual_seed(3)
    return factors


def formula(x, residual, weight, bias, factors, eps=EPS):
    """Written out: torch's layer norm has its own kernels."""
    total = residual + factors * x
    centred = total - total.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def close(found, want, dtype):
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize(
    "dtype, shape, p",
    pairwise(DTYPES, ((2, 3, 5), (7, 16), (33,), (70, 3, 40), (1, 1030), (4, 1)), (0.0, P)),
    ids=str,
)
def test_the_norm_is_the_formula(dtype, shape, p):
    given = example(shape, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    want = formula(*exact, drawn(shape, p) if p else 1.0)
    found = ops.dropout_add_layer_norm(*given, p, EPS)
    grad = torch.randn(shape, dtype=torch.float64).to(dtype)
    assert found.dtype == dtype and found.is_contiguous()
    close(found, want, dtype)
    gradients = zip(
        torch.autograd.grad(found, given, grad), torch.autograd.grad(want, exact, grad.double()), strict=True
    )
    for ours, theirs in gradients:
        assert ours.dtype == dtype
        close(ours, theirs, dtype)


@pytest.mark.parametrize(
    "dtype, shape, p", pairwise(DTYPES, ((), (5,), (7, 3, 5), (0, 4), (3, 2100)), (1e-9, P, 0.999)), ids=str
)
def test_the_relu_is_the_formula(dtype, shape, p):
    x = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
    factors = drawn(shape, p)
    found = ops.relu_dropout(x, p)
    grad = torch.randn(shape, dtype=torch.float64).to(dtype)
    (dx,) = torch.autograd.grad(found, x, grad)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12}.get(dtype, 1e-2)
    for ours, source in ((found, x.detach()), (dx, grad)):
        want = (source.double() * (x.detach() > 0) * factors).to(dtype)
        torch.testing.assert_close(ours.detach(), want, rtol=tolerance, atol=0)


def test_relu_without_dropout_and_with_nan():
    x = torch.tensor([-1.0, 0.0, 2.0, torch.nan], requires_grad=True)
    torch.testing.assert_close(ops.relu_dropout(x, 0.0), x.relu(), equal_nan=True)
    out = ops.relu_dropout(x.repeat(100), P)
    assert out.view(100, 4)[:, :2].eq(0).all()
    kept = out.view(100, 4)[:, 3]
    assert kept.isnan().any() and kept[~kept.isnan()].eq(0).all() and not kept.isnan().all()


def test_rows_with_a_large_mean_keep_their_digits():
    x, residual = torch.zeros(4, 64), 10_000 + torch.arange(256).view(4, 64) % 3
    found = ops.dropout_add_layer_norm(x, residual.float(), torch.ones(64), torch.zeros(64))
    want = F.layer_norm(residual.double(), (64,))
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)


def test_gradients_that_are_not_wanted():
    for wanted in range(1, 16):
        given = [t.detach().requires_grad_(bool(wanted >> n & 1)) for n, t in enumerate(example((6, 8)))]
        leaves = [tensor for tensor in given if tensor.requires_grad]
        found = torch.autograd.grad(ops.dropout_add_layer_norm(*given).square().sum(), leaves)
        want = torch.autograd.grad(formula(*given, 1.0, 1e-5).square().sum(), leaves)
        for ours, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_any_strides_take_the_mask_of_their_logical_order():
    x, residual, weight, bias = (tensor.detach() for tensor in example((6, 4, 10)))
    factors = drawn(x.shape)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    spread = torch.stack([residual, residual], -1)[..., 0].requires_grad_()
    wide = torch.stack([weight, weight], 1)[:, 0].requires_grad_()
    expanded = bias[:1].expand(10).requires_grad_()
    found = ops.dropout_add_layer_norm(turned, spread, wide, expanded, P, EPS)
    leaves = [tensor.detach().requires_grad_() for tensor in (x, residual, weight, expanded)]
    want = formula(*leaves, factors)
    torch.testing.assert_close(found, want)
    grad = torch.randn(10, 4, 6, dtype=torch.float64).transpose(0, 2)
    ours = torch.autograd.grad(found, (turned, spread, wide, expanded), grad)
    for one, other in zip(ours, torch.autograd.grad(want, leaves, grad), strict=True):
        torch.testing.assert_close(one, other)
    drawn(x.shape)
    torch.testing.assert_close(ops.relu_dropout(turned, P), x.relu() * factors)
    for p in (0.0, P):
        assert ops.relu_dropout(turned, p).is_contiguous()


def test_threads_do_not_show():
    given = [tensor.detach().float().requires_grad_() for tensor in example((500, 40))]
    results = []
    for _ in numbers_of_threads(1, 2, 3):
        torch.manual_seed(3)
        out = ops.dropout_add_layer_norm(*given, P)
        relu = ops.relu_dropout(given[0], P)
        results.append((out.detach(), relu.detach(), *torch.autograd.grad((out + relu).square().sum(), given)))
    assert all(torch.equal(one, other) for result in results for one, other in zip(results[0], result, strict=True))


def test_a_dropped_infinity_and_nothing():
    none = torch.zeros(0, 8, requires_grad=True)
    out = ops.dropout_add_layer_norm(none, torch.zeros(0, 8), torch.ones(8, requires_grad=True), torch.zeros(8), P)
    out.sum().backward()
    assert out.shape == none.grad.shape == (0, 8)


X, C = torch.zeros(2, 3, 5), torch.zeros(5)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((X, X[0], C, C), ValueError, r"residual must have the shape \(2, 3, 5\), got \(3, 5\)"),
        ((X, X, C[:3], C), ValueError, r"weight must have the shape \(5,\), got \(3,\)"),
        ((X, X, C, None), TypeError, "bias must be"),
        ((X, X.double(), C, C), TypeError, "residual must have x's dtype"),
        ((X.long(), X, C, C), TypeError, "x must"),
        ((X[0, 0, 0], X[0, 0, 0], C, C), ValueError, r"x must have the shape \(…, C\) with C >= 1"),
        ((X, X, C, C, 1.0), ValueError, "p must satisfy"),
        ((X, X, C, C, 0.1, 0.0), ValueError, "eps must be above 0"),
        ((X, X, C, C, 0.1, "small"), TypeError, "eps must be a float"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        ops.dropout_add_layer_norm(*arguments)
    with pytest.raises(ValueError, match="p must satisfy"):
        ops.relu_dropout(X, -0.1)


def test_torchs_machinery():
    given, seed = [tensor.detach().float().requires_grad_() for tensor in example((6, 9))], torch.tensor([5])
    norm = torch.ops.lightconv.dropout_add_norm.default
    torch.library.opcheck(norm, (*given, seed, P, EPS))
    torch.library.opcheck(norm, (*given, None, 0.0, EPS))
    torch.library.opcheck(torch.ops.lightconv.relu_dropout.default, (given[0], seed, P))
    want = formula(*given, 1.0)
    compiled = torch.compile(ops.dropout_add_layer_norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given, 0.0, EPS), want)
    gradient = torch.func.grad(lambda x: ops.dropout_add_layer_norm(x, *given[1:], 0.0, EPS).square().sum())
    (exact,) = torch.autograd.grad(want.square().sum(), given[0])
    torch.testing.assert_close(gradient(given[0].detach()), exact, rtol=1e-4, atol=1e-5)
    per_row = torch.func.vmap(lambda x, r: ops.dropout_add_layer_norm(x, r, *given[2:], 0.0, EPS))
    torch.testing.assert_close(per_row(*given[:2]), want)
    relu = torch.func.grad(lambda x: ops.relu_dropout(x, P).sum())(given[0].detach())
    assert relu.unique().numel() == 2
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: ops.relu_dropout(x, P), (given[0].detach(),), (given[0].detach(),))
    (first,) = torch.autograd.grad(ops.relu_dropout(given[0], P).sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"first-order|does not require grad"):
        first.sum().backward()
