"""A few of the fuzzer's cases, the same in every run; that it finds what is wrong; and each case that once failed."""

import contextlib
import math
import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from lightconv_plugin.ops import backends as ours
from lightconv_plugin.ops import reference
from tests.ops.conftest import by_reference
from tests.robustness.fuzz import backends, properties, run
from tests.robustness.fuzz.case import Convolution, Talk
from tests.robustness.fuzz.checks import check_spread

# No time limit of a single case: other tests run beside it.
FIXED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=20,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
FEW = settings(FIXED, max_examples=10)


@pytest.mark.parametrize("operator", run.OPERATORS)
@pytest.mark.parametrize("what", properties.PROPERTIES)
def test_a_few_cases(backend, what, operator):
    strategy, check = properties.PROPERTIES[what]

    @(FEW if backend == "cuda-on-host" else FIXED)
    @given(strategy((operator,), backends.dtypes_of(backend)))
    def holds(drawn):
        check(drawn, backend, "cpu")

    holds()


# ------------------------------------------------------------------------------------------------ what once failed

# Arguments of check_spread.
SPREAD = {
    # The reference multiplied rows of another packed sequence by 0, and a filter that is not finite by that 0.
    "filter-of-a-packed-sequence": (
        Convolution(
            steps=2, batch=1, heads=1, per_head=1, edges=(0, 1, 2), operator="dynamicconv", size=2, padding_l=0
        ),
        "weight",
        math.inf,
        0,
    )
}


@pytest.mark.parametrize("arguments", SPREAD.values(), ids=SPREAD)
def test_cases_that_once_spread(backend, arguments):
    check_spread(*arguments, rounds_products=backend == "cuda-on-host")


# The gradient is the same at all times, in one place of memory: torch adds it to the bias's one by one.
STILL = Convolution(
    steps=257,
    batch=3,
    heads=1,
    per_head=4,
    lengths=(0, 0, 0),
    size=1,
    padding_l=0,
    normalize="none",
    bias=True,
    grads="still",
)


def test_a_sum_that_once_was_too_far_from_float64(backend):
    properties.numbers_are_right(STILL, backend, "cpu")


# ------------------------------------------------------------------------------------------------ the fuzzer itself


@contextlib.contextmanager
def mistaken(name, change):
    """The reference with one operator's result changed by `change(result, arguments)`."""
    with by_reference():
        library = torch.library.Library("lightconv", "IMPL")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
                library.impl(name, lambda *args: change(getattr(reference, name)(*args), args), "CPU")
            yield
        finally:
            library._destroy()


def one_part_in_a_thousand(result, args):
    return result * 1.001


def last_row_of_long_sequences(result, args):
    return torch.cat([result[:-1], result[-1:] * 0]) if result.shape[0] > 9 else result


def no_gradient_of_filters_of_a_batch(result, args):
    dx, dweight = result
    return dx, torch.zeros_like(dweight) if dweight.dim() == 4 and dweight.shape[1] > 1 else dweight


MISTAKES = {
    "scale": ("lightconv", one_part_in_a_thousand),
    "last-row": ("talkconv", last_row_of_long_sequences),
    "gradient": ("dynamicconv_backward", no_gradient_of_filters_of_a_batch),
}


@pytest.mark.parametrize(("name", "change"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_found_and_shrunk(name, change):
    @settings(FIXED, max_examples=100, phases=(Phase.generate, Phase.shrink))
    @given(properties.numbers((name.removesuffix("_backward"),), ("float32",)))
    def holds(case):
        properties.numbers_are_right(case, "reference", "cpu")

    with mistaken(name, change), pytest.raises(AssertionError) as caught:
        holds()
    assert "differ from float64" in str(caught.value)
    assert any("Convolution(" in note or "Talk(" in note for note in caught.value.__notes__)


def test_a_value_that_leaks_is_found():
    def leaking(result, args):
        return torch.where(result.isnan().any(), torch.nan, result)

    case = Talk(steps=30, batch=1, heads=1, per_head=1, left=2)
    with mistaken("talkconv", leaking), pytest.raises(AssertionError, match="reached out"):
        check_spread(case, "x", math.nan, 20)


def test_the_runner_counts_and_repeats(capsys):
    arguments = ["0.001", "--cases", "21", "--backends", "reference", "--operators", "talkconv", "--quiet"]
    assert run.main(arguments) == 0
    assert "21 cases in" in capsys.readouterr().out
    if ours.decision("cpu").backend != "cpu":  # loaded before the mistake, which it would replace
        pytest.skip("the native backend is not available")
    with mistaken("talkconv", one_part_in_a_thousand):
        # by_reference, which the runner enters, would undo the mistake: the kernels that are registered are asked.
        run_as_registered = [*arguments[:-3], "--backends", "cpu", "--operators", "talkconv", "--quiet"]
        assert run.main(run_as_registered) == 1
    said = capsys.readouterr().out
    assert "FAILED" in said and "Talk(" in said
