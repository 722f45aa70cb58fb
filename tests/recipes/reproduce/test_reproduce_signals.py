"""A reproduction that is told to end, or killed: what it started, and its lock."""

import json
import signal
import subprocess
import sys
import time

import pytest

from lightconv_plugin.recipes.reproduce.state import State
from tests.recipes.conftest import ROOT, heed_ctrl_c

# The whole command in a process of its own, with the programs of reproduction_world.py.
CHILD = """
import sys
sys.path[:0] = [{root!r}]
import reproduce, pathlib
reproduce.SCRIPTS = pathlib.Path({fakes!r})
reproduce.TOOLS = ({fakes!r} + "/tune.sh",)
sys.argv[1:] = {arguments!r}
sys.exit(reproduce.main())
"""


def start(world):
    arguments = [
        str(world.config),
        "--seeds",
        "1",
        "--runs",
        f"{world.path}/runs",
        "--results",
        f"{world.path}/results",
    ]
    arguments += [f"task.data={world.path}/data/data-bin"]
    fakes = str(world.path / "scripts")
    code = CHILD.format(root=str(ROOT), fakes=fakes, arguments=arguments)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )


def wait_until(holds, process):
    deadline = time.monotonic() + 30
    while not holds() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert holds(), process.communicate()


def wait_for(path, process):
    wait_until(path.exists, process)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_was_started(world, monkeypatch, kind):
    monkeypatch.setenv("PAUSE", "31.4")
    process = start(world)
    wait_for(world.runs / "seed1/train.log", process)
    process.send_signal(kind)
    error = process.communicate(timeout=15)[1]
    assert process.returncode == 130
    assert error.splitlines()[-1] == "reproduce.sh: interrupted; the same command continues"
    assert not (world.path / "results").exists()
    with State(world.runs):
        pass  # nothing that was started holds the lock


def test_after_a_kill_the_step_that_goes_on_is_waited_for(world, monkeypatch):
    monkeypatch.setenv("PAUSE", "2")
    process = start(world)
    wait_for(world.runs / "seed1/train.log", process)
    wait_until(lambda: "threads" in "".join(log.read_text() for log in world.runs.rglob("*train*.log")), process)
    process.kill()
    process.communicate()
    monkeypatch.delenv("PAUSE")
    process = start(world)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert "waiting: another reproduction, or a step that one left running" in error
    assert world.calls()[0] == ["prepare", "train", "prepare", "tune", "score"], "the training went on to its end"
    assert "| DynamicConv |     1 |" in output
    assert json.loads((world.path / "results/task/dynamicconv.json").read_text())["runs"][0]["threads"] == 6
