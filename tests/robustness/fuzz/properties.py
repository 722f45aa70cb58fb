"""The properties that the fuzzer looks for violations of, as functions of what hypothesis draws."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from tests.robustness.fuzz.case import Case, Convolution
from tests.robustness.fuzz.checks import check, check_spread
from tests.robustness.fuzz.strategies import OPERATORS, VIEWS, cases

INFINITE = (float("inf"), float("-inf"), float("nan"))
PLACES = ("x", "grad", "filter", "state")


def numbers(operators: tuple[str, ...] = OPERATORS, dtypes: tuple[str, ...] | None = None):
    """Strategy of the arguments of `numbers_are_right`."""
    return cases(operators, dtypes) if dtypes else cases(operators)


def layouts(operators: tuple[str, ...], dtypes: tuple[str, ...]):
    """As `numbers`, with a random memory layout of every tensor."""
    return cases(operators, dtypes, views=VIEWS)


def numbers_are_right(case: Case, backend: str, device: str) -> None:
    check(case, device, rounds_products=backend.startswith("cuda"))


def spreads(operators: tuple[str, ...] = OPERATORS, dtypes: tuple[str, ...] | None = None):
    """Strategy of the arguments of `nothing_spreads`: a case, where, what, which element."""
    drawn = cases(operators, dtypes, empty=False) if dtypes else cases(operators, empty=False)
    return st.tuples(drawn, st.sampled_from(PLACES), st.sampled_from(INFINITE), st.integers(0, 2**40))


def nothing_spreads(case: Case, where: str, value: float, place: int, backend: str, device: str) -> None:
    assume(not case.reorder)
    if where == "state":
        assume(case.seen > 0)
    elif where == "filter":
        where = "weight" if isinstance(case, Convolution) else "left"
        # An offset of ∞ is a window to the sequence's end, as it should be; a step takes none above 1.
        assume(where == "weight" or value != INFINITE[0])
    check_spread(case, where, value, place, device, rounds_products=backend.startswith("cuda"))
