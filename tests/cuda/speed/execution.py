"""Executes some blocks of a call's launches on made-up tensors."""

from __future__ import annotations

import functools

import numpy as np

from .device import Block, Code, Counts, Memory, Warp
from .floats import narrowed, widened
from .launches import TYPES, Call, Launch, find

X, WEIGHT, OUT, GRAD, DX, DWEIGHT, WORKSPACE, SEED, RIGHT, DRIGHT = range(10)  # as in launches.cpp
LEFT, DLEFT = WEIGHT, DWEIGHT
_RANDOM = (X, WEIGHT, GRAD, RIGHT)


def base(tensor: int) -> int:
    """A tensor's address."""
    return (tensor + 1) << 40


def memory_for(call: Call) -> Memory:
    """x, weight and grad are normal numbers, talkconv's offsets anything from 0 to 1, the same for an address in every
    run; all else is zero."""

    def content(address: int, count: int) -> np.ndarray:
        tensor = (address >> 40) - 1
        if tensor not in _RANDOM:
            return np.full(count, 7 if tensor == SEED and address == base(SEED) else 0, dtype=np.uint8)
        random = np.random.default_rng(address)
        made = random.random if call.talk and tensor in (LEFT, RIGHT) else random.standard_normal
        values = made(count // 2).astype(np.float32)
        if TYPES[call.type] == "float32":
            return values[: count // 4].view(np.uint8)
        return narrowed(values, TYPES[call.type] == "bfloat16").astype(np.uint16).view(np.uint8)

    return Memory(content)


def values(call: Call, memory: Memory, tensor: int, first: int, count: int) -> np.ndarray:
    """`count` numbers of a tensor, from the first-th on, as float64."""
    kind = TYPES[call.type]
    if kind == "float32":
        return memory.values(base(tensor) + 4 * first, count, np.float32).astype(np.float64)
    return widened(memory.values(base(tensor) + 2 * first, count, np.uint16), kind == "bfloat16").astype(np.float64)


@functools.cache
def _code(kernel_name: str, launch_kernel: Launch) -> tuple[Code, int]:
    kernel, registers = find(launch_kernel)
    return Code(kernel), registers


def code_of(launch: Launch) -> tuple[Code, int]:
    """The kernel and its registers."""
    return _code(launch.kernel, launch)


def execute(launch: Launch, numbers: list[int], memory: Memory) -> Counts:
    """Runs these blocks."""
    code, _ = code_of(launch)
    counts = Counts()
    with np.errstate(all="ignore"):
        for number in numbers:
            grid = (launch.blocks, 1, 1)
            Block(code, memory, grid, launch.threads, launch.shared, number, launch.parameters, counts).run()
    return counts


__all__ = ["Counts", "Warp", "base", "code_of", "execute", "memory_for", "values"]
