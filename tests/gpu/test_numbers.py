"""The operators against a float64 computation of the same numbers, forward and backward."""

import pytest
import torch

from lightconv_plugin import ops
from lightconv_plugin.ops import reference

from .convolution_calls import (
    DTYPES,
    LAYOUTS,
    OPERATORS,
    TOLERANCE,
    Arguments,
    Case,
    check,
    drawn,
    grid,
    relative_error,
)


@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.name)
def test_kernels_and_heads(case, device):
    check(case, device)


@pytest.mark.parametrize("case", [drawn(seed) for seed in range(300)], ids=lambda case: case.name)
def test_any_combination(case, device):
    check(case, device)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("normalize", ops.NORMALIZATIONS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_normalizations(operator, normalize, dtype, device):
    check(Case(operator, 37, 3, 2, 32, 7, 3, dtype, normalize=normalize, dropout=0.2, glu=True), device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_layouts(operator, dtype, layout, device):
    for glu in (False, True):
        check(Case(operator, 35, 3, 2, 64, 15, 14, dtype, layout=layout, glu=glu), device)


@pytest.mark.parametrize("operator", OPERATORS)
def test_filters_with_any_strides(operator, device):
    """Filters as expanded, permuted and column-major tensors."""
    arguments = Arguments(Case(operator, 20, 3, 4, 16, 7, 3, torch.float32), device)
    shape = arguments.weight.shape
    views = {
        "expanded": torch.randn(shape[-2:], device=device).expand(shape),
        "taps apart": torch.randn(shape[-1], *shape[:-1], device=device).movedim(0, -1),
        "reversed order": torch.randn(shape[::-1], device=device).permute(*reversed(range(len(shape)))),
    }
    for name, weight in views.items():
        arguments.weight = weight.requires_grad_()
        for ours, theirs in zip(arguments.everything()[:3], arguments.expected()[:3], strict=True):
            assert relative_error(ours, theirs) < 4 * TOLERANCE[torch.float32], name


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("steps", "batch", "heads", "per_head"),
    [(2, 70_000, 1, 4), (70_000, 2, 1, 4), (3, 2, 70_000, 1), (300_000, 1, 1, 2)],
    ids=["many sentences", "many steps", "many heads", "more steps"],
)
def test_sizes_beyond_the_limits_of_a_grid(operator, steps, batch, heads, per_head, device):
    """A CUDA grid has 65,535 blocks at most in its second and third dimension."""
    check(Case(operator, steps, batch, heads, per_head, 3, 1, torch.float32), device)


@pytest.mark.parametrize("operator", OPERATORS)
def test_extreme_weights_stay_finite(operator, device):
    arguments = Arguments(Case(operator, 9, 2, 2, 16, 7, 3, torch.float16), device)
    with torch.no_grad():
        arguments.weight.mul_(6000)
    for ours, theirs in zip(arguments.everything()[:3], arguments.expected()[:3], strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"glu": True}], ids=["plain", "dropout", "glu"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_empty_batch(operator, options, device):
    out, dx, dweight, _ = Arguments(Case(operator, 5, 0, 2, 8, 3, 2, torch.bfloat16, **options), device).everything()
    assert out.shape == (5, 0, 16) and dx.shape[1] == 0 and not dweight.any()


# ------------------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("size", [1, 2, 4, 7, 31])
@pytest.mark.parametrize("operator", OPERATORS)
def test_any_chunking_is_the_full_pass(operator, size, glu, dtype, device):
    arguments = Arguments(Case(operator, 23, 3, 2, 32, size, size - 1, dtype, glu=glu, bias=True), device)
    with torch.no_grad():
        whole = arguments.call()
    step = getattr(ops, operator + "_step")
    for chunks in ([1] * 23, [5, 1, 17], [23], [2, 20, 1]):
        state, outputs, first = None, [], 0
        for new in chunks:
            rows = slice(first, first + new)
            weight = arguments.weight[rows] if arguments.case.dynamic else arguments.weight
            with torch.no_grad():
                out, state = step(arguments.x[rows], state, weight, bias=arguments.bias, glu=glu)
            outputs.append(out)
            first += new
        assert state.shape == (min(23, size - 1), 3, 64)
        assert relative_error(torch.cat(outputs), whole.cpu().double()) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("seen", [0, 2, 6])
@pytest.mark.parametrize("new", [1, 4, 9])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_of_a_step(operator, new, seen, device):
    """Also that for the state, and with dropout."""
    flags = (True, True) if operator == "dynamicconv" else (True,)  # renorm_padding, glu
    arguments = Arguments(Case(operator, new, 3, 2, 16, 7, 6, torch.float32, glu=True), device)
    state = torch.randn(seen, 3, 32, device=device).requires_grad_()
    seed = torch.tensor([77], device=device)
    inputs = (arguments.x, state, arguments.weight)
    out, following = getattr(torch.ops.lightconv, operator + "_step")(*inputs, None, seed, "softmax", 0.25, *flags)
    grads = [torch.randn_like(out), torch.randn_like(following)]
    got = (out, following, *torch.autograd.grad((out, following), inputs, grads))
    x, state, weight = (tensor.detach().cpu().double() for tensor in inputs)
    options = (seed.cpu(), "softmax", 0.25, *flags)
    want = getattr(reference, operator + "_step")(x, state, weight, None, *options)
    wide = [grad.cpu().double() for grad in grads]
    need = (True, True, True)
    want += getattr(reference, operator + "_step_backward")(*wide, x, state, weight, *options, *need)
    for name, ours, theirs in zip(("out", "next", "dx", "dstate", "dweight"), got, want, strict=True):
        assert ours.shape == theirs.shape, name
        assert relative_error(ours.detach(), theirs) < 4 * TOLERANCE[torch.float32], name


@pytest.mark.parametrize("operator", OPERATORS)
def test_reordered_beams_go_on_with_their_own_history(operator, device):
    arguments = Arguments(Case(operator, 12, 4, 2, 16, 5, 4, torch.float32), device)
    step, x, weight = getattr(ops, operator + "_step"), arguments.x.detach(), arguments.weight.detach()
    order = torch.tensor([2, 0, 0, 3], device=device)
    first, last = (weight[:6], weight[6:]) if arguments.case.dynamic else (weight, weight)
    _, state = step(x[:6], None, first)
    out, _ = step(x[6:], state.index_select(1, order), last)
    whole = torch.cat([x[:6, order], x[6:]])
    both = torch.cat([first[:, order], last]) if arguments.case.dynamic else weight
    torch.testing.assert_close(out, getattr(ops, operator)(whole, both, 4)[6:], rtol=1e-5, atol=1e-5)
