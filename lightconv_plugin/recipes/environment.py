"""Environment variables for processes that compute. Variables that the caller has set are kept.

`python -m lightconv_plugin.recipes.environment` prints them, one NAME=VALUE per line.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from lightconv_plugin import allocator
from lightconv_plugin.cgroups import cores

# hydra's warnings about how fairseq uses it, at every start; other warnings stay enabled.
_HYDRA = ("hydra.main", "hydra._internal.hydra", "hydra.core.default_element", "__main__", "runpy")


def settings(threads: int | None = None, *, trains_on_cpu: bool = False) -> dict[str, str]:
    """Environment variables for a process that computes with `threads` threads (default: one per core)."""
    variables = {
        "OMP_NUM_THREADS": str(threads or cores()),
        # Threads that spin while waiting cost a lot of time as soon as anything else runs on the cores.
        "OMP_WAIT_POLICY": "passive",
    }
    if trains_on_cpu:
        variables |= allocator.preload()
    ignored = "".join(f"ignore::UserWarning:{module}," for module in _HYDRA)
    warnings = ignored + os.environ.get("PYTHONWARNINGS", "").removeprefix(ignored)
    return {name: os.environ.get(name) or value for name, value in variables.items()} | {"PYTHONWARNINGS": warnings}


@contextlib.contextmanager
def environment(threads: int | None = None, *, trains_on_cpu: bool = False) -> Iterator[None]:
    """Processes started within the block get these settings."""
    before = dict(os.environ)
    os.environ.update(settings(threads, trains_on_cpu=trains_on_cpu))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def compute_here() -> None:
    """Apply the settings to this process and those it starts. Call it before importing torch, which loads OpenMP."""
    os.environ.update(settings())


if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in settings().items()), sep="\n")
