"""Runs benchmarks/gpu.sh and gpu_fairseq.sh where there is no GPU: a stand-in takes Python's place."""

import contextlib
import gc
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from multiprocessing import spawn

import pytest

from benchmarks import report
from tests.warm_python import warm_python


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_is_no_garbage():
    """Peaks of memory are measured after a collection each, which would look at all that the tests before have left."""
    gc.collect()
    gc.freeze()


STAND_IN = """\
    #!/bin/bash
    # Answers as python3 would on a machine with a GPU; the plan says what each module does instead.
    [[ $1 == -c ]] || echo "$*" >>"$CALLS"
    echo $$ >>"$PROCESSES"
    case "$*" in
        *"benchmarks.collect"*" --print") exec {warm} "$@" ;;  # which imports torch, the others next to nothing
        *"benchmarks.collect"*) exec {python} "$@" ;;
        "-c import sys, torch"*) exit 0 ;;
        "-c import importlib.util"*) exit "${{FAIRSEQ_MISSING:-1}}" ;;
    esac
    json=''
    for ((i = 1; i < $#; i++)); do
        next=$((i + 1))
        [[ ${{!i}} != --json ]] || json=${{!next}}
    done
    [[ -z $json ]] || cp "$RESULT" "$json"
    while IFS='|' read -r pattern action; do
        [[ "$*" != *"$pattern"* ]] || eval "$action"
    done <"$PLAN"
"""
RESULT = {
    "benchmark": "operators",
    "dtype": "bfloat16",
    "rates": {"bytes_per_s": 4e12, "flops_per_s": 7e14},
    "cases": [
        {
            "operator": "lightconv",
            "name": "T1 B1 C1 H1 K1",
            "backend": "cuda",
            "floor": {"both": {"seconds": 0.001}},
            "candidates": {"ours": {"both": {"median_s": 0.00125}}, "peer": {"both": {"median_s": 0.005}}},
        }
    ],
}


def ran(main, capsys, *arguments, status=0):
    """What a benchmark prints to standard output and to standard error; it has to end with this status."""
    ended = report.run(lambda: main([str(argument) for argument in arguments]))
    out, error = capsys.readouterr()
    assert ended == status, error
    return out, error


def states(content):
    """Part → what became of it, in the JSON of a call."""
    return {part["name"]: part["status"] for part in content["parts"]}


@pytest.fixture(scope="module")
def warm_processes():
    """Those that the benchmarks start for a model, or a group of sources, have imported fairseq."""
    before = spawn.get_executable()
    multiprocessing.set_executable(warm_python())
    yield
    multiprocessing.set_executable(before)


@pytest.fixture
def stand_in(tmp_path, repository):
    """stand_in("gpu", "timing", …) runs gpu.sh timing …; returns the process, the JSON and the stand-in's calls.

    status: how the call must end. timeout: it is killed then, as SIGKILL does it, and the process is None.
    """
    folder = tmp_path / "a folder"
    folder.mkdir()
    python = folder / "python3"
    programs = {"python": shlex.quote(sys.executable), "warm": shlex.quote(warm_python())}
    python.write_text(textwrap.dedent(STAND_IN).format(**programs), encoding="utf-8")
    python.chmod(0o755)
    (folder / "result").write_text(json.dumps(RESULT), encoding="utf-8")

    def run(name, call, *arguments, plan="", timeout=None, status=0, **environment):
        (folder / "plan").write_text(plan, encoding="utf-8")
        (folder / "calls").unlink(missing_ok=True)
        settings = {"PYTHON": python} | {
            name: folder / name.lower() for name in ("CALLS", "PLAN", "RESULT", "PROCESSES")
        }
        settings |= {"LIGHTCONV_GPU_CACHE": folder / "cache"}
        # torch.compile sets these for its own process, which may be this one.
        caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        inherited = {name: value for name, value in os.environ.items() if name not in caches}
        command = [repository / "benchmarks" / f"{name}.sh", call, "--out", folder / "out", *arguments]
        process = subprocess.Popen(
            command,
            env=inherited | {name: str(value) for name, value in (settings | environment).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            streams = process.communicate(timeout=timeout or 120)
            done = subprocess.CompletedProcess(command, process.returncode, *streams)
        except subprocess.TimeoutExpired:
            done = None
            os.killpg(process.pid, signal.SIGKILL)  # first: the script would note what became of its part
            for line in (folder / "processes").read_text(encoding="utf-8").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line), signal.SIGKILL)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        assert done is None or done.returncode == status, done.stdout + done.stderr
        file = folder / "out" / f"{name}_{call}.json"
        content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        calls = (folder / "calls").read_text(encoding="utf-8").splitlines() if (folder / "calls").exists() else []
        return done, content, [call for call in calls if "benchmarks.collect" not in call]

    return run
