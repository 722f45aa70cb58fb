"""Describes the machine of a measurement, and chooses the device and threads."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.report import RESULTS, BenchmarkError
from lightconv_plugin import allocator
from lightconv_plugin.cgroups import cores
from lightconv_plugin.ops import backends, instructions

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# Environment variables that affect speed: threads, and whether freed memory is kept.
_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
    "LIGHTCONV_KEEP_MALLOC",
    "LIGHTCONV_BACKEND",
    "LD_PRELOAD",
    "LIGHTCONV_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "FBGEMM_ENABLE_INSTRUCTIONS",
    "CT2_FORCE_CPU_ISA",
)
_PEERS = ("fairseq", "fairseq-fixed", "transformers", "ctranslate2", "pymarian")
_PACKAGES = ("lightconv-plugin", *_PEERS, "triton", "numpy")


def hold(level: str) -> dict[str, str]:
    """The environment that limits our kernels, torch's, MKL, oneDNN, FBGEMM and CTranslate2 to an instruction set, a
    value of LIGHTCONV_CPU_ISA."""
    wide = level != "avx2"
    onednn = {"avx2": "AVX2", "avx512": "AVX512_CORE", "avx512_vnni": "AVX512_CORE_VNNI"}.get(level, "AVX512_CORE_BF16")
    return {
        "LIGHTCONV_CPU_ISA": level,
        "ATEN_CPU_CAPABILITY": "avx512" if wide else "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512" if wide else "AVX2",
        "ONEDNN_MAX_CPU_ISA": onednn,
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX512_VNNI"
        if level not in ("avx2", "avx512")
        else "AVX512"
        if wide
        else "AVX2",
        "CT2_FORCE_CPU_ISA": "AVX512" if wide else "AVX2",
    }


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """The command-line parser of `python -m benchmarks.PROGRAM`, with the options common to all benchmarks."""
    parser = report.parser(program, description)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of torch (default: as torch chooses)")
    parser.add_argument("--repeats", type=positive, metavar="N", help="rounds that are timed, after the warm-up")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few rounds: seconds, and no evidence")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write everything that was measured to FILE")
    return parser


def prepare(options: argparse.Namespace) -> torch.device:
    """Check the options of `parser`, set the threads and return the device."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("--device cuda: torch finds no CUDA device here")
    quick = getattr(options, "quick", False)  # `recipes` has no such option
    if quick and options.json is not None and options.json.resolve().is_relative_to(RESULTS):
        raise BenchmarkError("--quick is no evidence: give --json a file outside of benchmarks/results")
    if options.threads:
        torch.set_num_threads(options.threads)
    return torch.device(options.device)


def json_file(text: str) -> Path:
    """The value of --json: a file in a folder that exists, which is checked before anything is measured."""
    path = Path(text)
    if not path.resolve().parent.is_dir():
        raise BenchmarkError(f"--json: {path.resolve().parent} is not a folder")
    return path


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def describe(device: torch.device) -> dict:
    """The machine, the versions and the date, as stored in the JSON of every result.

    Loads our kernels (and compiles them if necessary), so that this is not part of any measured time.
    """
    try:
        backend = backends.backend(device.type)
    except (RuntimeError, ValueError) as error:
        raise BenchmarkError(str(error)) from error
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    description = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": instructions.cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "backend": backend,
        "simd": instructions.instruction_set() or torch.backends.cpu.get_cpu_capability(),
        "busy_cores": round(busy_cores(), 2),  # by other processes, at the start
        "versions": versions,
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    if backend == "cpu":
        description["allocator"] = allocator.keep_freed_memory().why
    if device.type == "cuda":
        description |= card(device)
    return description


def card(device: torch.device | str = "cuda") -> dict:
    """The GPU and its software, as stored in the JSON of every GPU result."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def headline(description: dict) -> str:
    """One line for the top of a table."""
    hardware = f"{description['cpu']}, {description['simd']}"
    if "gpu" in description:
        hardware = f"{description['gpu']}, driver {description['driver']}, CUDA {description['cuda']}"
    line = f"{hardware}; {description['threads']} threads on {description['cores']} cores"
    line += f"; torch {description['versions']['torch']}; {description['date']}"
    line += f"; our backend: {description['backend']}"
    if description["busy_cores"] > 0.3:
        line += f"\nwarning: other work keeps {description['busy_cores']} cores busy; these times mean little"
    return line


def busy_cores() -> float:
    """How many cores other processes keep busy, measured over half a second in which this process sleeps."""
    if not _STAT.exists():
        return os.getloadavg()[0]
    before = _ticks()
    time.sleep(0.5)
    idle, total = (after - then for after, then in zip(_ticks(), before, strict=True))
    return os.cpu_count() * (1 - idle / max(total, 1))


_STAT = Path("/proc/stat")


def _ticks() -> tuple[int, int]:
    """(idle ticks, all ticks) of all cores since the machine was started."""
    ticks = [int(field) for field in _STAT.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def _driver() -> str | None:
    """The version of the NVIDIA driver; None if nvidia-smi does not report it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def _commit() -> str | None:
    """The checkout's commit, with "+" if files differ from it; None without a repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
