"""Obstacles on a machine: GPUs that torch cannot use, too little memory, no disk space for compiled kernels."""

import os
import re
import shutil
from pathlib import Path

from lightconv_plugin.cgroups import memory_left

DRIVER = Path("/proc/driver/nvidia/version")
MEMORY = Path("/proc/meminfo")
COMPILER_MEMORY = 2 << 30
"""Bytes of memory for two parallel compilers; the largest source files take about 0.6 GiB each."""
CACHE_ROOM = 200 << 20
"""Bytes of free disk space for compiling and storing the libraries."""


def driver() -> str:
    """Version of the loaded NVIDIA driver, "?" if it is unknown, empty without a driver."""
    try:
        text = DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", text)
    return found[1] if found else "?"


def gpu_problem() -> tuple[str, str] | None:
    """(why torch does not use the GPUs of a machine with an NVIDIA driver, the remedy); None if it does.

    GPUs hidden by CUDA_VISIBLE_DEVICES are not a problem.
    """
    import torch

    version = driver()
    if not version or os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            f"there is an NVIDIA driver ({version}), but torch {torch.__version__} is built without CUDA",
            "install a build of torch with CUDA",
        )
    try:
        torch.cuda.init()
        cause = "torch sees no device"
    except Exception as error:  # torch raises RuntimeError, AssertionError and its own types
        cause = " ".join(str(error).split()).partition(". ")[0]
    if cause.startswith(("torch sees no device", "No CUDA GPUs are available")):
        remedy = "ask the scheduler for a GPU (--gres=gpu:1), or check CUDA_VISIBLE_DEVICES"
    elif cause.startswith("Found no NVIDIA driver"):  # a container sees the host's /proc without its driver's libraries
        remedy = "start the container with its GPU option (--nv, or --gpus all), or install the driver's libraries"
    else:
        remedy = f"install a driver for CUDA {torch.version.cuda}, or a torch built for an older CUDA"
    return f"there is an NVIDIA driver ({version}), but torch {torch.__version__} cannot use it: {cause}", remedy


def kernel_bytes(path: Path, name: str) -> int | None:
    """The bytes of a line such as "VmRSS:   812 kB" of a file of the kernel; None if unknown."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(encoding="ascii"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) << 10 if found else None


def available_memory() -> int | None:
    """Bytes that programs can still allocate without swapping; None if unknown."""
    known = [size for size in (kernel_bytes(MEMORY, "MemAvailable"), memory_left()) if size is not None]
    return min(known, default=None)


def room(folder: Path) -> tuple[int, bool]:
    """(free bytes where `folder` is or would be created, whether it is writable)."""
    there = folder
    while not os.path.isdir(there) and there != there.parent:  # False if it may not be read
        there = there.parent
    return shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK)
