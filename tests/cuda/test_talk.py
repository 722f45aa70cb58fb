"""talkconv on the host: forward and backward pass, steps, against float64."""

import itertools
import math

import pytest
import torch

from lightconv_plugin.ops import reference

from .convolution_calls import compare, doubled
from .talk_calls import RESULTS, Oracle, TalkCase, check

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REACHES = ((0, 0), (1, 1), (2, 0), (3, 3), (0, 5), (7, 7), (15, 15), (20, 3), (31, 31), (63, 0), (63, 63))
PER_HEAD = (1, 3, 4, 16, 24, 64, 128)


def sizes():
    """Every reach with every number of channels per head; the rest goes round."""
    for i, ((left, right), per_head) in enumerate(itertools.product(REACHES, PER_HEAD)):
        steps = (1, 33, 70, 5, 17, 2, 129, 64)[i % 8]
        heads = (1, 2, 3, 5)[i % 4] if per_head < 64 else (1, 2)[i % 2]
        yield TalkCase(
            steps,
            (1, 2, 3)[i // 2 % 3],
            heads,
            per_head,
            left,
            right,
            DTYPES[(i + i // 7) % 3],
            top=(1, 1, 1.4, 2.5, 6)[i % 5],
            rows=("tbc", "btc", "sliced", "odd")[(i + i // 4) % 4],
            offsets=("plain", "btc", "sliced", "taps_first")[i // 3 % 4],
        )


def options():
    """Sequences of every kind, for narrow and wide heads, on old and new devices."""
    widths = ((4, 8), (2, 64), (5, 3), (2, 72), (6, 1), (1, 16))
    for i, (extra, dtype, reach) in enumerate(
        itertools.product(
            ({"lengths": torch.int64}, {"lengths": torch.int32}, {"packed": True}), DTYPES, ((7, 0), (3, 9), (31, 31))
        )
    ):
        for heads, per_head in (widths[i % 6], (2, 64)):
            packed = extra.get("packed", False)
            yield TalkCase(
                (37, 61, 90)[i % 3],
                1 if packed else (4, 3)[i % 2],
                heads,
                per_head,
                *reach,
                dtype,
                top=(1, 3)[i // 2 % 2],
                rows=("tbc", "btc", "odd", "tbc")[i % 4],
                compute_capability=75 if i % 5 == 4 else 80,
                **extra,
            )


def shapes():
    """What does not fit the tables above."""
    yield TalkCase(300, 1, 2, 8, 31, 31)
    yield TalkCase(300, 1, 1, 64, 31, 31, torch.bfloat16)
    yield TalkCase(5, 40, 3, 4, 3, 3, torch.float16)  # many sentences
    yield TalkCase(9, 2, 64, 1, 4, 3, torch.bfloat16)  # many heads
    yield TalkCase(9, 2, 1, 300, 7, 3)  # one head of a size nobody has
    yield TalkCase(9, 2, 1, 136, 7, 3, torch.float16)
    yield TalkCase(6, 0, 2, 4, 3, 1)  # no sentence at all
    yield TalkCase(25, 2, 2, 8, 7, 3, rows="still")
    yield TalkCase(40, 2, 2, 64, 15, 7, torch.bfloat16, rows="still", offsets="still")
    yield TalkCase(30, 2, 2, 4, 500, 500)  # windows longer than anything that is staged, and than the sequence
    yield TalkCase(30, 2, 1, 64, 500, 2**29, torch.bfloat16)
    yield TalkCase(1200, 1, 1, 1, 63, 63)  # more than one segment of reaches
    yield TalkCase(1100, 1, 1, 16, 31, 0, torch.float16)


CASES = list(dict.fromkeys([*sizes(), *options(), *shapes()]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(on_host, case):
    check(case, "forward", on_host)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(on_host, case):
    check(case, "backward", on_host)


@pytest.mark.parametrize(
    "case",
    [
        TalkCase(40, 3, 2, 5, 7, 7, torch.bfloat16, top=3, lengths=torch.int64),
        TalkCase(50, 1, 3, 4, 15, 4, torch.bfloat16, packed=True),
        TalkCase(33, 2, 1, 3, 6, 0, torch.bfloat16),
    ],
    ids=str,
)
def test_the_oracle_is_the_reference(case):
    """With offsets whose products with the reach are exact, so that float32 and float64 agree on them; and one NaN."""
    made = doubled(case.tensors())
    made["offset_left"][11, -1, 0] = math.nan
    for what in ("forward", "backward"):
        ours, theirs = getattr(case, what)(Oracle(), made), getattr(case, what)(reference, made)
        ours, theirs = ((result,) if isinstance(result, torch.Tensor) else result for result in (ours, theirs))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)


# ------------------------------------------------------------------------------------------------ steps


def steps():
    """New tokens and rows seen, from the first step to a whole prefix."""
    for count, (left, new, share) in enumerate(itertools.product((0, 1, 3, 7, 31, 63), (1, 3, 20), (0.0, 0.5, 1.0))):
        heads, per_head = ((2, 8), (4, 3), (2, 64), (8, 1), (3, 16))[count % 5]
        yield TalkCase(
            new,
            (5, 1, 2)[count % 3],
            heads,
            per_head,
            left,
            0,
            DTYPES[count // 2 % 3],
            top=1 if count % 4 else 2,
            rows=("tbc", "btc", "sliced", "odd")[count % 4],
            seen=int(share * left),
        )


STEPS = list(steps())


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_step(on_host, case):
    check(case, "step", on_host)


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_step_backward(on_host, case):
    check(case, "step_backward", on_host)


@pytest.mark.parametrize("unused", ["grad", "grad_state"])
def test_a_result_that_was_not_used_has_no_gradient(on_host, unused):
    case = TalkCase(4, 3, 2, 8, 5, 0, seen=2)
    made = case.tensors() | {unused: None}
    got, want = case.step_backward(on_host, made), case.step_backward(Oracle(), made)
    for name, ours, theirs in zip(RESULTS["step_backward"], got, want, strict=True):
        if theirs.any():
            compare(name, ours, theirs)
        else:
            assert torch.equal(ours.double(), theirs), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_in_any_chunks_are_a_full_pass(on_host, dtype):
    case = TalkCase(23, 2, 2, 64, 6, 0, dtype)
    made = case.tensors()
    made["offset_left"].clamp_(max=1)
    whole = case.forward(on_host, made)
    for chunks in ([1] * 23, [4, 19], [2, 1, 20]):
        state, outs, done = made["x"].new_empty(0, 2, 128), [], 0
        for new in chunks:
            rows = slice(done, done + new)
            part = made | {"x": made["x"][rows], "offset_left": made["offset_left"][rows], "state": state}
            out, state = case.step(on_host, part)
            outs.append(out)
            done += new
        compare("out", torch.cat(outs), whole.double())
        assert torch.equal(state, made["x"][-6:])
