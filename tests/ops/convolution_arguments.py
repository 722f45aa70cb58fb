"""Random arguments for the operators, and one comparison of values and gradients with the oracle."""

import torch

from lightconv_plugin import ops

from . import oracle

OPERATORS = ("lightconv", "dynamicconv")


def arguments(operator, steps, batch, heads, per_head, size, *, glu=False, bias=False, dtype=torch.float64, seed=0):
    """x, weight and bias of an operator, leaves that require gradients; bias None unless asked for."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    channels = heads * per_head
    x = normal(steps, batch, 2 * channels if glu else channels)
    weight = normal(heads, size) if operator.startswith("lightconv") else normal(steps, batch, heads, size)
    return x, weight, normal(channels) if bias else None


def gradients(out, inputs, grad):
    """Gradients of `out` for the inputs that are not None."""
    return torch.autograd.grad(out, [tensor for tensor in inputs if tensor is not None], grad)


def expected(x, weight, bias, padding_l, grad, **options):
    """The oracle's output and gradients, computed in float64 from the same numbers."""
    inputs = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    out = oracle.band(inputs[0], inputs[1], padding_l, bias=inputs[2], **options)
    return out.detach(), gradients(out, inputs, grad.double())


def drawn(seed, weight, p):
    """The oracle's dropout factors for a call made right after torch.manual_seed(seed); None without dropout."""
    if p == 0:
        return None
    torch.manual_seed(seed)
    return oracle.dropout_factors(int(torch.randint(2**63 - 1, (1,))), weight.shape, p)


def check(operator, x, weight, bias, padding_l, *, dropout=0.0, atol=1e-11, **options):
    """Hold the operator's output and all its gradients against the oracle's."""
    factors = drawn(7, weight, dropout)
    torch.manual_seed(7)
    out = getattr(ops, operator)(x, weight, padding_l, bias=bias, dropout=dropout, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    got = gradients(out, (x, weight, bias), grad)
    want, want_gradients = expected(x, weight, bias, padding_l, grad, factors=factors, **options)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol, msg=lambda text: f"out: {text}")
    for name, ours, theirs in zip(("x", "weight", "bias"), got, want_gradients, strict=False):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=atol * 10, msg=lambda text: f"d{name}: {text}")  # noqa: B023


def relative_error(got, want):
    """Root mean square of the difference over that of the expected values."""
    return ((got.double() - want).norm() / want.norm()).item()
