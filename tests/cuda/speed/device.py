"""Warps, branches and memory: executes blocks of a launch and counts what they do."""

from __future__ import annotations

import dataclasses
import struct
from collections import Counter
from collections.abc import Callable

import numpy as np

from .listing import Kernel
from .operands import LANES
from .steps import step_of

PARAMETERS_AT = 0x210  # in constant bank 0, on sm_90
SHARED_AT = 0x400  # the driver has the first KB of a block's shared memory
_PAGE = 1 << 16
_MOST_STEPS = 3_000_000  # of a warp: more is a loop that does not end


@dataclasses.dataclass
class Counts:
    """What blocks did: instructions that warps issued (by opcode too), accesses of shared memory, 32-byte sectors."""

    issued: int = 0
    wavefronts: int = 0
    read_sectors: int = 0
    written_sectors: int = 0
    opcodes: Counter[str] = dataclasses.field(default_factory=Counter)


class Memory:
    """Tensors at made-up addresses. content(address, count) gives the bytes of a page that nobody has written yet."""

    def __init__(self, content: Callable[[int, int], np.ndarray]) -> None:
        self.content = content
        self.pages: dict[int, np.ndarray] = {}

    def _page(self, number: int) -> np.ndarray:
        if number not in self.pages:
            self.pages[number] = self.content(number * _PAGE, _PAGE).copy()
        return self.pages[number]

    def read(self, address: int, size: int) -> np.ndarray:
        start = address % _PAGE
        return self._page(address // _PAGE)[start : start + size]

    def write(self, address: int, value: np.ndarray) -> None:
        start = address % _PAGE
        self._page(address // _PAGE)[start : start + len(value)] = value

    def values(self, address: int, count: int, dtype: type) -> np.ndarray:
        """Any stretch, across pages."""
        size = count * np.dtype(dtype).itemsize
        parts = []
        while size > 0:
            step = min(size, _PAGE - address % _PAGE)
            parts.append(self.read(address, step))
            address, size = address + step, size - step
        return np.concatenate(parts).view(dtype) if parts else np.zeros(0, dtype)


class Code:
    """A kernel, ready to run: for each instruction its guard and what it does."""

    def step(self, address: int) -> tuple:
        if address not in self.steps:
            self.steps[address] = step_of(self.kernel.code[address], self.kernel)
        return self.steps[address]

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.steps: dict[int, tuple] = {}
        self.names = {address: i.opcode for address, i in kernel.code.items()}


class Block:
    def __init__(self, code: Code, memory: Memory, grid: tuple[int, ...], threads: int, shared: int, number: int,
                 parameters: bytes, counts: Counts) -> None:  # fmt: skip
        self.code, self.memory, self.counts, self.number = code, memory, counts, number
        self.shared = np.full(SHARED_AT + shared + 16, 0xFF, dtype=np.uint8)
        bank = bytearray(PARAMETERS_AT + len(parameters) + 64)
        struct.pack_into("<6I", bank, 0, threads, 1, 1, *grid)
        bank[PARAMETERS_AT : PARAMETERS_AT + len(parameters)] = parameters
        self.banks = {0: np.frombuffer(bytes(bank[: len(bank) // 4 * 4]), dtype=np.uint32)}
        for bank_number, data in code.kernel.banks.items():
            self.banks[bank_number] = np.frombuffer(data[: len(data) // 4 * 4], dtype=np.uint32)
        self.warps = [Warp(self, first, min(32, threads - first)) for first in range(0, threads, 32)]

    def run(self) -> None:
        while True:
            for warp in self.warps:
                warp.run()
            if all(not warp.alive.any() for warp in self.warps):
                return
            for warp in self.warps:
                warp.pass_barrier()


class Warp:
    """Lanes with one program counter are a part; the part with the lowest goes on, and parts that meet join."""

    def __init__(self, block: Block, first: int, lanes: int) -> None:
        self.block = block
        self.R = np.zeros((256, 32), dtype=np.uint32)
        self.P = np.ones((8, 32), dtype=bool)
        self.U = np.zeros((64, 32), dtype=np.uint32)
        self.UP = np.ones((8, 32), dtype=bool)
        self.zeros = np.zeros(32, dtype=np.uint32)
        self.alive = lanes > LANES
        self.first = first
        self.parts: list[tuple[int, np.ndarray]] = [(0, self.alive.copy())]
        self.waiting: dict[tuple[str, int], np.ndarray] = {}  # (barrier, where): lanes
        self.barriers: dict[str, np.ndarray] = {}
        self._constants: dict[tuple[int, int], np.ndarray] = {}

    def constant(self, bank: int, offset: int) -> np.ndarray:
        key = (bank, offset)
        if key not in self._constants:
            self._constants[key] = np.full(32, self.block.banks[bank][offset // 4], dtype=np.uint32)
        return self._constants[key]

    def constants(self, bank: int, offsets: np.ndarray) -> np.ndarray:
        data = self.block.banks[bank]
        return data[np.clip((offsets & 0xFFFFFFFF) // 4, 0, len(data) - 1)]

    def special(self, name: str) -> np.ndarray:
        values = {"SR_TID.X": self.first + LANES, "SR_LANEID": LANES, "SR_CTAID.X": LANES * 0 + self.block.number}
        return values.get(name, LANES * 0).astype(np.uint32)

    # ---------------------------------------------------------------------------------------- control

    def run(self) -> None:
        """Until all lanes have ended, or wait for the other warps."""
        steps, counts, names = self.block.code.steps, self.block.counts, self.block.code.names
        for _ in range(_MOST_STEPS):
            if not self.parts:
                if not self._release():
                    return
                continue
            pc, mask = self.parts[0] if len(self.parts) == 1 else self._lowest()
            counts.issued += 1
            counts.opcodes[names[pc]] += 1
            guard, control, act = steps.get(pc) or self.block.code.step(pc)
            active = mask if guard is None else mask & guard(self)
            if control:
                self.parts.pop(0)
                act(self, pc, mask, active)
                continue
            if guard is None or active.any():
                act(self, active)
            self.parts[0] = (pc + 16, mask)
        raise RuntimeError("a warp does not come to an end")

    def _lowest(self) -> tuple[int, np.ndarray]:
        self.parts.sort(key=lambda part: part[0])
        while len(self.parts) > 1 and self.parts[0][0] == self.parts[1][0]:
            _, other = self.parts.pop(1)
            self.parts[0] = (self.parts[0][0], self.parts[0][1] | other)
        return self.parts[0]

    def go(self, pc: int, mask: np.ndarray) -> None:
        if mask.any():
            self.parts.insert(0, (pc, mask))

    def wait(self, barrier: str, pc: int, mask: np.ndarray) -> None:
        if mask.any():
            key = (barrier, pc)
            self.waiting[key] = self.waiting.get(key, np.zeros(32, dtype=bool)) | mask

    def _release(self) -> bool:
        """Lets those go on for whom nobody is missing any more; whether there are any."""
        for (barrier, pc), lanes in list(self.waiting.items()):
            wanted = self.alive if barrier in ("warp", "block") else self.barriers[barrier] & self.alive
            if barrier == "block" or (wanted & ~lanes).any():
                continue
            del self.waiting[barrier, pc]
            self.go(pc + 16, lanes)
            return True
        if self.waiting and {barrier for barrier, _ in self.waiting} != {"block"}:
            raise RuntimeError(f"lanes wait for each other: {self.waiting}")
        return False

    def pass_barrier(self) -> None:
        lanes = np.zeros(32, dtype=bool)
        pcs = {pc for _, pc in self.waiting}
        for mask in self.waiting.values():
            lanes |= mask
        if (lanes != self.alive).any() or len(pcs) > 1:
            raise RuntimeError("lanes disagree about a barrier of the block")
        self.waiting.clear()
        if lanes.any():
            self.go(pcs.pop() + 16, lanes)

    # ---------------------------------------------------------------------------------------- memory

    def count_shared(self, addresses: np.ndarray, size: int, mask: np.ndarray) -> None:
        """Wavefronts: as many words of one bank as differ, for each 128 bytes that the lanes want."""
        lanes_at_once = 32 if size <= 4 else 128 // size
        for first in range(0, 32, lanes_at_once):
            those = addresses[first : first + lanes_at_once][mask[first : first + lanes_at_once]]
            if len(those):
                wanted = np.unique((those[:, None] // 4 + np.arange(max(size // 4, 1))).ravel())
                self.block.counts.wavefronts += int(np.bincount(wanted % 32).max())

    def load_shared(self, addresses: np.ndarray, size: int, mask: np.ndarray) -> list[np.ndarray]:
        self.count_shared(addresses, size, mask)
        shared = self.block.shared
        at = np.where(mask, addresses, SHARED_AT)
        if size < 4:
            return [sum(shared[at + n].astype(np.uint32) << np.uint32(8 * n) for n in range(size))]
        return [shared.view(np.uint32)[at // 4 + n] for n in range(size // 4)]

    def store_shared(self, addresses: np.ndarray, size: int, mask: np.ndarray, values: list[np.ndarray]) -> None:
        self.count_shared(addresses, size, mask)
        at, shared = addresses[mask], self.block.shared
        if size < 4:
            for n in range(size):
                shared[at + n] = (values[0][mask] >> np.uint32(8 * n)).astype(np.uint8)
        else:
            for n in range(size // 4):
                shared.view(np.uint32)[at // 4 + n] = values[n][mask]

    def load(self, addresses: np.ndarray, size: int, mask: np.ndarray) -> list[np.ndarray]:
        which = np.flatnonzero(mask)
        self.block.counts.read_sectors += len({int(addresses[n]) // 32 for n in which})
        data = np.zeros((32, max(size, 4)), dtype=np.uint8)
        for n in which:
            data[n, :size] = self.block.memory.read(int(addresses[n]), size)
        return list(np.ascontiguousarray(data.view(np.uint32).T))

    def store(self, addresses: np.ndarray, size: int, mask: np.ndarray, values: list[np.ndarray]) -> None:
        which = np.flatnonzero(mask)
        self.block.counts.written_sectors += len({int(addresses[n]) // 32 for n in which})
        data = np.ascontiguousarray(np.stack(values, axis=1)).view(np.uint8)
        for n in which:
            self.block.memory.write(int(addresses[n]), data[n, :size])
