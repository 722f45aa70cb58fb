"""A handful of the kills of scripts/dev/torture.sh, and that it notices what it is there for.

More kills, at chosen moments, are in the tests of each script: test_prepare*.py, test_reproduce.py, test_download.py, …
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.robustness.__main__ import main
from tests.robustness.kill_targets import WORKS, listing
from tests.robustness.torture import ODD_NAMES, Fork, Result, Torture, Work, table


@pytest.mark.parametrize("name, kills", [("average", 6), ("export", 6), ("reproduce", 3)])
def test_what_is_killed_ends_as_what_was_left_alone(name, kills, tmp_path):
    if name == "export":
        pytest.importorskip("safetensors")
    if name == "reproduce":
        pytest.importorskip("yaml")
    result = Torture(WORKS[name], tmp_path).run(kills)
    assert result.differences == []
    assert result.kills == kills and result.trials >= kills // 3


@pytest.mark.parametrize("name", ["average", "export"])
def test_names_of_folders_change_nothing(name, tmp_path):
    if name == "export":
        pytest.importorskip("safetensors")
    result = Torture(WORKS[name], tmp_path).run_in_odd_places(ODD_NAMES)
    assert result.differences == [] and result.trials == len(ODD_NAMES)


@pytest.mark.parametrize("name", ["average", "export"])
def test_a_full_disk_loses_nothing(name, tmp_path):
    if name == "export":
        pytest.importorskip("safetensors")
    try:
        result = Torture(WORKS[name], tmp_path).run_on_full_disks((0.1, 0.7))
    except RuntimeError as error:
        pytest.skip(str(error))
    assert result.differences == [] and (result.failed, result.trials) == (2, 2)


def test_one_killed_while_it_writes_progress_does_not_stop_the_next(tmp_path, monkeypatch):
    """tqdm's lock is one for all processes that are forked after it was made."""
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(tqdm, "_lock", multiprocessing.RLock(), raising=False)

    def hold():
        tqdm.get_lock().acquire()
        (tmp_path / "held").touch()
        time.sleep(60)

    def show():
        assert list(tqdm(range(3))) == [0, 1, 2]

    held = Fork(hold, log=tmp_path / "log", token="")
    end = time.monotonic() + 60
    while not (tmp_path / "held").exists() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(held.pid, signal.SIGKILL)
    assert held.wait() == -signal.SIGKILL
    shown = Fork(show, log=tmp_path / "log", token="")
    while (status := shown.poll()) is None and time.monotonic() < end:
        time.sleep(0.01)
    if status is None:
        os.kill(shown.pid, signal.SIGKILL)
    assert status == 0, (tmp_path / "log").read_text()


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

    @staticmethod
    def of_its_name(place):
        """Fails where the name of its folder is more than a word."""
        command = f"mkdir -p {place} && touch {place}/output"
        subprocess.run(["sh", "-c", command], cwd=place, check=True, stderr=subprocess.DEVNULL)

    def outcome(self, place: Path):
        return listing(place)


@pytest.mark.parametrize(
    "way, said",
    [("half_written", "output differs"), ("left_over", ".tmp is left over"), ("locked_for_ever", "ends with status 1")],
)
def test_what_does_not_survive_a_kill_is_found(way, said, tmp_path):
    result = Torture(Careless(way), tmp_path).run(6)
    assert any(said in line for line in result.differences), result.differences


def test_what_does_not_survive_a_name_is_found(tmp_path):
    result = Torture(Careless("of_its_name"), tmp_path).run_in_odd_places(ODD_NAMES)
    assert any("a folder named with spaces" in line for line in result.differences)
    assert any("shell" in line for line in result.differences)


def test_the_table_says_what_was_lost():
    text = table([Result("`a`", 1.25, 7, 2, 3, 1), Result("`b`", 1, 1, 0, 1, 0, differences=["b, trial 1: x differs"])])
    assert "| `a` | 1.2 | 7 | 2 | 0 | 3 | 1 | nothing |" in text and "| `b` | 1.0 | 1 | 0 | 0 | 1 | 0 | 1 |" in text


@pytest.mark.parametrize(
    "arguments, said",
    [(["nothing"], "no nothing; there are: average, export"), (["--kills", "0"], "--kills must be above 0, got 0")],
)
def test_wrong_arguments(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torture.sh", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


def test_a_fork_computes_although_its_parent_has_threads(tmp_path):
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        numbers = torch.ones(1 << 20)
        assert float((numbers + 1).sum()) == 2 << 20
        process = Fork(lambda: int(float((numbers + 1).sum()) != 2 << 20), log=tmp_path / "log", token="x")
        deadline = time.monotonic() + 60
        while (status := process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if status is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert status == 0, "the child waits for ever"
    finally:
        torch.set_num_threads(threads)
