"""talkconv_step: any chunking equals the causal full pass, in values and in gradients."""

import random

import pytest
import torch

from lightconv_plugin import ops

from .talk_oracle import arguments, band, gradients, relative_error

pytestmark = pytest.mark.usefixtures("backend")


def stepwise(x, offset, max_left, chunks, state=None):
    """Feed x in chunks of the given numbers of tokens; return all outputs and the last state."""
    outs, at = [], 0
    for tokens in chunks:
        rows = slice(at, at + tokens)
        out, state = ops.talkconv_step(x[rows], state, offset[rows], max_left)
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


@pytest.mark.parametrize(
    ("steps", "max_left"), [(1, 0), (5, 0), (2, 7), (5, 1), (7, 7), (17, 2), (23, 3), (40, 31), (150, 15)]
)
def test_any_chunking_equals_the_full_pass(steps, max_left):
    x, offset, _ = arguments(steps, 3, 2, 3, max_left, 0)
    grad = torch.randn(steps, 3, 6, dtype=torch.float64)
    want = band(x, offset, None, max_left, 0)
    want_gradients = gradients(want, (x, offset), grad)
    for chunks in ([1] * steps, [steps], *(chunking(steps, seed) for seed in range(4))):
        out, state = stepwise(x, offset, max_left, chunks)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-12, msg=lambda text: f"{chunks}: {text}")  # noqa: B023
        assert state.shape == (min(steps, max_left), 3, 6)
        assert torch.equal(state, x[steps - state.shape[0] :])
        for ours, theirs in zip(gradients(out, (x, offset), grad), want_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    torch.testing.assert_close(ops.talkconv(x, offset, None, max_left, 0), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("per_head", [1, 3, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_steps_round_as_the_full_pass(dtype, per_head):
    x, offset, _ = arguments(60, 2, 2, per_head, 15, 0, dtype=dtype)
    offset.data[::7] = 1  # the whole state
    full = ops.talkconv(x, offset, None, 15, 0)
    for chunks in ([1] * 60, chunking(60, 1), [60]):
        out, state = stepwise(x, offset, 15, chunks)
        assert out.dtype == state.dtype == dtype and torch.equal(state, x[-15:])
        assert relative_error(out, full.detach().double()) < torch.finfo(dtype).eps
        if dtype != torch.float32:
            # Another order of the sum may fall on the other side of a halfway point.
            assert (out != full).float().mean() < 0.02


@pytest.mark.parametrize("rows", range(5))
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_a_state_of_any_number_of_rows(rows, tokens):
    # The last `rows` tokens of a longer past: the same as a sequence that began with them.
    x, offset, _ = arguments(5 + tokens, 2, 2, 3, 4, 0)
    begin = 5 - rows
    out, state = ops.talkconv_step(x[5:], x[begin:5], offset[5:], 4)
    want = ops.talkconv(x[begin:], offset[begin:], None, 4, 0)[rows:]
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    assert torch.equal(state, x[begin:][-4:])


def test_beam_reorder_is_one_index_select():
    x, offset, _ = arguments(12, 4, 2, 3, 5, 0)
    order = torch.tensor([2, 2, 0, 3])
    _, state = stepwise(x[:7], offset[:7], 5, [3, 4])
    out, _ = stepwise(x[7:], offset[7:], 5, [1, 1, 3], state=state.index_select(1, order))
    joined = torch.cat([x[:7].index_select(1, order), x[7:]])
    offsets = torch.cat([offset[:7].index_select(1, order), offset[7:]])
    torch.testing.assert_close(out, ops.talkconv(joined, offsets, None, 5, 0)[7:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 2, 4, 6])
def test_the_state_shares_no_memory_with_the_arguments(tokens):
    x, offset, old = torch.randn(tokens, 2, 6), torch.rand(tokens, 2, 2), torch.randn(4, 2, 6)
    for before in (None, old):
        _, state = ops.talkconv_step(x, before, offset, 4)
        kept, old_kept = state.clone(), old.clone()
        x.add_(1)
        assert torch.equal(state, kept)
        state.zero_()
        assert torch.equal(old, old_kept)


def test_what_is_not_finite_leaves_with_its_row():
    # Prefix sums as a state would keep it for ever.
    x, offset, _ = arguments(20, 1, 2, 2, 3, 0, dtype=torch.float32)
    x.data[5] = float("nan")
    out, state = stepwise(x, offset, 3, [1] * 20)
    assert out[5].isnan().all() and out[9:].isfinite().all() and state.isfinite().all()


@pytest.mark.parametrize(("rows", "tokens"), [(0, 1), (1, 1), (3, 1), (3, 2), (2, 5), (3, 9)])
def test_gradcheck(rows, tokens):
    x, offset, _ = arguments(tokens, 2, 2, 1, 3, 0)
    offset.data = ((offset.data * 3).floor() + 0.1 + 0.8 * (offset.data * 3).frac()) / 3  # away from the kinks
    state = torch.randn(rows, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *inputs: ops.talkconv_step(*inputs, 3), (x, state, offset))


@pytest.mark.parametrize("tokens", [2, 6])
@pytest.mark.parametrize("output", [0, 1], ids=["out", "state"])
def test_gradients_of_one_result_alone(output, tokens):
    x, offset, _ = arguments(tokens, 2, 2, 3, 3, 0)
    offset.data.clamp_(max=0.99)
    state = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    results = ops.talkconv_step(x, state, offset, 3)
    dx, dstate, doffset = torch.autograd.grad(
        results[output].sum(), (x, state, offset), allow_unused=True, materialize_grads=True
    )
    if output == 1:  # the last three rows of the old state and the new rows together
        kept = max(3 - tokens, 0)
        assert dx.sum((1, 2)).tolist() == [0] * max(tokens - 3, 0) + [12] * min(tokens, 3)
        assert dstate.sum((1, 2)).tolist() == [0] * (3 - kept) + [12] * kept and not doffset.any()
    else:
        assert dx.all() and dstate.any() and doffset.any()


def test_gradients_flow_through_the_state_to_earlier_tokens():
    x, offset, _ = arguments(6, 2, 2, 3, 3, 0)
    offset.data.fill_(1)
    out, _ = stepwise(x, offset, 3, [1] * 6)
    (dx,) = torch.autograd.grad(out[5].sum(), x)
    assert not dx[:2].any() and dx[2:].all()


def test_strided_arguments():
    x, offset, _ = arguments(3, 4, 2, 3, 3, 0)
    state = torch.randn(3, 4, 6, dtype=torch.float64)
    want = ops.talkconv_step(x, state, offset, 3)
    for axes in ((0, 1), (0, 2)):
        there = [tensor.transpose(*axes).contiguous().transpose(*axes) for tensor in (x, state, offset)]
        for ours, theirs in zip(ops.talkconv_step(*there, 3), want, strict=True):
            assert torch.equal(ours, theirs)


def test_the_same_bits_for_any_number_of_threads():
    x, offset, _ = arguments(1, 64, 8, 64, 31, 0, dtype=torch.float32)
    state, threads, results = torch.randn(31, 64, 512), torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            out, following = ops.talkconv_step(x, state, offset, 31)
            results.append((out, following, *gradients(out, (x, offset), torch.ones_like(out))))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_empty_batch():
    x, offset, _ = arguments(3, 0, 2, 3, 4, 0)
    out, state = ops.talkconv_step(x, None, offset, 4)
    assert out.shape == (3, 0, 6) and state.shape == (3, 0, 6)
    out, state = ops.talkconv_step(x, state, offset, 4)
    assert out.shape == (3, 0, 6) and state.shape == (4, 0, 6)


def test_an_offset_beyond_the_state_is_refused():
    x, offset, _ = arguments(3, 2, 2, 3, 4, 0)
    offset.data[1, 1, 1] = 1.25
    with pytest.raises(ValueError, match=r"offset_left must not exceed 1 .* max_left = 4 inputs only, got 1\.25"):
        ops.talkconv_step(x, None, offset, 4)
    # What is traced cannot look, and reads what there is.
    out, _ = torch.ops.lightconv.talkconv_step(x, x.detach()[:2], offset, 4)
    want = ops.talkconv(torch.cat([x.detach()[:2], x]), torch.cat([offset[:2], offset]), None, 4, 0)[2:]
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
