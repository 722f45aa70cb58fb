"""The threads that share a search (cpu/search/team.h)."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lightconv_plugin.ops import artifacts


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_threads_that_wait_leave_the_cores_to_others(tmp_path):
    program = tmp_path / "team"
    source = Path(__file__).with_name("team.cpp")
    command = ["g++", "-std=c++17", "-O2", f"-I{artifacts.SOURCES['cpu']}", source, "-o", program, "-pthread"]
    subprocess.run(command, check=True, timeout=300)
    assert subprocess.run([program], timeout=300, check=False).returncode == 0
