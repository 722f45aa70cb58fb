"""The seconds of gpu.sh and gpu_fairseq.sh: a dry run in which everything sleeps, and a call that is killed."""

import json
import sys
import time
import types

import pytest
import torch

from tests import programs
from tests.benchmarks.conftest import states

CALLS = [
    ("gpu", "correctness"),
    ("gpu", "timing"),
    ("gpu_fairseq", "timing"),
    ("gpu_fairseq", "steps"),
    ("gpu_fairseq", "compile"),
    ("gpu_fairseq", "generation"),
    ("gpu_fairseq", "recipes"),
    ("gpu_fairseq", "rows"),
]
SECONDS = 25  # of a dry run
LATE = 2.5  # seconds that the bookkeeping of a whole dry run may take on a busy machine


def shares(repository, script, call):
    lines = programs.run(repository / "benchmarks" / f"{script}.sh", call, "--plan").stdout.splitlines()
    found = {line.split()[0]: int(line.split()[1]) for line in lines}
    total = found.pop("total")
    assert total == sum(found.values())
    return found, total


@pytest.mark.parametrize(("script", "call"), CALLS, ids="-".join)
def test_every_part_can_take_its_time_within_nine_minutes(repository, script, call):
    _, total = shares(repository, script, call)
    assert total <= 500  # with half a minute for the tables, and for what does not end at once


@pytest.fixture
def peers(tmp_path):
    options = []
    for name in ("fairseq-source", "dynamic-conv1d", "jet-nemotron"):
        (tmp_path / name).mkdir()
        options += [f"--{name}", tmp_path / name]
    return options


@pytest.mark.long
def test_when_everything_sleeps_each_part_gets_its_share(stand_in, repository, peers):
    """No part takes from another: all are ended at their time, and what each wrote before is there."""
    share, total = shares(repository, "gpu", "timing")
    begin = time.monotonic()
    plan = "-m benchmarks.operators|exec sleep 100\n-c |exec sleep 100\n"
    _, content, _ = stand_in("gpu", "timing", *peers, plan=plan, LIGHTCONV_GPU_SECONDS=SECONDS, status=1)
    assert time.monotonic() - begin < SECONDS + LATE + 5  # 5: the last tables import torch
    took = {part["name"]: part["seconds"] for part in content["parts"]}
    assert {part["status"] for part in content["parts"]} == {"out of time"}
    assert list(took) == list(share) and set(content["results"]) == set(share) - {"build"}
    for name, seconds in took.items():
        assert seconds <= share[name] * SECONDS / total + LATE, took
    assert sum(took.values()) <= SECONDS + LATE


def test_what_a_part_does_not_need_the_next_one_has(stand_in, repository):
    share, total = shares(repository, "gpu_fairseq", "generation")
    plan = "benchmarks.generation|exec sleep 100\n"
    environment = {"LIGHTCONV_GPU_SECONDS": 10, "FAIRSEQ_MISSING": 0}
    _, content, _ = stand_in("gpu_fairseq", "generation", plan=plan, status=1, **environment)
    took = {part["name"]: (part["status"], part["seconds"]) for part in content["parts"]}
    assert [status for status, _ in took.values()] == ["ok", "ok", "out of time", "out of time", "not here"]
    before = took["environment"][1] + took["build"][1]
    mine = (share["environment"] + share["build"] + share["generation"]) * 10 / total
    assert share["generation"] * 10 / total + 1 < took["generation"][1] <= mine - before + 1
    assert set(content["results"]) == {"generation", "ctranslate2"}


def test_too_little_time_is_said(stand_in):
    plan = "-c |exec sleep 100\n"
    _, content, _ = stand_in(
        "gpu", "correctness", "--parts", "build tests", plan=plan, LIGHTCONV_GPU_SECONDS="0", status=1
    )
    assert states(content) == dict.fromkeys(["build", "tests"], "no time left")


def test_a_call_that_is_killed_leaves_the_results_of_its_parts(stand_in, tmp_path):
    """Those before in the JSON, and what the last one had written beside it: benchmarks.collect puts them together."""
    plan = "--shapes sweep|exec sleep 100\n"
    done, content, _ = stand_in("gpu", "timing", "--parts", "build main short sweep", plan=plan, timeout=8)
    assert done is None
    assert states(content) == dict.fromkeys(["build", "main", "short"], "ok")
    assert set(content["results"]) == {"main", "short"}
    out = tmp_path / "a folder" / "out"
    assert json.loads((out / "gpu_timing.parts" / "json" / "sweep.json").read_text(encoding="utf-8"))["cases"]
    from benchmarks import collect

    collect.main([str(out / "gpu_timing.parts"), str(out / "gpu_timing.json")])
    content = json.loads((out / "gpu_timing.json").read_text(encoding="utf-8"))
    assert content["parts"][-1]["status"] == "cut off" and set(content["results"]) == {"main", "short", "sweep"}


def test_the_build_part_finds_the_kernels(repository):
    """Its Python is text in a shell script, which no tool checks: here it runs, for the CPU's kernels."""
    command = ("bash", "-c", "source benchmarks/gpu_lib.sh; build cpu")
    done = programs.run(*command, cwd=repository, timeout=600, PYTHON=sys.executable)
    assert "lightconv_cpu.so: built and loaded in" in done.stdout


def test_the_file_names_the_card(tmp_path, monkeypatch, capsys):
    """Also that of the tests alone, where no benchmark says what it ran on."""
    from benchmarks import collect, machine

    (tmp_path / "json").mkdir()
    (tmp_path / "parts").write_text("tests\tok\t65.7\n", encoding="utf-8")
    properties = types.SimpleNamespace(name="A Card", total_memory=2**34, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(machine, "_driver", lambda: "570.1")
    for options in ([], ["--print"]):
        collect.main([str(tmp_path), str(tmp_path / "gpu_correctness.json"), *options])
        content = json.loads((tmp_path / "gpu_correctness.json").read_text(encoding="utf-8"))
        assert [part["name"] for part in content["parts"]] == ["tests"]
        assert ("gpu" in content) == bool(options)
    assert (content["gpu"], content["compute_capability"], content["driver"]) == ("A Card", "9.0", "570.1")
    assert "tests" in capsys.readouterr().out
