"""What the tests are run with: `warm_python` behaves as Python does; the order of files names files."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.conftest import LONGEST
from tests.warm_python import PYTHON, warm_python

PROGRAMS = {
    "output": ["-c", "import sys; print(sys.argv, sys.stdin.read()); print('x', file=sys.stderr)", "a b", "c"],
    "status": ["-c", "import sys; sys.exit(3)"],
    "message": ["-c", "import sys; sys.exit('no')"],
    "atexit": ["-c", "import atexit; atexit.register(print, 'end')"],
    "killed": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "module": ["-m", "json.tool"],
    "options": ["-u", "-X", "utf8", "-c", "import sys; print(sys.flags.utf8_mode)"],
    "spawned": [
        "-c",
        "from multiprocessing import get_context as c; p = c('spawn').Process(target=print, args=('x',)); p.start();"
        " p.join(); print(p.exitcode)",
    ],
    "parallel": ["-c", "import torch; torch.set_num_threads(2); print(torch.ones(9999).sum().item())"],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_warm_python_is_python(name, tmp_path):
    found = [
        subprocess.run(
            [python, *PROGRAMS[name]],
            input='{"a": 1}',
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for python in (PYTHON, warm_python("torch"))
    ]
    python, warm = ((done.returncode, done.stdout, done.stderr) for done in found)
    assert warm == python


def test_an_error_has_a_traceback(tmp_path):
    (tmp_path / "program.py").write_text("import here\nassert here.__file__ == __file__\n")
    (tmp_path / "here.py").touch()
    done = subprocess.run([warm_python("torch"), tmp_path / "program.py"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "AssertionError"


SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_ends_the_process_that_does_the_work(number):
    with subprocess.Popen(
        [warm_python("torch"), "-c", SLEEP], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        child = int(process.stdout.readline())
        assert child != process.pid
        process.send_signal(number)
        assert process.wait(20) == -number
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not os.path.exists(f"/proc/{child}")


def test_a_caller_that_is_killed_at_once_does_not_end_the_server(tmp_path):
    """It may be gone before it is told the number of its process, which ends all the same."""
    program = warm_python("torch")
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'x').write(str(os.getpid())); time.sleep(60)"
    request = {"arguments": ["-c", code], "environment": dict(os.environ), "cwd": str(tmp_path), "files": [0, 1, 2]}
    message = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as caller, open(os.devnull, "r+b") as null:
        caller.connect(str(Path(program).with_name("socket")))
        socket.send_fds(caller, [len(message).to_bytes(8, "little")], [null.fileno()] * 3)
        caller.sendall(message)
    done = subprocess.run([program, "-c", "print('served')"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr
    deadline, begun = time.monotonic() + 20, tmp_path / "pid"  # which is not there if it was ended before that

    def runs():
        return begun.exists() and (number := begun.read_text()) and os.path.exists(f"/proc/{number}")

    while runs() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs()


def test_the_longest_files_exist():
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
