"""Torch's number of threads, for the length of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Let torch use `number` threads within the block; None changes nothing. The number belongs to the process."""
    if number is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
