"""Programs that tests start and wait for."""

import os
import subprocess
import time

from tests import ROOT


def run(*command, status=0, cwd=None, input=None, timeout=300, env=None, **environment):
    """The program once it has ended, its output as text. Python finds this checkout's modules first.

    status: how it must end; None for any way. env, environment: variables that differ from this process's; None removes
        one.
    """
    variables = {**os.environ, "PYTHONPATH": ROOT, **(env or {}), **environment}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={name: str(value) for name, value in variables.items() if value is not None},
        input=input,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert status in (None, done.returncode), f"status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
    return done


def wait_until(holds, process=None, seconds=60):
    """Until `holds()`, or the process has ended; an error after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds() and (process is None or process.poll() is None):
        assert time.monotonic() < deadline, f"it took more than {seconds} s"
        time.sleep(0.002)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
