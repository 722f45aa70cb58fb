"""Whether the C library keeps freed memory for the next tensor.

glibc returns large blocks to the system as soon as they are freed, and the system zeroes their pages one by one at the
next use. A training step on a CPU frees and allocates hundreds of megabytes of logits and activations, and spends up to
a third of its time on that. So the plugin has glibc keep what was freed, once per process, when its CPU kernels are
loaded.

LIGHTCONV_KEEP_MALLOC=1 leaves malloc as it is, and so do settings of malloc's own (MALLOC_MMAP_THRESHOLD_,
MALLOC_TRIM_THRESHOLD_, GLIBC_TUNABLES with glibc.malloc).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_MOST = (1 << 31) - 1  # what an int holds
_OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


@dataclass(frozen=True)
class Allocator:
    """`keeps`: by this plugin, freed memory is kept. `why`: who decided so, for people."""

    keeps: bool
    why: str


_state: Allocator | None = None


def keep_freed_memory() -> Allocator:
    """Have malloc keep what is freed, unless the environment says otherwise; later calls change nothing."""
    global _state
    if _state is None:
        _state = _decide()
    return _state


def _decide() -> Allocator:
    value = os.environ.get("LIGHTCONV_KEEP_MALLOC") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"LIGHTCONV_KEEP_MALLOC must be 0, 1 or unset, got {value!r}")
    if value == "1":
        return Allocator(False, "malloc as it is, by LIGHTCONV_KEEP_MALLOC=1")
    if chosen := [name for name in _OWN if name in os.environ]:
        return Allocator(False, f"malloc as {' and '.join(chosen)} say")
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return Allocator(False, "malloc as GLIBC_TUNABLES says")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return Allocator(False, "malloc as it is: this C library has no mallopt")
    # Both or neither: a block that is not mapped but trimmed at once would gain nothing.
    if not (mallopt(_MMAP_THRESHOLD, _MOST) and mallopt(_TRIM_THRESHOLD, _MOST)):
        return Allocator(False, "malloc as it is: it refuses thresholds of this size")
    return Allocator(True, "freed memory is kept for the next tensor (LIGHTCONV_KEEP_MALLOC=1: malloc as it is)")
