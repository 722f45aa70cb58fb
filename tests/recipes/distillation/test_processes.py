"""Processes that open something large once: their results, their failures, and that none of them stays."""

import multiprocessing

import pytest

from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.distillation.processes import map_unordered
from tests.recipes.distillation import work


def test_each_item_is_mapped_once():
    results = list(map_unordered(work.double, [(0,), (100,)], range(20)))
    assert sorted(result % 100 for result in results) == list(range(0, 40, 2))
    assert not multiprocessing.active_children()


def test_a_process_with_nothing_left_to_do_ends_by_itself(tmp_path):
    """So that it cleans up after itself."""
    files = [tmp_path / "one", tmp_path / "two"]
    assert sorted(map_unordered(work.says_goodbye, [(file,) for file in files], range(4))) == [0, 2, 4, 6]
    assert all(file.exists() for file in files)


@pytest.mark.parametrize(
    ("factory", "error", "said"),
    [(work.fails, ValueError, "the model is gone"), (work.dies, InputError, "perhaps for lack of memory")],
)
def test_a_failure_is_raised_and_ends_the_others(factory, error, said):
    with pytest.raises(error, match=said):
        list(map_unordered(factory, [(0,), (1,)], range(10**9)))
    assert not multiprocessing.active_children()
