"""What SASS instructions compute, as far as the kernels use them (sm_90).

integers.py and floats.py have those that every lane executes for itself, this file those of the whole warp.

`compiled(instruction)` gives a function of a warp and a mask of 32 lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import integers  # noqa: F401 (fills OPERATIONS, as floats does)
from .floats import widened
from .listing import UnknownInstruction
from .operands import (
    LANES,
    OPERATIONS,
    Run,
    integer,
    is_predicate,
    operation,
    predicate,
    put,
    put_predicate,
    simple,
    words,
)

if TYPE_CHECKING:
    from .device import Warp
    from .listing import Instruction


def compiled(instruction: Instruction) -> Run:
    if instruction.opcode not in OPERATIONS:
        raise UnknownInstruction(instruction)
    return OPERATIONS[instruction.opcode](instruction)


@operation("S2R", "S2UR")
def _s2r(i: Instruction) -> Run:
    to, name = put(i.operands[0]), i.operands[1]
    return lambda w, mask: to(w, mask, w.special(name))


@operation("CS2R")
def _cs2r(i: Instruction) -> Run:
    if i.operands[1] != "SRZ":
        raise UnknownInstruction(i)
    to = [put(i.operands[0], part) for part in range(1 if "32" in i.modifiers else 2)]

    def run(w: Warp, mask: np.ndarray) -> None:
        for each in to:
            each(w, mask, w.zeros)

    return run


@operation("R2UR")
def _r2ur(i: Instruction) -> Run:
    return simple(i, lambda a: a, words)


@operation("P2R")
def _p2r(i: Instruction) -> Run:
    to, other, mask_of = put(i.operands[0]), integer(i.operands[2]), int(i.operands[3], 16)

    def run(w: Warp, mask: np.ndarray) -> None:
        bits = sum(w.P[n].astype(np.int64) << n for n in range(7))
        to(w, mask, bits & mask_of | other(w) & ~mask_of)

    return run


@operation("R2P")
def _r2p(i: Instruction) -> Run:
    # R5.B2: from the register's third byte.
    source, _, byte = i.operands[1].partition(".B")
    value, mask_of, shift = integer(source), int(i.operands[2], 16), 8 * int(byte or 0)

    def run(w: Warp, mask: np.ndarray) -> None:
        bits = value(w) >> shift
        for n in range(7):
            if mask_of >> n & 1:
                np.copyto(w.P[n], (bits >> n & 1).astype(bool), where=mask)

    return run


@operation("SHFL")
def _shfl(i: Instruction) -> Run:
    flag, to = put_predicate(i.operands[0]), put(i.operands[1])
    value, by, clamp = words(i.operands[2]), integer(i.operands[3]), integer(i.operands[4])

    def run(w: Warp, mask: np.ndarray) -> None:
        b, c = by(w) & 31, clamp(w)
        segment = c >> 8 & 31
        most = (LANES & segment) | (c & 31 & ~segment)
        if i.modifiers[0] == "IDX":
            source = (LANES & segment) | (b & ~segment)
            inside = source <= most
        elif i.modifiers[0] == "UP":
            source = LANES - b
            inside = source >= most
        elif i.modifiers[0] == "DOWN":
            source = LANES + b
            inside = source <= most
        else:
            source = LANES ^ b
            inside = source <= most
        to(w, mask, value(w)[np.where(inside, source, LANES)])
        flag(w, mask, inside)

    return run


@operation("VOTE", "VOTEU")
def _vote(i: Instruction) -> Run:
    *results, given = i.operands
    value = predicate(given)
    stores = [(is_predicate(text), put_predicate(text) if is_predicate(text) else put(text)) for text in results]

    def run(w: Warp, mask: np.ndarray) -> None:
        holds = value(w) & mask
        every = (holds == mask).all() if i.modifiers[0] == "ALL" else holds.any()
        ballot = int(sum(1 << int(n) for n in np.flatnonzero(holds)))
        for is_flag, store in stores:
            store(w, mask, np.full(32, every) if is_flag else np.full(32, ballot, dtype=np.int64))

    return run


@operation("HMMA")
def _hmma(i: Instruction) -> Run:
    if i.modifiers[:2] != ("16816", "F32"):
        raise UnknownInstruction(i)
    brain = "BF16" in i.modifiers
    a, b = ([words(i.operands[at], n) for n in range(count)] for at, count in ((1, 4), (2, 2)))
    c, to = [words(i.operands[3], n) for n in range(4)], [put(i.operands[0], n) for n in range(4)]
    group, quad = LANES // 4, LANES % 4

    def run(w: Warp, mask: np.ndarray) -> None:
        if not mask.all():
            raise RuntimeError(f"lanes are missing: {i}")
        left, right, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for n in range(4):
            pair = a[n](w)
            for e in range(2):
                values = widened(pair >> np.uint32(16 * e) & np.uint32(0xFFFF), brain)
                left[group + 8 * (n % 2), quad * 2 + e + 8 * (n // 2)] = values
        for n in range(2):
            pair = b[n](w)
            for e in range(2):
                right[quad * 2 + e + 8 * n, group] = widened(pair >> np.uint32(16 * e) & np.uint32(0xFFFF), brain)
        for n in range(4):
            sums[group + 8 * (n // 2), quad * 2 + n % 2] = c[n](w).view(np.float32)
        total = (sums + left @ right).astype(np.float32)
        for n in range(4):
            to[n](w, mask, total[group + 8 * (n // 2), quad * 2 + n % 2])

    return run


@operation("NOP", "YIELD", "WARPSYNC", "LDGDEPBAR", "DEPBAR", "MEMBAR", "ERRBAR", "CCTL", "ENDCOLLECTIVE", "BAR")
def _nothing(i: Instruction) -> Run:
    return lambda w, mask: None
