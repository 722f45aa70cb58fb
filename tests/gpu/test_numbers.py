"""The operators against a float64 computation of the same numbers, forward and backward."""

import math

import pytest
import torch

from lightconv_plugin import ops

from .calls import (
    CONVOLUTIONS,
    DTYPES,
    LAYOUTS,
    OPERATORS,
    TOLERANCE,
    Arguments,
    Case,
    check,
    drawn,
    drawn_talk,
    grid,
    relative_error,
    talk,
)

every_operator = pytest.mark.parametrize("operator", OPERATORS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.name)
def test_kernels_and_heads(case, device):
    check(case, device)


@pytest.mark.parametrize(
    "case", [*map(drawn, range(300)), *map(drawn_talk, range(80))], ids=lambda case: f"{case.seed}-{case.name}"
)
def test_any_combination(case, device):
    check(case, device)


@every_dtype
@pytest.mark.parametrize("normalize", ops.NORMALIZATIONS)
@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_normalizations(operator, normalize, dtype, device):
    check(Case(operator, 37, 3, 2, 32, 7, 3, dtype, normalize=normalize, dropout=0.2, glu=True), device)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
@every_operator
def test_layouts(operator, dtype, layout, device):
    if operator == "talkconv":
        check(talk(35, 3, 2, 64, 15, 14, dtype, layout=layout), device)
        return
    for glu in (False, True):
        check(Case(operator, 35, 3, 2, 64, 15, 14, dtype, layout=layout, glu=glu), device)


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_filters_with_any_strides(operator, device):
    """Filters as expanded, permuted and column-major tensors."""
    arguments = Arguments(Case(operator, 20, 3, 4, 16, 7, 3, torch.float32), device)
    shape = arguments.tensors["weight"].shape
    views = {
        "expanded": torch.randn(shape[-2:], device=device).expand(shape),
        "taps apart": torch.randn(shape[-1], *shape[:-1], device=device).movedim(0, -1),
        "reversed order": torch.randn(shape[::-1], device=device).permute(*reversed(range(len(shape)))),
    }
    for layout, weight in views.items():
        arguments.set(weight=weight)
        want = arguments.expected()
        for name, ours in arguments.everything().items():
            assert relative_error(ours, want[name]) < 4 * TOLERANCE[torch.float32], layout


@every_operator
@pytest.mark.parametrize(
    ("steps", "batch", "heads", "per_head"),
    [(2, 70_000, 1, 4), (70_000, 2, 1, 4), (3, 2, 70_000, 1), (300_000, 1, 1, 2)],
    ids=["many sentences", "many steps", "many heads", "more steps"],
)
def test_sizes_beyond_the_limits_of_a_grid(operator, steps, batch, heads, per_head, device):
    """A CUDA grid has 65,535 blocks at most in its second and third dimension."""
    size, padding_l = (5, 3) if operator == "talkconv" else (3, 1)
    check(Case(operator, steps, batch, heads, per_head, size, padding_l, torch.float32), device)


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_extreme_weights_stay_finite(operator, device):
    arguments = Arguments(Case(operator, 9, 2, 2, 16, 7, 3, torch.float16), device)
    arguments.set(weight=arguments.tensors["weight"] * 6000)
    want = arguments.expected()
    for name, ours in arguments.everything().items():
        torch.testing.assert_close(ours.cpu().double(), want[name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("per_head", [1, 4, 64])  # one channel a head, vectors of four, the matrix units' in half types
@every_dtype
def test_windows_reach_as_far_as_they_like(dtype, per_head, device):
    arguments = Arguments(talk(3000, 2, 2, per_head, 4, 4, dtype), device)
    left, right = arguments.tensors["offset_left"], arguments.tensors["offset_right"]
    with torch.no_grad():
        left[2990, 0, 0] = math.inf
        left[2000, 1, 1] = 300.25
        right[3, 1, 0] = 500.5
        right[700, 0, 1] = 6e4
        left[1500, 0, 0] = -math.inf
    want = arguments.expected()
    for name, ours in arguments.everything().items():
        assert relative_error(ours, want[name]) <= 4 * TOLERANCE[dtype], name


@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(operator, 5, 0, 2, 8, 3, 2, torch.bfloat16, **options)
            for operator in CONVOLUTIONS
            for options in ({}, {"dropout": 0.5}, {"glu": True})
        ),
        talk(5, 0, 2, 8, 3, 2, torch.bfloat16),
    ],
    ids=lambda case: case.name,
)
def test_empty_batch(case, device):
    arguments = Arguments(case, device)
    results = arguments.everything()
    assert results["out"].shape == (5, 0, 16)
    assert all(results[name].shape[1] == 0 for name in arguments.by_row)
    assert all(not gradient.any() for gradient in results.values())


# ------------------------------------------------------------------------------------------------ steps


def causal():
    """Cases that steps can compute."""
    for dtype in DTYPES.values():
        for size in (1, 2, 4, 7, 31):
            for operator in CONVOLUTIONS:
                for glu in (False, True):
                    yield Case(operator, 23, 3, 2, 32, size, size - 1, dtype, glu=glu, bias=True)
        for left in (0, 1, 3, 7, 31):
            yield talk(23, 3, 2, 32, left, 0, dtype)


@pytest.mark.parametrize("case", list(causal()), ids=lambda case: case.name)
def test_any_chunking_is_the_full_pass(case, device):
    arguments = Arguments(case, device)
    with torch.no_grad():
        whole = arguments.call()
    for chunks in ([1] * 23, [5, 1, 17], [23], [2, 20, 1]):
        state, outputs, first = None, [], 0
        for new in chunks:
            with torch.no_grad():
                out, state = arguments.step(state, arguments.part(slice(first, first + new)))
            outputs.append(out)
            first += new
        assert state.shape == (min(23, case.kernel_size - 1), 3, 64)
        if case.talk:
            assert torch.equal(state, arguments.tensors["x"][23 - len(state) :])
        assert relative_error(torch.cat(outputs), whole.cpu().double()) < 2 * TOLERANCE[case.dtype]


@pytest.mark.parametrize("seen", [0, 2, 6])
@pytest.mark.parametrize("new", [1, 4, 9])
@every_operator
def test_gradients_of_a_step(operator, new, seen, device):
    """Also that for the state, and with dropout."""
    options = {} if operator == "talkconv" else {"glu": True, "dropout": 0.25}
    if operator == "dynamicconv":
        options["renorm_padding"] = True
    arguments = Arguments(Case(operator, new, 3, 2, 16, 7, 6, torch.float32, **options), device)
    state = torch.randn(seen, 3, 32, device=device).requires_grad_()
    call, given = arguments.registered("_step", state=state)
    results = call(*given)
    grads = [torch.randn_like(result) for result in results]
    x, *others = arguments.given.values()
    got = (*results, *torch.autograd.grad(results, (x, state, *others), grads))
    want = arguments.reference("_step", state=state)
    want += arguments.reference("_step_backward", state=state, grad=grads[0], grad_state=grads[1])
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.shape == theirs.shape, number
        assert relative_error(ours.detach(), theirs) < 4 * TOLERANCE[torch.float32], number


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_reordered_beams_go_on_with_their_own_history(operator, device):
    arguments = Arguments(Case(operator, 12, 4, 2, 16, 5, 4, torch.float32), device)
    order = torch.tensor([2, 0, 0, 3], device=device)
    first, last = arguments.part(slice(6)), arguments.part(slice(6, 12))
    _, state = arguments.step(None, first)
    out, _ = arguments.step(state.index_select(1, order), last)
    both = {
        name: torch.cat([first[name][:, order], last[name]]) if name in arguments.by_row else last[name]
        for name in arguments.tensors
    }
    torch.testing.assert_close(out, arguments.public(both)[6:], rtol=1e-5, atol=1e-5)
