"""A reproduction that is told to end, or killed: what it started, and its lock."""

import json
import signal
import subprocess
import sys
import time

import pytest

from lightconv_plugin.recipes.steps import Steps
from tests.recipes.conftest import ROOT, heed_ctrl_c

# The whole command in a process of its own, with the stand-ins of reproduction_world.py.
CHILD = """
import sys
from lightconv_plugin.cli.main import main
from tests.recipes.reproduce import reproduction_world
for place, name, instead in reproduction_world.stand_ins({train!r}):
    setattr(place, name, instead)
sys.exit(main({arguments!r}))
"""


def start(world):
    arguments = ["reproduce", str(world.config), "--seeds", "1", f"task.data={world.path}/data/data-bin"]
    arguments += ["--runs", f"{world.path}/runs", "--results", f"{world.path}/results"]
    code = CHILD.format(train=str(world.path / "train.sh"), arguments=arguments)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )


def wait_until(holds, process):
    deadline = time.monotonic() + 300
    while not holds() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if not holds():
        process.kill()
        pytest.fail(str(process.communicate()))


def wait_for(path, process):
    wait_until(path.exists, process)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_was_started(world, monkeypatch, kind):
    monkeypatch.setenv("HOLD", str(world.config))
    process = start(world)
    wait_for(world.runs / "seed1/train.log", process)
    process.send_signal(kind)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert error.splitlines()[-1] == "lightconv reproduce: interrupted; rerun the same command to resume"
    assert not (world.path / "results").exists()
    with Steps(world.runs):
        pass  # nothing that was started holds the lock


def test_after_a_kill_the_step_that_goes_on_is_waited_for(world, monkeypatch):
    hold = world.path / "hold"
    hold.touch()
    monkeypatch.setenv("HOLD", str(hold))
    process = start(world)
    wait_for(world.runs / "seed1/train.log", process)
    wait_until(lambda: "threads" in "".join(log.read_text() for log in world.runs.rglob("*train*.log")), process)
    process.kill()
    process.communicate()
    process = start(world)
    while not (line := process.stderr.readline()).startswith("waiting: another process is working in"):
        assert line, process.communicate()
    hold.unlink()
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert world.calls()[0] == ["prepare", "train", "prepare", "tune", "score"], "the training went on to its end"
    assert "| DynamicConv |       1 |" in output
    assert json.loads((world.path / "results/task/dynamicconv.json").read_text())["runs"][0]["threads"] == 6
