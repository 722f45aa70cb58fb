"""`lightconv prepare` in this process, and in one of its own that is to be interrupted."""

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from lightconv_plugin.cli.main import main
from tests.recipes.conftest import heed_ctrl_c, script_environment
from tests.recipes.data.archive_server import LOCAL
from tests.warm_python import warm_python

SMALL = ("--bpe", "60", "--workers", "1")


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def prepare(home, task, *arguments, status=0):
    """Run `lightconv prepare`, which has to end with `status`; returns what it says.

    `home` is where data/ and runs/ are by default. fairseq-preprocess, which it starts, is forked from a process that
    has imported fairseq.
    """
    said = io.StringIO()
    home_and_proxy = mock.patch.dict(os.environ, LIGHTCONV_HOME=str(home), **LOCAL)
    with home_and_proxy, mock.patch.object(sys, "executable", warm_python()), contextlib.redirect_stderr(said):
        returncode = main(["prepare", task, *map(str, arguments)])
    assert returncode == status, said.getvalue()
    return said.getvalue()


def stop_at(message, signal_number, home, task, *arguments):
    """Start it as a process, and send its whole group a signal when it says `message`; (status, stderr)."""
    process = subprocess.Popen(
        [warm_python(), "-m", "lightconv_plugin", "prepare", task, *map(str, arguments)],
        env=script_environment(LIGHTCONV_HOME=str(home), **LOCAL),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )
    said = []
    with process.stderr:
        for line in process.stderr:
            said.append(line)
            if message in line:
                os.killpg(process.pid, signal_number)
    return process.wait(timeout=60), "".join(said)
