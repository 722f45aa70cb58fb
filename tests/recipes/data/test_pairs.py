"""Cleaning pairs, dividing them."""

import pytest

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.recipes.data.pairs import clean_pairs, iter_pairs, keep_pair, split_every


@pytest.mark.parametrize(
    "source, target, kept",
    [
        ("a b", "c d", True),
        ("", "c", False),
        ("a", "", False),
        ("a b c d", "e", False),
        ("a b c", "d", True),
        ("a " * 6, "b " * 6, False),
        ("a " * 5, "b " * 5, True),
        ("x" * 1000, "y", True),
        ("x" * 1001, "y", False),
        ("x", "é" * 1001, False),
    ],
    ids="good no-source no-target ratio ratio-at-bound too-long longest long-word too-long-word other-side".split(),
)
def test_cleaning(source, target, kept):
    assert keep_pair(source, target, max_len=5, max_ratio=3.0) is kept


def test_the_ratio_is_compared_like_clean_corpus_n():
    """It divides: 113 / 100 is not above 1.13, though 1.13 × 100 is below 113 in floating point."""
    assert keep_pair("a " * 100, "b " * 113, 250, 1.13) and not keep_pair("a " * 100, "b " * 114, 250, 1.13)


def test_least_length():
    assert keep_pair("a b", "c d", 5, 9, min_len=2) and not keep_pair("a", "c d", 5, 9, min_len=2)


@pytest.fixture
def files(tmp_path):
    """(sources, outputs): two texts of these lines, and four paths."""

    def make(source, target):
        (tmp_path / "s").write_text("".join(line + "\n" for line in source))
        (tmp_path / "t").write_text("".join(line + "\n" for line in target))
        return [tmp_path / "s", tmp_path / "t"], [tmp_path / name for name in ("s1", "t1", "s2", "t2")]

    return make


def test_pairs_are_cleaned_together(files):
    sources, outputs = files(["a  b\t c ", "a", "", "a b"], ["d e f", "b c d", "x", "c d"])
    assert clean_pairs(sources, outputs[:2], 1.5, 1, 175) == (2, 4)
    assert outputs[0].read_text() == "a b c\na b\n"
    assert outputs[1].read_text() == "d e f\nc d\n"


def test_every_third_line_counted_from_one(files):
    sources, outputs = files(map(str, range(1, 9)), (f"t{i}" for i in range(1, 9)))
    assert split_every(sources, 3, outputs[:2], outputs[2:]) == (6, 2)
    assert outputs[0].read_text().split() == ["1", "2", "4", "5", "7", "8"]
    assert outputs[3].read_text().split() == ["t3", "t6"]


def test_unequal_texts_are_named(files):
    sources, outputs = files("abc", "ab")
    for use in (
        lambda: list(iter_pairs(*sources)),
        lambda: clean_pairs(sources, outputs[:2], 9, 1, 9),
        lambda: split_every(sources, 2, outputs[:2], outputs[2:]),
    ):
        with pytest.raises(CorpusError, match=r"s has 3 lines but .*t has 2"):
            use()
