"""The sanitizers report what they are there for, in a library that an ordinary Python loads; and nothing else."""

import shutil
import subprocess
import sys

import pytest

from tests.robustness.sanitize import build

MISTAKES = {
    "address": ("read_beyond_the_end", 7, "heap-buffer-overflow"),
    "undefined": ("shift_too_far", 40, "shift exponent 40 is too large"),
    "thread": ("add_up_without_a_lock", 1000, "data race"),
}


@pytest.fixture(scope="module", params=MISTAKES)
def guard(request, tmp_path_factory):
    """(kind, a function that calls one of the guard's functions in a process of its own)."""
    kind = request.param
    if shutil.which(build.GXX) is None:
        pytest.skip("no g++")
    try:
        environment = build.environment(kind)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    library = build.link(kind, [build.HERE / "guard.cpp"], tmp_path_factory.mktemp(kind) / "guard.so")

    def call(function, argument):
        program = f"import ctypes; ctypes.CDLL({str(library)!r}).{function}(ctypes.c_int64({argument}))"
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return kind, call


def test_a_mistake_is_reported(guard):
    kind, call = guard
    function, argument, report = MISTAKES[kind]
    done = call(function, argument)
    assert done.returncode != 0 and report in done.stderr, f"{done.returncode}: {done.stderr[-2000:]}"


def test_nothing_is_reported_without_one(guard):
    _, call = guard
    done = call("write_each_its_own", 1000)
    assert done.returncode == 0 and not done.stderr, done.stderr[-2000:]
