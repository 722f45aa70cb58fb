"""talkconv on the host: forward and backward pass against float64."""

import itertools
import math

import pytest
import torch

from lightconv_plugin.ops import reference

from .calls import DTYPES, check, doubled, results
from .covering import covering, marked
from .talk_calls import TalkCase

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


def settings(case):
    """What may decide the path that a case takes through the kernels."""
    names = ("left", "right", "per_head", "rows", "offsets", "lengths", "packed", "compute_capability", "dtype")
    return {
        **{name: getattr(case, name) for name in names},
        "beyond one": case.top > 1,
        "shorter than the window": case.steps < case.left + case.right + 1,
    }


def products(case):
    """Of a share and a row."""
    return case.steps * case.batch * case.heads * case.per_head * (case.left + case.right + 1)


TABLES = list(dict.fromkeys([*sizes(), *options()]))
EVERY_RUN = covering(TABLES, settings, products)
CASES = [*marked(TABLES, EVERY_RUN), *shapes()]


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(on_host, case, what):
    check(case, what, on_host)


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
        ours, theirs = case.expected(what, made), getattr(case, what)(reference, made)
        for one, other in zip(results(ours), results(theirs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)
