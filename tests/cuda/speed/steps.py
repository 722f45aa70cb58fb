"""What instructions do that reach memory, or decide where a warp goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .listing import Instruction, Kernel, UnknownInstruction
from .operands import Value, predicate, put, words
from .operations import compiled

if TYPE_CHECKING:
    from .device import Warp

_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def _address(text: str) -> Value:
    """An address as [R2.64+UR4+0x10], without or behind a descriptor."""
    inner = text[text.rindex("[") + 1 : -1]
    terms: list[Value] = []
    for part in re.findall(r"-?[^+-]+", inner):
        if re.match(r"-?0x", part):
            offset = np.full(32, int(part, 16), dtype=np.int64)
            terms.append(lambda w, offset=offset: offset)
        else:
            low = words(part)
            scale = int(match[1]) if (match := re.search(r"\.X(\d+)", part)) else 1
            if ".64" in part:
                high = words(part, 1)
                terms.append(lambda w, a=low, b=high: a(w).astype(np.int64) | b(w).astype(np.int64) << 32)
            else:
                terms.append(lambda w, a=low, scale=scale: a(w).astype(np.int64) * scale)
    return lambda w: sum(term(w) for term in terms) + np.zeros(32, dtype=np.int64)


def _size(i: Instruction) -> int:
    return next((size for name, size in _SIZES.items() if name in i.modifiers), 4)


def step_of(i: Instruction, kernel: Kernel) -> tuple:
    """(guard or None, whether it decides where to go on, what it does)."""
    guard = None if i.guard is None else predicate(i.guard)
    if i.opcode in _CONTROL and not (i.opcode == "WARPSYNC" and "COLLECTIVE" in i.modifiers):
        return guard, True, _CONTROL[i.opcode](i, kernel)
    return guard, False, _MEMORY[i.opcode](i) if i.opcode in _MEMORY else compiled(i)


def _load(i: Instruction, shared: bool) -> Callable:
    size, at = _size(i), _address(i.operands[1])
    to = [put(i.operands[0], n) for n in range(max(1, size // 4))]
    signed = "S16" in i.modifiers or "S8" in i.modifiers

    def run(w: Warp, mask: np.ndarray) -> None:
        values = (w.load_shared if shared else w.load)(at(w) & (0xFFFFFFFF if shared else -1), size, mask)
        if signed:
            values = [(v.astype(np.int64) << 64 - 8 * size) >> 64 - 8 * size for v in values]
        for store, value in zip(to, values, strict=True):
            store(w, mask, value)

    return run


def _store(i: Instruction, shared: bool) -> Callable:
    size, at = _size(i), _address(i.operands[0])
    values = [words(i.operands[1], n) for n in range(max(1, size // 4))]

    def run(w: Warp, mask: np.ndarray) -> None:
        (w.store_shared if shared else w.store)(at(w) & (0xFFFFFFFF if shared else -1), size, mask,
                                                [value(w) for value in values])  # fmt: skip

    return run


def _ldgsts(i: Instruction) -> Callable:
    size, to, at = _size(i), _address(i.operands[0]), _address(i.operands[1])
    real = predicate(i.operands[2]) if len(i.operands) > 2 else None

    def run(w: Warp, mask: np.ndarray) -> None:
        reads = mask if real is None else mask & real(w)
        w.store_shared(to(w), size, mask, w.load(at(w), size, reads))

    return run


def _ldc(i: Instruction) -> Callable:
    size = _size(i)
    to = [put(i.operands[0], n) for n in range(max(1, size // 4))]
    values = [words(i.operands[1], n) for n in range(max(1, size // 4))]
    odd = int(re.search(r"(0x[0-9a-f]+)?\]$", i.operands[1])[1] or "0", 16) % 4

    def run(w: Warp, mask: np.ndarray) -> None:
        for store, value in zip(to, values, strict=True):
            word = value(w)
            if size < 4:
                word = word >> np.uint32(8 * odd) & np.uint32((1 << 8 * size) - 1)
            store(w, mask, word)

    return run


def _ldsm(i: Instruction) -> Callable:
    if i.modifiers[-1] != "4":
        raise UnknownInstruction(i)
    transposed, at, to = "MT88" in i.modifiers, _address(i.operands[1]), [put(i.operands[0], n) for n in range(4)]

    def run(w: Warp, mask: np.ndarray) -> None:
        if not mask.all():
            raise RuntimeError(f"lanes are missing: {i}")
        addresses = at(w)
        w.count_shared(addresses, 16, mask)
        rows = np.stack([w.block.shared[a : a + 16].view(np.uint16) for a in addresses]).astype(np.uint32)
        for n in range(4):
            matrix = rows[8 * n : 8 * n + 8]
            if transposed:
                matrix = matrix.T
            pairs = matrix[:, 0::2] | matrix[:, 1::2] << np.uint32(16)
            to[n](w, mask, np.ascontiguousarray(pairs).reshape(32))

    return run


_MEMORY = {
    "LDG": lambda i: _load(i, False),
    "LDS": lambda i: _load(i, True),
    "STG": lambda i: _store(i, False),
    "STS": lambda i: _store(i, True),
    "LDGSTS": _ldgsts,
    "LDSM": _ldsm,
    "LDC": _ldc,
    "ULDC": _ldc,
}


def _target(text: str, kernel: Kernel) -> int:
    """`(.L_x_7), or the kernel itself."""
    return kernel.labels.get(text.strip("`()"), 0)


def _branch(i: Instruction, kernel: Kernel) -> Callable:
    target = _target(i.operands[-1], kernel)
    more = predicate(i.operands[0]) if len(i.operands) > 1 and "DIV" not in i.modifiers else None

    def act(w: Warp, pc: int, mask: np.ndarray, active: np.ndarray) -> None:
        if "DIV" in i.modifiers:
            active = active & (mask != w.alive).any()
        taken = active if more is None else active & more(w)
        w.go(pc + 16, mask & ~taken)
        w.go(target, taken)

    return act


def _indexed(i: Instruction, kernel: Kernel) -> Callable:
    text, offset = re.match(r"(R\d+) (-?0x[0-9a-f]+)", i.operands[0]).groups() if i.opcode == "BRX" else ("", "0")
    low = words(text or i.operands[0].split()[0])

    def act(w: Warp, pc: int, mask: np.ndarray, active: np.ndarray) -> None:
        targets = low(w).view(np.int32).astype(np.int64) + (pc + 16 + int(offset, 16) if i.opcode == "BRX" else 0)
        w.go(pc + 16, mask & ~active)
        for target in np.unique(targets[active]):
            w.go(int(target), active & (targets == target))

    return act


def _exit(i: Instruction, kernel: Kernel) -> Callable:
    def act(w: Warp, pc: int, mask: np.ndarray, active: np.ndarray) -> None:
        w.alive = w.alive & ~active
        w.go(pc + 16, mask & ~active)

    return act


def _bssy(i: Instruction, kernel: Kernel) -> Callable:
    def act(w: Warp, pc: int, mask: np.ndarray, active: np.ndarray) -> None:
        w.barriers[i.operands[0]] = active.copy()
        w.go(pc + 16, mask)

    return act


def _break(i: Instruction, kernel: Kernel) -> Callable:
    name = i.operands[-1]

    def act(w: Warp, pc: int, mask: np.ndarray, active: np.ndarray) -> None:
        w.barriers[name] = w.barriers[name] & ~active
        w.go(pc + 16, mask)

    return act


def _waits(barrier: str | None) -> Callable:
    def make(i: Instruction, kernel: Kernel) -> Callable:
        def act(w: Warp, pc: int, mask: np.ndarray, active: np.ndarray) -> None:
            name = barrier or i.operands[0]
            if barrier == "warp" and not (mask ^ w.alive).any():
                w.go(pc + 16, mask)
                return
            w.wait(name, pc, active)
            w.go(pc + 16, mask & ~active)

        return act

    return make


_CONTROL = {
    "BRA": _branch,
    "CALL": _branch,
    "BRX": _indexed,
    "RET": _indexed,
    "EXIT": _exit,
    "BSSY": _bssy,
    "BSYNC": _waits(None),
    "BREAK": _break,
    "BAR": _waits("block"),
    "WARPSYNC": _waits("warp"),
}
