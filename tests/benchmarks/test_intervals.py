"""Confidence intervals of ratios, on samples whose true ratio is known."""

import random

import pytest

from benchmarks import tables, timing
from benchmarks.tables import Form


def measured(median: float, rng: random.Random, turns: list[float], noise: float = 0.05) -> dict:
    """The summary of calls of this median, each as much slower as its turn is."""
    return timing.summary([median * turn * rng.lognormvariate(0, noise) for turn in turns])


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says():
    rng, hits, trials = random.Random(1), 0, 300
    for _ in range(trials):
        turns = [rng.lognormvariate(0, 0.1) for _ in range(25)]
        found = timing.ratio(measured(3.0, rng, turns), measured(2.0, rng, turns))
        assert found.low <= found.value <= found.high
        hits += found.low <= 1.5 <= found.high
    assert 0.9 < hits / trials <= 1


def test_calls_of_one_turn_are_drawn_together():
    """A machine that is slow at times slows down both: the ratio is known better than either time."""
    rng = random.Random(2)
    turns = [rng.choice((1.0, 3.0)) for _ in range(31)]
    theirs, ours = measured(3.0, rng, turns, 0.01), measured(2.0, rng, turns, 0.01)
    paired = timing.ratio(theirs, ours)
    assert paired.high / paired.low < 1.1
    ours["samples_s"] = sorted(ours["samples_s"])[:-1]  # not equally often: by themselves
    apart = timing.ratio(theirs, ours)
    assert apart.high / apart.low > 2


def test_the_same_file_gives_the_same_interval():
    rng = random.Random(3)
    theirs, ours = (measured(1.0, rng, [1.0] * 9) for _ in range(2))
    assert timing.ratio(theirs, ours) == timing.ratio(theirs, ours)
    assert timing.ratio(theirs, theirs) == (1.0, 1.0, 1.0)


def test_of_older_files_only_the_ratio_is_known():
    theirs, ours = timing.summary([4.0, 4.0]), timing.summary([2.0, 2.0])
    assert str(timing.ratio(theirs, ours)) == "2.00 (2.00–2.00)"
    del ours["samples_s"]
    assert timing.ratio(theirs, ours) == (2.0, None, None)
    assert str(timing.ratio(theirs, ours)) == "2.00"
    assert timing.ratio(None, ours) is None is timing.ratio(theirs, None)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (timing.Ratio(1.234, 1.1, 1.3), "1.23 (1.10–1.30)"),
        (timing.Ratio(1234.4), "1,234"),
        (timing.Ratio(1234.4, 1000, 2000.2), "1,234 (1,000–2,000)"),
        (None, "–"),
    ],
)
def test_in_a_table(found, text):
    form = Form(0) if found and found.value > 1000 else tables.NUMBER
    cell = tables.ratio_cell(found, form)
    assert str(cell) == text
    assert found is None or cell.text == text.partition(" ")[0]  # what prose repeats
