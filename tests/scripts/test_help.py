"""--help of every script: the header of the file, where there is no environment, and none is made for it."""

import shutil
import subprocess
import sys

import pytest

from tests import ROOT

SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "scripts").rglob("*.sh") if path.name != "lib.sh")
# Nothing that scripts/setup.sh could use.
BARE = {"PATH": "/usr/bin:/bin", "PYTHON": "/nowhere/python"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a checkout")
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_no_environment(script, checkout):
    done = subprocess.run([checkout / script, "--help"], env=BARE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Old names show the help of the script that they call.
    called = "scripts/prepare.sh" if "prepare" in script else script.replace("score.sh", "evaluate.sh")
    assert called in done.stdout and "shellcheck source" not in done.stdout
    if called == "scripts/prepare.sh":
        assert done.stderr == "(run scripts/setup.sh first for the complete --help)\n"
    assert [path.name for path in checkout.iterdir()] == ["scripts"]


def test_help_after_other_arguments_makes_no_environment_either(checkout):
    command = [checkout / "scripts/train.sh", "demo/dynamicconv", "--help"]
    done = subprocess.run(command, env=BARE, capture_output=True, text=True)
    assert done.returncode == 0 and "scripts/train.sh CONFIG" in done.stdout
    assert [path.name for path in checkout.iterdir()] == ["scripts"]


def test_help_takes_an_environment_as_it_is(checkout):
    """Whether it is up to date or not."""
    folder = checkout / ".venv/bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text('#!/bin/sh\nshift 2; echo "lightconv $*"\n')
    (folder / "python").chmod(0o755)
    done = subprocess.run([checkout / "scripts/prepare.sh", "gbw", "--help"], env=BARE, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "lightconv prepare gbw --help\n")
    shutil.rmtree(checkout / ".venv")


def test_the_old_name_of_evaluate_says_the_new_one(checkout):
    done = subprocess.run([checkout / "scripts/score.sh", "--help"], env=BARE, capture_output=True, text=True)
    assert done.stderr == "scripts/score.sh is now scripts/evaluate.sh; the old word is gone in version 0.3\n"


def test_a_script_imports_nothing_of_the_working_directory(tmp_path):
    for name in ("lightconv_plugin", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the working directory')")
    environment = BARE | {"LIGHTCONV_PYTHON": sys.executable}
    command = [ROOT / "scripts/prepare.sh", "gbw", "--help"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "lightconv prepare gbw" in done.stdout
