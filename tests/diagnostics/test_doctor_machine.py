"""What `lightconv doctor` says about the machine, and a training before it starts on the wrong processors."""

from types import SimpleNamespace

import pytest
import torch

from lightconv_plugin.diagnostics import checks, machine
from lightconv_plugin.ops import artifacts
from lightconv_plugin.recipes.training.plan import count_gpus

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    "http://www.nvidia.com/Download/index.aspx"
)
VERSION = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021\n"
    "GCC version:  gcc version 9.4.0\n"
)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache of kernels that is yet to be made."""
    folder = tmp_path / "not/made/yet"
    monkeypatch.setattr(artifacts, "cache_folder", lambda: folder)
    return folder


def findings(status):
    report = checks.DoctorReport()
    checks._machine(report)
    return {finding.name: finding for finding in report.findings if finding.status == status}


@pytest.fixture
def with_driver(monkeypatch, tmp_path):
    """A machine with an NVIDIA driver, none of whose GPUs torch, built with CUDA, can use: `init` says why."""

    def make(init=lambda: None, cuda="13.0", text=VERSION):
        (tmp_path / "version").write_text(text)
        monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", init)

    return make


def failing(message):
    def init():
        raise RuntimeError(message)

    return init


too_old = failing(TOO_OLD)


@pytest.mark.parametrize(
    "options, said, remedy",
    [
        (
            {"init": too_old},
            "driver (470.57.02), but torch {} cannot use it: The NVIDIA driver on your system is too old (found "
            "version 11040)",
            "install a driver for CUDA 13.0, or a torch built for an older CUDA",
        ),
        ({}, "cannot use it: torch sees no device", "ask the scheduler for a GPU (--gres=gpu:1), or check CUDA_VIS"),
        (
            {"init": failing("No CUDA GPUs are available")},
            "cannot use it: No CUDA GPUs are available",
            "ask the scheduler for a GPU (--gres=gpu:1), or check CUDA_VISIBLE_DEVICES",
        ),
        (
            {"init": failing(NO_DRIVER)},
            "cannot use it: Found no NVIDIA driver on your system",
            "start the container with its GPU option (--nv, or --gpus all), or install the driver's libraries",
        ),
        ({"cuda": None}, "torch {} is built without CUDA", "install a build of torch with CUDA"),
        ({"init": too_old, "text": "something else\n"}, "there is an NVIDIA driver (?), but", "install a driver"),
    ],
    ids=["old", "no-device", "no-device-of-the-job", "container", "cpu-build", "unreadable"],
)
def test_gpus_that_torch_cannot_use(options, said, remedy, with_driver):
    with_driver(**options)
    finding = findings(checks.WARNING)["GPUs"]
    assert said.format(torch.__version__) in finding.detail and "\n" not in finding.detail
    assert finding.remedy.startswith(remedy)
    with pytest.raises(ValueError, match=r"there is an NVIDIA driver .*, or train on the CPU: common.cpu=true"):
        count_gpus()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_are_not_missed(hidden, with_driver, monkeypatch):
    with_driver(too_old)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert "GPUs" not in findings(checks.WARNING)
    assert count_gpus() == torch.cuda.device_count()


def test_no_gpu_is_no_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert machine.driver() == "" and "GPUs" not in findings(checks.WARNING)


@pytest.mark.parametrize("kib, short", [(1 << 20, True), (2 << 20, False), (64 << 20, False)])
def test_memory(kib, short, monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text(f"MemTotal:       99999999 kB\nMemFree: 1 kB\nMemAvailable:   {kib} kB\n")
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    warnings = findings(checks.WARNING)
    assert ("memory" in warnings) == short
    if short:
        assert warnings["memory"].detail == "1024 MiB available, compilation needs 2048"
        assert "MAX_JOBS=1" in warnings["memory"].remedy
    monkeypatch.setattr(artifacts, "find", lambda kind: tmp_path)  # nothing is left to compile
    assert "memory" not in findings(checks.WARNING) and "memory" in findings(checks.INFO)


@pytest.mark.parametrize("text", [None, "", "MemAvailable: much\n"], ids=["none", "empty", "odd"])
def test_a_system_that_does_not_say_its_memory(text, monkeypatch, tmp_path):
    path = tmp_path / "meminfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(machine, "MEMORY", path)
    assert machine.available_memory() is None
    assert "memory" not in findings(checks.WARNING)


def test_a_full_disk_and_a_cache_that_cannot_be_written(cache, monkeypatch, tmp_path):
    assert "kernel cache" not in findings(checks.WARNING)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    finding = findings(checks.WARNING)["kernel cache"]
    assert finding.detail == f"5 MiB free at {cache}, compilation needs 200" and "free disk space" in finding.remedy
    monkeypatch.setattr(machine.os, "access", lambda path, mode: path != tmp_path)
    assert findings(checks.WARNING)["kernel cache"].detail == f"{cache} is not writable"
    assert not cache.parent.exists()
