"""The memory allocator for CPU tensors, and whether it keeps freed memory for the next tensor.

glibc returns large blocks to the system as soon as they are freed, and the system zeroes their pages one by one at the
next use. A training step on a CPU frees and allocates hundreds of megabytes of logits and activations, and spends up to
a third of its time on that. So the plugin makes glibc keep freed memory, once per process, when the CPU kernels are
loaded.

Even then, glibc spends a tenth of a long training on searching the blocks that it kept. tcmalloc does not, and uses
half the memory. It must be loaded when a process starts, so `preload` adds it for trainings started by the plugin.

LIGHTCONV_KEEP_MALLOC=1 leaves malloc unchanged, and so do malloc's own settings (MALLOC_MMAP_THRESHOLD_,
MALLOC_TRIM_THRESHOLD_, GLIBC_TUNABLES with glibc.malloc), and for `preload` also LD_PRELOAD.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from lightconv_plugin.errors import VariableError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from malloc.h
_MOST = (1 << 31) - 1  # the largest int
_OLD_MOST = 32 << 20  # the largest threshold that older versions of glibc accept: half of a heap
_OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
# A function that exists only in this library.
_OTHERS = {"tc_malloc": "tcmalloc", "mallctl": "jemalloc", "mi_malloc": "mimalloc"}


@dataclass(frozen=True)
class Allocator:
    """`keeps`: this plugin has made malloc keep freed memory. `why`: a readable reason."""

    keeps: bool
    why: str


_state: Allocator | None = None


def keep_freed_memory() -> Allocator:
    """Make malloc keep freed memory, unless the environment says otherwise; later calls change nothing."""
    global _state
    if _state is None:
        _state = _decide()
    return _state


def find_tcmalloc() -> str | None:
    """The library to preload, from this Python's environment or from the system; None if there is none."""
    for name in ("tcmalloc_minimal", "tcmalloc"):
        inside = sorted(map(str, Path(sys.prefix, "lib").glob(f"lib{name}.so*")))
        if inside and not re.search(r"[\s:]", inside[0]):  # where the loader splits LD_PRELOAD
            return inside[0]
        if found := ctypes.util.find_library(name):
            return found
    return None


def preload() -> dict[str, str]:
    """Environment variables that make a process training on a CPU use tcmalloc.

    Empty if tcmalloc is not installed, or if the environment says otherwise.
    """
    library = find_tcmalloc() if _undecided() else None
    # Otherwise, it prints a message for each block of 1 GB or more, such as the logits of a large batch.
    return {"LD_PRELOAD": library, "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(1 << 50)} if library else {}


def advice() -> str:
    """What to install for trainings on a CPU, and what it brings; "" if the environment has or names an allocator."""
    if not _undecided() or find_tcmalloc():
        return ""
    return (
        "tcmalloc is not installed: with it, training on a CPU is about 15 % faster and takes half the memory "
        "(Debian, Ubuntu: apt install libtcmalloc-minimal4)"
    )


def _undecided() -> bool:
    """Whether another allocator could be preloaded, and the environment says nothing about it."""
    return sys.platform.startswith("linux") and "LD_PRELOAD" not in os.environ and users_choice() is None


def users_choice() -> Allocator | None:
    """What the environment says about malloc; None if it says nothing.

    Raises VariableError for an unknown value of LIGHTCONV_KEEP_MALLOC.
    """
    value = os.environ.get("LIGHTCONV_KEEP_MALLOC") or "0"
    if value not in ("0", "1"):
        raise VariableError(f"LIGHTCONV_KEEP_MALLOC must be 0, 1 or unset, got {value!r}")
    if value == "1":
        return Allocator(False, "malloc as it is, by LIGHTCONV_KEEP_MALLOC=1")
    if chosen := [name for name in _OWN if name in os.environ]:
        return Allocator(False, f"malloc as {' and '.join(chosen)} say")
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return Allocator(False, "malloc as GLIBC_TUNABLES says")
    return None


def _decide() -> Allocator:
    if (chosen := users_choice()) is not None:
        return chosen
    process = ctypes.CDLL(None)
    if other := next((name for function, name in _OTHERS.items() if hasattr(process, function)), None):
        return Allocator(False, f"{other}, which is preloaded")
    mallopt = getattr(process, "mallopt", None)
    if mallopt is None:
        return Allocator(False, "malloc as it is: this C library has no mallopt")
    for most, blocks in ((_MOST, ""), (_OLD_MOST, ", in blocks of up to 32 MiB,")):
        # Both are needed: an unmapped block that is trimmed at once would gain nothing.
        if mallopt(_MMAP_THRESHOLD, most) and mallopt(_TRIM_THRESHOLD, _MOST):
            why = f"freed memory is kept{blocks} for the next tensor (LIGHTCONV_KEEP_MALLOC=1: malloc as it is)"
            return Allocator(True, why)
    return Allocator(False, "malloc as it is: it refuses thresholds of this size")
