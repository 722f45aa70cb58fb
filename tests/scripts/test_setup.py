"""setup.sh with interpreters that only pretend: its steps, when it does nothing, what it says when it cannot go on."""

import os
import shutil
import subprocess
import time

import pytest

from tests import ROOT

# A Python whose version, modules and pip do as the variables FAKE_* say; what pip is asked for goes to FAKE_LOG.
FAKE = r"""#!/usr/bin/env bash
case "$*" in
    *'sys.version_info'*) echo "${FAKE_VERSION:-3.11}" ;;
    --version) echo "Python ${FAKE_VERSION:-3.11}.0" ;;
    *'import ensurepip, venv'*) [[ -z ${FAKE_NO_VENV:-} ]] ;;
    *'sysconfig'*) echo "$FAKE_INCLUDE" ;;
    '-m venv '*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/pip"; touch "$3/pyvenv.cfg" ;;
    *'-m pip install'*)
        arguments=$*
        echo "${arguments##*constraints.txt }" >>"$FAKE_LOG"
        if [[ -n ${FAKE_PIP_FAILS:-} && "$*" == *"${FAKE_PIP_FAILS}"* ]]; then
            while [[ $1 != --log ]]; do shift; done
            echo "$FAKE_PIP_SAYS" >>"$2"
            exit 1
        fi
        sleep "${FAKE_SLEEP:-0}" ;;
    *'-m lightconv_plugin build cpu'*)
        echo kernels >>"$FAKE_LOG"
        [[ -z ${FAKE_NO_KERNELS:-} ]] || { echo "$FAKE_NO_KERNELS" >&2; exit 1; } ;;
    *'import fairseq'*) [[ -z ${FAKE_BROKEN:-} ]] || { echo "ImportError: $FAKE_BROKEN" >&2; exit 1; } ;;
    *) echo "fake python: unexpected: $*" >&2; exit 99 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout in a path with a space, and `run(**fakes)` that calls its setup.sh."""
    root = tmp_path / "check out"
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    python = tmp_path / "bin/python3.11"
    python.parent.mkdir()
    python.write_text(FAKE)
    python.chmod(0o755)
    (tmp_path / "include").mkdir()
    (tmp_path / "include/Python.h").touch()

    environment = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "FAKE_LOG": str(tmp_path / "pip.log"),
        "FAKE_INCLUDE": str(tmp_path / "include"),
        "CXX": "true",
    }

    def start(*arguments, **fakes):
        return subprocess.Popen(
            [root / "scripts/setup.sh", *arguments],
            env={**environment, **fakes},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(*arguments, **fakes):
        process = start(*arguments, **fakes)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    run.root, run.start, run.log, run.environment = root, start, tmp_path / "pip.log", environment
    return run


def installed(checkout):
    return checkout.log.read_text().splitlines() if checkout.log.exists() else []


@pytest.mark.parametrize(
    "version, fairseq",
    [
        ("3.10", ["pip<24.1", "fairseq"]),
        ("3.11", ["--no-build-isolation fairseq-fixed"]),
        ("3.12", ["--only-binary fairseq-fixed fairseq-fixed"]),
    ],
)
def test_torch_comes_first_and_fairseq_as_its_python_needs(checkout, version, fairseq):
    done = checkout(FAKE_VERSION=version)
    assert done.returncode == 0, done.stderr
    plugin = f"--no-build-isolation -e {checkout.root}[all,dev,docs]"
    assert installed(checkout) == ["torch", "numpy cython setuptools wheel ninja", *fairseq, plugin, "kernels"]
    assert f"4/4 compiling the CPU kernels on {len(os.sched_getaffinity(0))} cores" in done.stderr
    assert "set-up: done in" in done.stderr.splitlines()[-1]


def test_the_second_call_does_nothing(checkout):
    checkout()
    before = installed(checkout)
    start = time.monotonic()
    done = checkout()
    assert time.monotonic() - start < 2
    assert done.returncode == 0 and "is up to date" in done.stderr
    assert checkout("--quiet").stderr == ""
    assert installed(checkout) == before


@pytest.mark.parametrize("change", ["constraints", "pyproject.toml", "python", "moved"])
def test_a_change_is_taken_up(checkout, change):
    checkout()
    number, fakes = len(installed(checkout)), {}
    match change:
        case "constraints":
            (checkout.root / "scripts/constraints.txt").open("a").write("new==1\n")
        case "pyproject.toml":
            (checkout.root / "pyproject.toml").open("a").write("# changed\n")
        case "python":
            fakes["PYTHON"] = shutil.copy(checkout.root.parent / "bin/python3.11", checkout.root.parent / "bin/other")
            text = (checkout.root.parent / "bin/other").read_text()
            (checkout.root.parent / "bin/other").write_text(text.replace("FAKE_VERSION:-3.11", "FAKE_VERSION:-3.12"))
        case "moved":
            moved = checkout.root.with_name("moved")
            checkout.root.rename(moved)
            environment = {
                "PATH": f"{moved.parent}/bin:/usr/bin:/bin",
                "FAKE_LOG": str(checkout.log),
                "FAKE_INCLUDE": str(moved.parent / "include"),
                "CXX": "true",
            }
            assert subprocess.run([moved / "scripts/setup.sh"], env=environment, check=False).returncode == 0
            assert len(installed(checkout)) > number
            return
    assert checkout(**fakes).returncode == 0
    assert len(installed(checkout)) > number


def test_an_interrupted_setup_is_finished_by_the_next_call(checkout):
    failed = checkout(FAKE_PIP_FAILS="fairseq-fixed", FAKE_PIP_SAYS="killed")
    assert failed.returncode == 1
    assert checkout().returncode == 0
    assert installed(checkout)[-2].startswith("--no-build-isolation -e")
    assert "is up to date" in checkout().stderr


def test_kernels_that_do_not_compile_do_not_end_the_set_up(checkout):
    done = checkout(FAKE_NO_KERNELS="lightconv build: error: cpu: no compiler")
    assert done.returncode == 0
    assert "warning: the CPU kernels could not be compiled: lightconv build: error: cpu: no compiler" in done.stderr
    assert "is up to date" in checkout().stderr


def test_the_version_that_is_there_stays(checkout, tmp_path):
    """A set-up made with PYTHON=… is brought up to date with that Python, not with the first that is found."""
    other = tmp_path / "other"
    other.write_text(FAKE.replace("FAKE_VERSION:-3.11", "FAKE_VERSION:-3.12"))
    other.chmod(0o755)
    assert checkout(PYTHON=str(other)).returncode == 0
    (checkout.root / "scripts/constraints.txt").open("a").write("new==1\n")
    checkout.log.unlink()
    assert checkout().returncode == 0
    assert "--only-binary fairseq-fixed fairseq-fixed" in installed(checkout)


def test_an_environment_whose_python_is_not_on_this_machine_stays(checkout, tmp_path):
    """As on a node where the module with the interpreter is not loaded."""
    checkout()
    python, count = checkout.root / ".venv/bin/python", len(installed(checkout))
    python.unlink()
    python.symlink_to(tmp_path / "module/python3.11")
    done = checkout("--quiet")
    assert done.returncode == 1 and done.stderr == (
        f"setup.sh: error: {python} does not run on this machine: it is {tmp_path}/module/python3.11 (of a module to "
        f"load?); PYTHON=… makes {python.parents[1]} anew\n"
    )
    assert python.is_symlink() and len(installed(checkout)) == count
    assert checkout(PYTHON="python3.11").returncode == 0 and not python.is_symlink()


def test_two_calls_at_once_install_once(checkout):
    processes = [checkout.start(FAKE_SLEEP="0.3") for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(installed(checkout)) == 5
    assert sum("waiting for another set-up" in error for error in errors) == 1


@pytest.mark.parametrize(
    "fakes, message",
    [
        ({"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python is not a Python interpreter"),
        ({"PYTHON": "python3.11", "FAKE_VERSION": "3.9"}, "is Python 3.9; fairseq needs 3.10, 3.11, 3.12 or 3.13"),
        ({"PYTHON": "python3.11", "FAKE_VERSION": "3.14"}, "is Python 3.14; fairseq needs 3.10, 3.11, 3.12 or 3.13"),
        ({"FAKE_NO_VENV": "1"}, "has no venv module: sudo apt install python3.11-venv"),
        ({"CXX": "no-such-compiler"}, "no C++ compiler (no-such-compiler), which fairseq needs: sudo apt install g++"),
        ({"FAKE_INCLUDE": "/nowhere"}, "which fairseq needs: sudo apt install python3.11-dev"),
        (
            {"FAKE_PIP_FAILS": "numpy", "FAKE_PIP_SAYS": "No space left on device"},
            "the disk is full while installing: ninja",
        ),
        (
            {"FAKE_PIP_FAILS": "torch", "FAKE_PIP_SAYS": "NewConnectionError"},
            "no network, or the package index cannot be reached",
        ),
        (
            {"FAKE_PIP_FAILS": "fairseq-fixed", "FAKE_PIP_SAYS": "Python.h: No such file"},
            "no Python headers: sudo apt install",
        ),
        ({"FAKE_PIP_FAILS": "torch", "FAKE_PIP_SAYS": "odd"}, "pip failed while installing: torch (log: "),
        ({"FAKE_BROKEN": "no fairseq"}, "the new environment does not work: ImportError: no fairseq"),
    ],
    ids=[
        "no-python",
        "old",
        "new",
        "no-venv",
        "no-compiler",
        "no-headers",
        "disk",
        "network",
        "late-headers",
        "pip",
        "import",
    ],
)
def test_what_is_missing_is_said_in_one_line_with_the_remedy(checkout, fakes, message):
    done = checkout(**fakes)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("setup.sh: error: ")
    assert message in done.stderr.splitlines()[-1]
    stamp = checkout.root / ".venv/.lightconv-setup"
    assert not stamp.exists() or not stamp.read_text()  # begun, not done


def test_python_3_12_needs_no_compiler(checkout):
    assert checkout(FAKE_VERSION="3.12", CXX="no-such-compiler", FAKE_INCLUDE="/nowhere").returncode == 0


def test_no_interpreter_at_all(checkout, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "cat", "sha256sum", "df", "awk", "flock", "env"):
        os.symlink(shutil.which(name), tools / name)
    done = checkout(PATH=str(tools))
    assert done.returncode == 1
    assert "no Python 3.10, 3.11, 3.12 or 3.13 found" in done.stderr and "sudo apt install python3" in done.stderr


def test_only_environments_of_its_own_are_replaced(checkout, tmp_path):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "precious").touch()
    for folder, said in (
        (theirs, f"{theirs} exists, and no set-up has made it: name a new folder"),
        (checkout.root, "has this checkout in it"),
        (tmp_path, "has this checkout in it"),
    ):
        done = checkout("--venv", str(folder))
        assert done.returncode == 1 and said in done.stderr
    assert (theirs / "precious").exists() and (checkout.root / "scripts/setup.sh").exists()
    mine.mkdir()
    for version in ("3.11", "3.12"):
        assert checkout("--venv", str(mine), FAKE_VERSION=version, PYTHON="python3.11").returncode == 0
    assert (mine / ".lightconv-setup").exists() and not (checkout.root / ".venv").exists()


def test_an_environment_of_the_users_own_is_neither_replaced_nor_changed(checkout, tmp_path):
    theirs = tmp_path / "theirs"
    shutil.copytree(tmp_path / "bin", theirs / "bin")
    for name in ("pip", "python"):
        shutil.copy(theirs / "bin/python3.11", theirs / "bin" / name)
    (theirs / "pyvenv.cfg").touch()
    for log in (None, "a set-up of something else\n"):
        if log:
            (theirs / "setup.log").write_text(log)
        for python in ({}, {"PYTHON": "python3.11", "FAKE_VERSION": "3.12"}):
            done = checkout("--venv", str(theirs), **python)
            assert done.returncode == 1 and f"{theirs} exists, and no set-up has made it" in done.stderr
    assert not installed(checkout) and (theirs / "setup.log").read_text() == log
    (theirs / "bin/pip").unlink()  # which would be repaired by making it anew
    assert checkout("--venv", str(theirs)).returncode == 1 and (theirs / "bin/python").exists()


def test_an_interrupted_environment_of_an_earlier_version_is_finished(checkout, tmp_path):
    assert checkout("--venv", str(tmp_path / "mine")).returncode == 0
    (tmp_path / "mine/.lightconv-setup").unlink()  # which came last
    (tmp_path / "mine/setup.log").write_text("2026-01-02T03:04:05,678 Using pip 24.0 from /mine/pip (python 3.11)\n")
    assert checkout("--venv", str(tmp_path / "mine")).returncode == 0


def test_a_file_with_the_name_of_the_lock_keeps_its_content(checkout, tmp_path):
    (tmp_path / "mine.lock").write_text("precious")
    assert checkout("--venv", str(tmp_path / "mine")).returncode == 0
    assert (tmp_path / "mine.lock").read_text() == "precious"


@pytest.mark.parametrize("option", [["--torch", "2.6.0"], ["--without-fairseq"]], ids=lambda option: option[0])
def test_what_the_scripts_would_undo_is_refused(option, checkout, tmp_path):
    """They make .venv anew, as it was not made with the same options."""
    done = checkout(*option)
    assert done.returncode == 1 and "--torch and --without-fairseq need --venv DIR" in done.stderr
    assert not installed(checkout)
    assert checkout(*option, "--venv", str(tmp_path / "other")).returncode == 0


def test_another_name_of_the_checkout_is_no_other_checkout(checkout, tmp_path):
    (tmp_path / "link").symlink_to(checkout.root)
    assert checkout().returncode == 0
    count = len(installed(checkout))
    done = subprocess.run(
        [tmp_path / "link/scripts/setup.sh"], env=checkout.environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "is up to date" in done.stderr and len(installed(checkout)) == count


def test_unknown_arguments_are_refused(checkout):
    done = checkout("--fast")
    assert done.returncode == 1 and "unknown argument --fast" in done.stderr
