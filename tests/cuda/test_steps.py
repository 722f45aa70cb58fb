"""The streaming operators on the host against float64."""

import itertools

import pytest
import torch

from lightconv_plugin.ops.normalize import NORMALIZATIONS

from .calls import DTYPES, check, compare
from .convolution_calls import Case
from .covering import covering, marked
from .talk_calls import TalkCase

OPERATORS = ("lightconv", "dynamicconv")


def cases():
    """New tokens and rows seen, from the first step to a whole prefix; options go round."""
    count = 0
    for operator, size in itertools.product(OPERATORS, (1, 2, 3, 7, 31, 64)):
        for new, share in itertools.product((1, 3, 20), (0.0, 0.5, 1.0)):
            count += 1
            normalize = NORMALIZATIONS[count % 9] if count % 3 == 0 else "softmax"
            if size == 1 and "l" in normalize:
                # w/(|w| + ε) is ±1: its gradient is what is left when equal numbers cancel.
                normalize = "tanh"
            heads, per_head = ((2, 8), (4, 3), (2, 64), (8, 1), (3, 16))[count % 5]
            yield Case(
                operator,
                new,
                (5, 1, 2)[count % 3],
                heads,
                per_head,
                size,
                size - 1,
                DTYPES[count // 2 % 3],
                normalize=normalize,
                dropout=0.3 * (count % 4 == 1),
                bias=count % 2 == 0,
                renorm=operator == "dynamicconv" and count % 4 in (2, 3),
                glu=count % 5 in (1, 2),
                rows=("tbc", "btc", "sliced", "odd")[count % 4],
                seen=int(share * (size - 1)),
            )


def talk_cases():
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


def settings(case):
    """What may decide the path that a case takes through the kernels."""
    names = ("per_head", "dtype", "rows")
    if isinstance(case, Case):
        names += ("size", "normalize", "bias", "renorm", "glu")
        own = {"operator": case.operator, "dropped": case.dropout > 0, "whole prefix": case.seen == case.size - 1}
    else:
        own = {"left": case.left, "beyond one": case.top > 1, "whole prefix": case.seen == case.left}
    return own | {name: getattr(case, name) for name in names} | {"new": case.steps, "first": case.seen == 0}


def products(case):
    """Of a weight, or of a share, and a row."""
    return case.steps * case.batch * case.heads * case.per_head * (case.size if isinstance(case, Case) else case.left)


CASES = [
    case for table in (list(cases()), list(talk_cases())) for case in marked(table, covering(table, settings, products))
]


@pytest.mark.parametrize("what", ["step", "step_backward"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(on_host, case, what):
    check(case, what, on_host)


@pytest.mark.parametrize("unused", ["grad", "grad_state"])
@pytest.mark.parametrize(
    "case",
    [
        *(Case(operator, 4, 3, 2, 8, 5, 4, seen=2, glu=True) for operator in OPERATORS),
        TalkCase(4, 3, 2, 8, 5, 0, seen=2),
    ],
    ids=str,
)
def test_a_result_that_was_not_used_has_no_gradient(on_host, case, unused):
    made = case.tensors() | {unused: None}
    got, want = case.step_backward(on_host, made), case.expected("step_backward", made)
    for name, ours, theirs in zip(case.RESULTS["step_backward"], got, want, strict=True):
        if theirs.any():
            compare(name, ours, theirs)
        else:
            assert torch.equal(ours.double(), theirs), name


def chunked():
    for dtype in DTYPES:
        for operator in OPERATORS:
            yield Case(operator, 11, 2, 2, 8, 5, 4, dtype, glu=True, bias=True), ([1] * 11, [4, 7], [2, 1, 8])
        yield TalkCase(23, 2, 2, 64, 6, 0, dtype), ([1] * 23, [4, 19], [2, 1, 20])


@pytest.mark.parametrize("case, ways", list(chunked()), ids=str)
def test_steps_in_any_chunks_are_a_full_pass(on_host, case, ways):
    made = case.tensors()
    whole = case.forward(on_host, made)
    made["state"] = made["x"].new_empty(0, 2, case.channels)
    _, last = case.step(on_host, made)
    for chunks in ways:
        state, outs, done = made["state"], [], 0
        for new in chunks:
            rows = slice(done, done + new)
            part = made | {name: made[name][rows] for name in case.by_row} | {"state": state}
            out, state = case.step(on_host, part)
            outs.append(out)
            done += new
        compare("out", torch.cat(outs), whole.double())
        assert torch.equal(state, last)
