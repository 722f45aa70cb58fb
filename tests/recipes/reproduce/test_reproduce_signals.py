"""A reproduction that is told to end, or killed: what it started, and its lock."""

import json
import os
import signal

import pytest

from lightconv_plugin.cli.main import main
from lightconv_plugin.recipes.steps import Steps
from tests import programs
from tests.robustness.torture import Fork


def reproduce(world):
    """Seed 1 by the stand-ins, in a child of this process; its messages are in world.path/log."""

    def run():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # however the tests were started
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        places = ["--runs", f"{world.path}/runs", "--results", f"{world.path}/results"]
        data = f"task.data={world.path}/data/data-bin"
        return main(["reproduce", str(world.config), "--seeds", "1", data, *places])

    return Fork(run, log=world.path / "log", token=str(world.path))


def end(process):
    programs.wait_until(lambda: False, process, seconds=120)
    return process.wait()


@pytest.fixture
def held(world, monkeypatch):
    """A file: as long as it is there, the training waits."""
    hold = world.path / "hold"
    hold.touch()
    monkeypatch.setenv("HOLD", str(hold))
    yield hold
    hold.unlink(missing_ok=True)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_was_started(world, held, kind):
    process = reproduce(world)
    programs.wait_until((world.runs / "seed1/train.log").exists, process, seconds=120)
    os.kill(process.pid, kind)
    assert end(process) == 130
    said = (world.path / "log").read_text()
    assert said.splitlines()[-1] == "lightconv reproduce: interrupted; rerun the same command to resume"
    assert not (world.path / "results").exists()
    with Steps(world.runs):
        pass  # nothing that was started holds the lock


def test_after_a_kill_the_training_that_goes_on_is_waited_for(world, held):
    process = reproduce(world)
    log = world.runs / "logs/seed1.train.log"
    programs.wait_until(lambda: log.exists() and "threads" in log.read_text(), process, seconds=120)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process = reproduce(world)
    said = world.path / "log"
    programs.wait_until(lambda: "waiting: another process is working in" in said.read_text(), process, seconds=120)
    held.unlink()
    assert end(process) == 0, said.read_text()
    assert "waiting: another process is working in" in said.read_text()
    assert world.calls()[0] == ["prepare", "train", "prepare", "tune", "score"], "the training went on to its end"
    assert "| DynamicConv |       1 |" in said.read_text()
    assert json.loads((world.path / "results/task/dynamicconv.json").read_text())["runs"][0]["threads"] == 6
