"""The streaming operators on the host against the reference in float64."""

import itertools

import pytest
import torch

from lightconv_plugin.ops import reference
from lightconv_plugin.ops.normalize import NORMALIZATIONS

from .convolution_calls import Case, check, compare, doubled

OPERATORS = ("lightconv", "dynamicconv")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step(on_host, case):
    check(case, "step", on_host, ("out", "next_state"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_backward(on_host, case):
    check(case, "step_backward", on_host, ("dx", "dstate", "dweight"))


@pytest.mark.parametrize("unused", ["grad", "grad_state"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_result_that_was_not_used_has_no_gradient(on_host, operator, unused):
    case = Case(operator, 4, 3, 2, 8, 5, 4, seen=2, glu=True)
    made = case.tensors() | {unused: None}
    names = ("dx", "dstate", "dweight")
    for name, ours, theirs in zip(
        names, case.step_backward(on_host, made), case.step_backward(reference, doubled(made)), strict=True
    ):
        if theirs.any():
            compare(name, ours, theirs)
        else:
            assert torch.equal(ours.double(), theirs)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_gradients_can_be_asked_for_alone(on_host, operator, needs):
    case = Case(operator, 4, 3, 2, 8, 5, 4, torch.bfloat16, seen=3, dropout=0.2)
    made = case.tensors()
    together = case.step_backward(on_host, made)
    alone = case.step_backward(on_host, made, needs)
    for needed, ours, all_of_them in zip(needs, alone, together, strict=True):
        assert torch.equal(ours, all_of_them) if needed else ours.numel() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_steps_in_any_chunks_are_a_full_pass(on_host, operator, dtype):
    case = Case(operator, 11, 2, 2, 8, 5, 4, dtype, glu=True, bias=True)
    made = case.tensors()
    whole = case.forward(on_host, made)
    for chunks in ([1] * 11, [4, 7], [2, 1, 8]):
        state, outs, done = made["x"].new_empty(0, 2, 16), [], 0
        for new in chunks:
            weight = made["weight"][done : done + new] if case.dynamic else made["weight"]
            part = made | {"x": made["x"][done : done + new], "weight": weight, "state": state}
            out, state = case.step(on_host, part)
            outs.append(out)
            done += new
        compare("out", torch.cat(outs), whole.double())
