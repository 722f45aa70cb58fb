"""Which cases of a large table are run every time: as few as hold every pair of settings that the table has."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import pytest

T = TypeVar("T")


def covering(cases: Sequence[T], settings: Callable[[T], Mapping[str, object]], cost: Callable[[T], float]) -> set[int]:
    """Indices of cases that hold every value of every setting, and every pair of values of two settings, of all cases.

    Cases are left out one by one, the most expensive first, as long as others have all of their pairs.
    """
    pairs = [list(combinations(sorted(settings(case).items(), key=lambda item: item[0]), 2)) for case in cases]
    count = Counter(pair for those in pairs for pair in those)
    kept = set(range(len(cases)))
    for index in sorted(kept, key=lambda i: cost(cases[i]), reverse=True):
        if all(count[pair] > 1 for pair in pairs[index]):
            kept.remove(index)
            count.subtract(pairs[index])
    return kept


def marked(cases: Sequence[T], kept: set[int]) -> list:
    """The cases as parameters of a test, those that are not kept marked as long."""
    return [case if i in kept else pytest.param(case, marks=pytest.mark.long) for i, case in enumerate(cases)]
