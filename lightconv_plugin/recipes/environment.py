"""Settings of processes that compute. What the caller has set in the environment stays.

`python -m lightconv_plugin.recipes.environment` prints them, NAME=VALUE in each line.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from lightconv_plugin import allocator
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.steps import cores

# What hydra says of fairseq's use of it at every start; other warnings stay.
_HYDRA = ("hydra.main", "hydra._internal.hydra", "hydra.core.default_element", "__main__", "runpy")


def settings(threads: int | None = None, *, trains_on_cpu: bool = False) -> dict[str, str]:
    """Environment variables for a process that computes with so many threads (default: a thread for each core).

    Raises:
        InputError: LIGHTCONV_KEEP_MALLOC has an unknown value.
    """
    wanted = {
        "OMP_NUM_THREADS": str(threads or cores()),
        # Threads that spin while they wait are ruinous as soon as anything else runs on the cores.
        "OMP_WAIT_POLICY": "passive",
    }
    if trains_on_cpu:
        try:
            wanted |= allocator.preload()
        except ValueError as error:
            raise InputError(str(error)) from error
    ignored = "".join(f"ignore::UserWarning:{module}," for module in _HYDRA)
    warnings = ignored + os.environ.get("PYTHONWARNINGS", "").removeprefix(ignored)
    return {name: os.environ.get(name) or value for name, value in wanted.items()} | {"PYTHONWARNINGS": warnings}


@contextlib.contextmanager
def environment(threads: int | None = None, *, trains_on_cpu: bool = False) -> Iterator[None]:
    """Processes that are started within the block have these settings."""
    before = dict(os.environ)
    os.environ.update(settings(threads, trains_on_cpu=trains_on_cpu))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def compute_here() -> None:
    """The settings for this process and those it starts. To be called before torch, and with it OpenMP, is imported."""
    os.environ.update(settings())


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Nothing below a warning is logged within the block: fairseq has much to say while it is imported."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in settings().items()), sep="\n")
