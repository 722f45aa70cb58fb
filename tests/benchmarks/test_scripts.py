"""benchmarks/gpu.sh and cpu.sh: parts, limits, failures, wrong arguments. A stand-in takes Python's place."""

import functools
import os
import subprocess

import pytest


@pytest.fixture
def gpu(stand_in):
    return functools.partial(stand_in, "gpu")


def states(content):
    return {part["name"]: part["status"] for part in content["parts"]}


def test_everything_once_and_in_order(gpu):
    done, content, calls = gpu()
    measured = ["main", "short", "half", "sweep", "single", "options", "talk", "talk_single"]
    expected = ["build", "tests", "memcheck", *measured, "racecheck", "training", "generation"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(states(content)) == expected
    away = {"memcheck", "racecheck", "training", "generation"}  # neither compute-sanitizer nor fairseq
    assert states(content) == {name: "not here" if name in away else "ok" for name in expected}
    assert set(content["results"]) == set(measured)
    assert [call.split()[-1] for call in calls if "pytest -q -m gpu" in call] == ["tests/gpu"]
    assert all("--device cuda" in call for call in calls if "benchmarks.operators" in call)
    assert "fairseq is not installed" in done.stdout and "compute-sanitizer was not found" in done.stdout
    # The last tables: each benchmark's overview, then what became of the parts.
    assert "lightconv T1 B1 C1 H1 K1" in done.stdout and "4.00" in done.stdout and "| tests " in done.stdout


def test_the_log_is_what_was_printed(gpu, tmp_path):
    done, _, _ = gpu("--parts", "build main")
    assert (tmp_path / "a folder" / "out" / "gpu.log").read_text(encoding="utf-8") == done.stdout


def test_a_failure_costs_the_other_parts_nothing(gpu):
    done, content, _ = gpu("--parts", "build tests main sweep", plan="pytest|exit 3\n--shapes gpu|kill -9 $$\n")
    assert done.returncode == 1
    assert states(content) == {"build": "ok", "tests": "failed (3)", "main": "out of time", "sweep": "ok"}
    assert "| tests" in done.stdout and "failed (3)" in done.stdout


def test_parts_that_no_time_is_left_for_are_named(gpu):
    done, content, calls = gpu("--parts", "build main", LIGHTCONV_GPU_SECONDS="4")
    assert done.returncode == 1 and states(content) == {"build": "no time left", "main": "no time left"}
    assert not calls


def test_a_part_ends_when_the_time_of_all_does(gpu):
    done, content, _ = gpu("--parts", "tests main", plan="pytest|sleep 60\n", LIGHTCONV_GPU_SECONDS="6")
    assert done.returncode == 1 and states(content) == {"tests": "out of time", "main": "no time left"}


def test_peers_of_the_named_folders(gpu, tmp_path):
    folders = [tmp_path / name for name in ("fair seq", "dynamic", "jet")]
    for folder in folders:
        folder.mkdir()
    fairseq, dynamic, jet = folders
    named = ("--fairseq-source", fairseq, "--dynamic-conv1d", dynamic)
    done, content, calls = gpu("--parts", "short half", *named, JET_NEMOTRON=jet)
    assert done.returncode == 0, done.stdout
    short, half = [call for call in calls if "benchmarks.operators" in call]
    assert f"--dynamic-conv1d {dynamic} --jet-nemotron {jet}" in short and f"--fairseq-source {fairseq}" in half
    (prepared,) = [call for call in calls if "gpu_peers" in call]
    assert f"--fairseq-source {fairseq} --dynamic-conv1d {dynamic} --jet-nemotron {jet}" in prepared
    done, content, calls = gpu("--parts", "half", "--fairseq-source", fairseq, plan="gpu_peers|echo no nvcc; exit 1\n")
    assert done.returncode == 1 and "no nvcc" in done.stdout
    assert states(content) == {"peers": "failed", "half": "ok"}
    assert "--fairseq-source" not in calls[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--frobnicate"], "unknown argument --frobnicate"),
        (["--parts"], "--parts needs a value"),
        (["--parts", "build everything"], "--parts: everything is none of: build tests"),
        (["--jet-nemotron", "/nowhere"], "/nowhere is not a folder"),
    ],
)
def test_wrong_arguments(gpu, arguments, message):
    done, content, calls = gpu(*arguments)
    assert done.returncode == 2 and message in done.stderr and content is None and not calls


def test_no_gpu(repository, tmp_path):
    program = tmp_path / "python3"
    program.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    done = subprocess.run(
        [repository / "benchmarks" / "gpu.sh", "--out", tmp_path / "out"],
        env=os.environ | {"PYTHON": str(program)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "torch finds no CUDA device here" in done.stderr


@pytest.mark.parametrize("arguments", [["--frobnicate"], ["--out"]])
def test_wrong_arguments_of_the_cpus_script(repository, arguments):
    done = subprocess.run(
        [repository / "benchmarks" / "cpu.sh", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and arguments[0] in done.stderr


@pytest.mark.parametrize("name", ["cpu.sh", "gpu.sh", "gpu_fairseq.sh", "wheels.sh"])
def test_help(repository, name):
    done = subprocess.run([repository / "benchmarks" / name, "--help"], capture_output=True, text=True, check=True)
    assert f"benchmarks/{name} " in done.stdout
