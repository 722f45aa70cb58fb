"""A test that hangs fails after some minutes and says where it was, instead of stopping the suite for ever."""

import re
import subprocess
import sys

HANGS = """
import threading

def test_before():
    pass

def test_hangs():
    threading.Event().wait(300)
"""


def test_a_test_that_hangs_fails_and_shows_where_it_was(repository, tmp_path):
    (tmp_path / "test_hangs.py").write_text(HANGS)
    settings = repository / "pyproject.toml"
    assert re.search(r"^faulthandler_timeout = \d{3}$", settings.read_text(encoding="utf-8"), re.M)  # here it is 2
    options = ["-c", settings, "--rootdir", tmp_path, "-o", "faulthandler_timeout=2"]
    command = [sys.executable, "-m", "pytest", *options, "-n", "1", "--max-worker-restart", "0", "test_hangs.py"]
    try:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:  # one in some two hundred: xdist does not end after it said that a worker died
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "crashed while running 'test_hangs.py::test_hangs'" in done.stdout and "1 failed, 1 passed" in done.stdout
    assert 'test_hangs.py", line 8 in test_hangs' in done.stderr
