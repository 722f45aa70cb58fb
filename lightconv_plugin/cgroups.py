"""The limits of a container or of a cluster's job on Linux: those of its control group (cgroup) and of those above."""

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # bytes; version 1 has a number without a limit, too


def cores() -> int:
    """The number of processors that this process may use."""
    there = len(os.sched_getaffinity(0))
    return min(there, cpu_limit() or there)


def cpu_limit() -> int | None:
    """The quota in processors, rounded up; None without one."""
    limits = []
    for folder in _folders("cpu"):
        with contextlib.suppress(OSError, ValueError):
            if (folder / "cpu.max").is_file():
                quota, period = (folder / "cpu.max").read_text("ascii").split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0:
                limits.append(math.ceil(int(quota) / int(period)))
    return min(limits, default=None)


def memory_limit() -> int | None:
    """The bytes that all processes of the group may have; None without a limit."""
    return min((limit for limit, _ in _memory()), default=None)


def memory_left() -> int | None:
    """The bytes that may still be allocated; None without a limit. Cached files give way, so they do not count."""
    return min((max(limit - used, 0) for limit, used in _memory()), default=None)


def _memory() -> Iterator[tuple[int, int]]:
    """(limit, use) in bytes of each group that has a limit."""
    for folder in _folders("memory"):
        with contextlib.suppress(OSError, ValueError):
            names = ("memory.max", "memory.current")
            if not (folder / names[0]).is_file():
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            most, used = ((folder / name).read_text("ascii").strip() for name in names)
            if most != "max" and int(most) < _UNLIMITED:
                statistics = (folder / "memory.stat").read_text("ascii")
                cached = re.search(r"^(?:total_)?inactive_file (\d+)$", statistics, re.MULTILINE)
                yield int(most), int(used) - (int(cached[1]) if cached else 0)


def _folders(controller: str) -> Iterator[Path]:
    """Of this process's group and of those above it; of version 2, and of a controller of version 1.

    A container sees its own group as the root, but may be told the path outside. Folders may therefore not exist.
    """
    try:
        lines = _OWN.read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            group = Path(path.lstrip("/"))
            root = _GROUPS if number == "0" else _GROUPS / controller
            yield from (root / part for part in (group, *group.parents))
