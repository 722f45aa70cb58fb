"""What stands in a result about the GPU it was measured on."""

import json
import os

import pytest
import torch

from benchmarks import kernel_schedules, machine, pareto, preparation, rows, tables
from benchmarks.report import RESULTS, BenchmarkError
from lightconv_plugin import cgroups


def nvidia_smi(monkeypatch, folder, script):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_driver_is_what_nvidia_smi_says(monkeypatch, tmp_path):
    nvidia_smi(monkeypatch, tmp_path, "printf '600.12.3\\n600.12.3\\n'")
    assert machine._driver() == "600.12.3"


def test_no_driver(monkeypatch, tmp_path):
    nvidia_smi(monkeypatch, tmp_path, "echo no devices; exit 6")
    assert machine._driver() is None
    nvidia_smi(monkeypatch, tmp_path, "true")
    assert machine._driver() is None
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert machine._driver() is None


def test_a_gpus_result_names_card_driver_and_versions(monkeypatch, tmp_path):
    nvidia_smi(monkeypatch, tmp_path, "echo 600.12.3")
    properties = type("Properties", (), {"name": "A card", "total_memory": 8, "major": 9, "minor": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(machine.backends, "backend", lambda kind: kind)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    description = machine.describe(torch.device("cuda"))
    found = {key: description[key] for key in ("gpu", "driver", "cuda", "compute_capability", "backend")}
    assert found == {
        "gpu": "A card",
        "driver": "600.12.3",
        "cuda": "13.0",
        "compute_capability": "9.0",
        "backend": "cuda",
    }
    assert description["versions"]["torch"] == torch.__version__
    assert machine.headline(description).startswith("A card, driver 600.12.3, CUDA 13.0; ")


def test_cores_are_those_of_a_containers_quota(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cgroups, "cpu_limit", lambda: 3)
    monkeypatch.setattr(machine.backends, "backend", lambda kind: "reference")
    assert machine.describe(torch.device("cpu"))["cores"] == 3
    assert preparation.parser().parse_args([]).workers == 3


def test_a_quick_run_is_no_evidence(tmp_path, monkeypatch):
    """Neither does it replace a measurement, nor does a page show it."""
    parser = machine.parser("apart", "")
    for option, allowed in ((["--quick"], False), ([], True)):
        options = parser.parse_args([*option, "--json", str(RESULTS / "cpu_operators.json")])
        if allowed:
            assert machine.prepare(options).type == "cpu"
        else:
            with pytest.raises(BenchmarkError, match="--json a file outside of benchmarks/results"):
                machine.prepare(options)
    (tmp_path / "some.json").write_text(json.dumps({"quick": True}), encoding="utf-8")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    with pytest.raises(BenchmarkError, match=r"some\.json was measured with --quick"):
        tables.load.__wrapped__("some")


@pytest.mark.parametrize("program", [kernel_schedules, pareto, preparation, rows])
def test_where_the_result_goes_is_checked_before_the_work(program):
    with pytest.raises(BenchmarkError, match="--json: /nowhere is not a folder"):
        program.parser().parse_args(["--json", "/nowhere/result.json"])
