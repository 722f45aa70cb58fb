"""The step functions: any chunking equals the causal full pass, in values and in gradients."""

import pytest
import torch

from lightconv_plugin import ops

from .operators import (
    CONVOLUTIONS,
    OPERATORS,
    STEP_KINDS,
    chunking,
    numbers_of_threads,
    pairwise,
    random_call,
    relative_error,
    smooth,
)

pytestmark = pytest.mark.usefixtures("backend")
every_kind = pytest.mark.parametrize("kind", STEP_KINDS)
every_operator = pytest.mark.parametrize("operator", OPERATORS)


def inputs_of(call):
    """What a state holds: x, after the GLU."""
    return torch.nn.functional.glu(call.x) if call.options.get("glu") else call.x


def assert_state(state, call, rows):
    """The state holds the last rows of the inputs, bit by bit where no GLU rounds them in another order."""
    atol = 1e-15 if call.options.get("glu") else 0
    inputs = inputs_of(call)
    torch.testing.assert_close(state, inputs[inputs.shape[0] - rows :], rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("steps", "history"), [(1, 0), (5, 0), (2, 7), (5, 30), (7, 6), (17, 1), (23, 3), (40, 31), (150, 15)]
)
@every_kind
def test_any_chunking_equals_the_full_pass(kind, steps, history):
    call = random_call(kind, steps, 3, 2, 3, history)
    grad = call.randn_like_out()
    want = call.expected(grad)
    torch.testing.assert_close(call(), want["out"], rtol=0, atol=1e-11)
    for chunks in ([1] * steps, [steps], *(chunking(steps, seed) for seed in range(4))):
        out, state = call.stepwise(chunks)
        torch.testing.assert_close(out, want["out"], rtol=0, atol=1e-11, msg=lambda text: f"{chunks}: {text}")  # noqa: B023
        assert state.shape == (min(steps, history), 3, 6)
        assert_state(state, call, min(steps, history))
        for name, ours in call.gradients(out, grad).items():
            torch.testing.assert_close(ours, want[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("normalize", ops.NORMALIZATIONS)
@pytest.mark.parametrize("kind", ["lightconv", "dynamicconv", "dynamicconv-renorm"])
def test_any_normalisation(kind, normalize):
    call = random_call(kind, 11, 2, 2, 2, 4, normalize=normalize)
    out, _ = call.stepwise([3, 1, 1, 6])
    torch.testing.assert_close(out, call(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("per_head", [1, 3, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["lightconv-glu", "dynamicconv-glu", "talkconv"])
def test_the_state_loses_nothing_to_rounding(kind, dtype, per_head):
    # With a GLU the state holds rounded products; a full pass rounds them as well.
    call = random_call(kind, 60, 2, 2, per_head, 15, dtype=dtype)
    if kind == "talkconv":
        call.offset_left.data[::7] = 1  # the whole state
    full = call().detach()
    for chunks in ([1] * 60, chunking(60, 1), [60]):
        out, state = call.stepwise(chunks)
        assert out.dtype == state.dtype == dtype and state.shape[0] == 15
        # An output may still round the other way where another order of its sum falls just beside a halfway point.
        assert relative_error(out, full.double()) < torch.finfo(dtype).eps / (1 if kind == "talkconv" else 4)
        if kind != "talkconv" or dtype != torch.float32:
            assert (out != full).float().mean() < 0.02


@pytest.mark.parametrize("kind, rows, tokens", pairwise(STEP_KINDS, range(5), (1, 3, 7)))
def test_a_state_of_any_number_of_rows(kind, rows, tokens):
    # The last `rows` tokens of a longer past: the same as a sequence that began with them.
    call = random_call(kind, 5 + tokens, 2, 2, 3, 4)
    sequence = call.part(slice(5 - rows, None))
    out, state = call.part(slice(5, None)).step(inputs_of(sequence)[:rows])
    torch.testing.assert_close(out, sequence()[rows:], rtol=0, atol=1e-12)
    assert_state(state, sequence, min(rows + tokens, 4))


@every_kind
def test_beam_reorder_is_one_index_select(kind):
    call = random_call(kind, 12, 4, 2, 3, 5)
    order = torch.tensor([2, 2, 0, 3])
    _, state = call.part(slice(7)).stepwise([3, 4])
    out, _ = call.part(slice(7, None)).stepwise([1, 1, 3], state.index_select(1, order))
    reordered = {name: call.tensors[name].detach().clone() for name in call.by_row if name != "out"}
    for tensor in reordered.values():
        tensor[:7] = tensor[:7].index_select(1, order)
    torch.testing.assert_close(out, call.replace(**reordered)()[7:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 2, 4, 6])
@every_operator
def test_the_state_shares_no_memory_with_the_arguments(operator, tokens):
    call = random_call(operator, tokens, 2, 2, 3, 4, dtype=torch.float32)
    x, old = call.x.detach(), torch.randn(4, 2, 6)
    for before in (None, old):
        _, state = call.step(before)
        kept, old_kept = state.clone(), old.clone()
        x.add_(1)
        assert torch.equal(state, kept)
        state.detach().zero_()
        assert torch.equal(old, old_kept)


def test_what_is_not_finite_leaves_with_its_row():
    # Prefix sums as a state of talkconv's would keep it for ever.
    call = random_call("talkconv", 20, 1, 2, 2, 3, dtype=torch.float32).filled(5, torch.nan)
    out, state = call.stepwise([1] * 20)
    assert out[5].isnan().all() and out[9:].isfinite().all() and state.isfinite().all()


@pytest.mark.parametrize(("rows", "tokens"), [(0, 1), (1, 1), (3, 1), (3, 2), (2, 5), (3, 9)])
@every_kind
def test_gradcheck(kind, rows, tokens):
    call = smooth(random_call(kind, tokens, 2, 2, 1, 3))
    state = torch.randn(rows, 2, 2, dtype=torch.float64, requires_grad=True)
    dropout = {} if kind == "talkconv" else {"dropout": 0.3}

    def step(state, *tensors):
        torch.manual_seed(2)
        given = dict(zip(call.given, tensors, strict=True))
        return type(call)(call.operator, call.tensors | given, call.options).step(state, **dropout)

    assert torch.autograd.gradcheck(step, (state, *call.given.values()), fast_mode=kind != "talkconv")


@pytest.mark.parametrize("tokens", [2, 6])
@pytest.mark.parametrize("output", [0, 1], ids=["out", "state"])
@every_operator
def test_gradients_of_one_result_alone(operator, output, tokens):
    call = random_call(operator, tokens, 2, 2, 3, 3)
    if operator == "talkconv":
        call.offset_left.data.clamp_(max=0.99)
    state = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    results = call.step(state)
    dx, dstate, *others = torch.autograd.grad(
        results[output].sum(),
        (call.x, state, *(tensor for name, tensor in call.given.items() if name != "x")),
        allow_unused=True,
        materialize_grads=True,
    )
    if output == 1:  # the last three rows of the old state and the new rows together
        kept = max(3 - tokens, 0)
        assert dx.sum((1, 2)).tolist() == [0] * max(tokens - 3, 0) + [12] * min(tokens, 3)
        assert dstate.sum((1, 2)).tolist() == [0] * (3 - kept) + [12] * kept
        assert not any(other.any() for other in others)
    else:
        assert dx.all() and dstate.any() and all(other.any() for other in others)
        if operator in CONVOLUTIONS:
            assert dstate.all() and (others[-1] == 2 * tokens).all()  # the bias


@every_operator
def test_strided_arguments(operator):
    call = random_call(operator, 3, 4, 2, 3, 3)
    state = torch.randn(3, 4, 6, dtype=torch.float64)
    want = call.step(state)
    for axes in ((0, 1), (0, 2)):

        def elsewhere(tensor, axes=axes):
            return tensor.transpose(*axes).contiguous().transpose(*axes)

        there = call.replace(**{name: elsewhere(call.tensors[name]) for name in call.by_row if name != "out"})
        for ours, theirs in zip(there.step(elsewhere(state)), want, strict=True):
            assert torch.equal(ours, theirs)


@every_operator
def test_the_same_bits_for_any_number_of_threads(operator):
    call = random_call(operator, 1, 64, 8, 64, 31, dtype=torch.float32)
    state, results = torch.randn(31, 64, 512), []
    for _ in numbers_of_threads(1, 2):
        out, following = call.step(state)
        results.append((out, following, *call.gradients(out, torch.ones_like(out)).values()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@every_operator
def test_empty_batch(operator):
    call = random_call(operator, 3, 0, 2, 3, 4)
    out, state = call.step()
    assert out.shape == (3, 0, 6) and state.shape == (3, 0, 6)
    out, state = call.step(state)
    assert out.shape == (3, 0, 6) and state.shape == (4, 0, 6)


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_dropout_in_a_step_is_that_of_a_full_pass_over_the_same_tokens(operator):
    call = random_call(operator, 5, 2, 2, 3, 3)
    torch.manual_seed(8)
    full = call(dropout=0.5)
    torch.manual_seed(8)
    out, _ = call.step(dropout=0.5)
    torch.testing.assert_close(out, full, rtol=0, atol=1e-12)
    assert not torch.equal(out, call.step()[0])


def test_an_offset_beyond_the_state_is_refused():
    call = random_call("talkconv", 3, 2, 2, 3, 4)
    call.offset_left.data[1, 1, 1] = 1.25
    with pytest.raises(ValueError, match=r"offset_left must not exceed 1 .* max_left = 4 inputs only, got 1\.25"):
        call.step()
    # What is traced cannot look, and reads what there is.
    x, offset = call.x.detach(), call.offset_left.detach()
    out, _ = torch.ops.lightconv.talkconv_step(x, x[:2], offset, 4)
    want = ops.talkconv(torch.cat([x[:2], x]), torch.cat([offset[:2], offset]), None, 4, 0)[2:]
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
