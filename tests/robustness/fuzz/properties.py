"""The properties that the fuzzer looks for violations of, as functions of what hypothesis draws."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from tests.robustness.fuzz.case import Case, Convolution
from tests.robustness.fuzz.checks import check, check_spread
from tests.robustness.fuzz.strategies import VIEWS, cases

INFINITE = (float("inf"), float("-inf"), float("nan"))
PLACES = ("x", "grad", "filter", "state")


def numbers(operators: tuple[str, ...], dtypes: tuple[str, ...]):
    """Strategy of what `numbers_are_right` is given."""
    return cases(operators, dtypes)


def layouts(operators: tuple[str, ...], dtypes: tuple[str, ...]):
    """As `numbers`, with a random memory layout of every tensor."""
    return cases(operators, dtypes, views=VIEWS)


def numbers_are_right(case: Case, backend: str, device: str) -> None:
    check(case, device, rounds_products=backend.startswith("cuda"))


def spreads(operators: tuple[str, ...], dtypes: tuple[str, ...]):
    """Strategy of what `nothing_spreads` is given: a case, where, what, which element."""
    drawn = cases(operators, dtypes, empty=False)
    return st.tuples(drawn, st.sampled_from(PLACES), st.sampled_from(INFINITE), st.integers(0, 2**40))


def nothing_spreads(arguments: tuple[Case, str, float, int], backend: str, device: str) -> None:
    case, where, value, place = arguments
    assume(not case.reorder)
    if where == "state":
        assume(case.seen > 0)
    elif where == "filter":
        where = "weight" if isinstance(case, Convolution) else "left"
        # An offset of ∞ is a window to the sequence's end, as it should be; a step takes none above 1.
        assume(where == "weight" or value != INFINITE[0])
    check_spread(case, where, value, place, device, rounds_products=backend.startswith("cuda"))


PROPERTIES = {
    "numbers": (numbers, numbers_are_right),
    "memory layouts": (layouts, numbers_are_right),
    "NaN and infinity": (spreads, nothing_spreads),
}
"""Name -> (strategy of operators and types, what must hold of each that it draws, a backend and a device)."""
