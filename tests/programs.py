"""Programs that tests start and wait for."""

import os
import subprocess

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
