"""A handful of the kills of scripts/dev/torture.sh, and that it notices what it is there for.

More kills, at chosen moments, are in the tests of each script: test_prepare*.py, test_reproduce.py, test_download.py, …
"""

import time
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("yaml")

from tests.robustness.kill_targets import WORKS, listing
from tests.robustness.torture import ODD_NAMES, Fork, Torture, Work


@pytest.mark.parametrize("name, kills", [("average", 6), ("export", 6), ("reproduce", 3)])
def test_what_is_killed_ends_as_what_was_left_alone(name, kills, tmp_path):
    result = Torture(WORKS[name], tmp_path).run(kills)
    assert result.differences == []
    assert result.kills == kills and result.trials >= kills // 3


@pytest.mark.parametrize("name", ["average", "export"])
def test_names_of_folders_change_nothing(name, tmp_path):
    result = Torture(WORKS[name], tmp_path).run_in_odd_places(ODD_NAMES)
    assert result.differences == [] and result.trials == len(ODD_NAMES)


@pytest.mark.parametrize("name", ["average", "export"])
def test_a_full_disk_loses_nothing(name, tmp_path):
    try:
        result = Torture(WORKS[name], tmp_path).run_on_full_disks((0.1, 0.7))
    except RuntimeError as error:
        pytest.skip(str(error))
    assert result.differences == [] and (result.failed, result.trials) == (2, 2)


class Careless(Work):
    """Writes its results in the wrong way, as the way of a test says."""

    name = title = "careless"

    def __init__(self, way):
        self.way = way

    def build(self, world):
        (world / "input").write_text("x")

    def start(self, place, log, token):
        return Fork(getattr(self, self.way), place, log=log, token=token)

    @staticmethod
    def half_written(place):
        """What is there is taken to be whole."""
        if not (place / "output").exists():
            with (place / "output").open("w") as file:
                for _ in range(100):
                    file.write("line\n")
                    file.flush()
                    time.sleep(0.003)

    @staticmethod
    def left_over(place):
        temporary = place / f"{time.monotonic_ns()}.tmp"
        temporary.write_text("x")
        time.sleep(0.3)
        temporary.rename(place / "output")

    @staticmethod
    def locked_for_ever(place):
        lock = place / "lock"
        lock.touch(exist_ok=False)  # a FileExistsError after a kill
        time.sleep(0.3)
        lock.unlink()

    def outcome(self, place: Path):
        return listing(place)


@pytest.mark.parametrize(
    "way, said",
    [("half_written", "output differs"), ("left_over", ".tmp is left over"), ("locked_for_ever", "ends with status 1")],
)
def test_what_does_not_survive_a_kill_is_found(way, said, tmp_path):
    found: list[str] = []
    for attempt in range(3):  # on a busy machine, all kills of an attempt may come before anything is written
        (tmp_path / str(attempt)).mkdir()
        found += Torture(Careless(way), tmp_path / str(attempt)).run(6).differences
        if any(said in line for line in found):
            return
    pytest.fail(f"what was found: {found}")
