"""What instructions on integers compute, and comparisons (sm_90)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .listing import UnknownInstruction
from .operands import (
    MASK,
    Run,
    carries_of,
    integer,
    is_predicate,
    modular,
    numbers,
    operation,
    predicate,
    put,
    put_predicate,
    signed,
    simple,
    words,
)

if TYPE_CHECKING:
    from .device import Warp
    from .listing import Instruction


@operation("IADD3", "UIADD3")
def _iadd3(i: Instruction) -> Run:
    taken, rest = carries_of(i)
    if not taken and "X" not in i.modifiers:
        a, b, c, plain = *(modular(text) for text in rest[:3]), put(i.operands[0])
        return lambda w, mask: plain(w, mask, a(w) + b(w) + c(w))
    given = [predicate(text) for text in rest[3:]] if "X" in i.modifiers else []
    values, to = [integer(text) for text in rest[:3]], put(i.operands[0])
    carries = [put_predicate(text) for text in taken]

    def run(w: Warp, mask: np.ndarray) -> None:
        total = sum(value(w) for value in values) + sum(p(w).astype(np.int64) for p in given)
        to(w, mask, total & MASK)
        for n, carry in enumerate(carries, 1):
            carry(w, mask, total >> 32 >= n)

    return run


@operation("VIADD")
def _viadd(i: Instruction) -> Run:
    return simple(i, np.add, modular, modular)


@operation("IMAD", "UIMAD")
def _imad(i: Instruction) -> Run:
    taken, rest = carries_of(i)
    wide, high = "WIDE" in i.modifiers, "HI" in i.modifiers
    unsigned = "U32" in i.modifiers
    carry_in = predicate(rest[3]) if "X" in i.modifiers and len(rest) > 3 else None
    to = put(i.operands[0])
    if not (wide or high):
        a, b, low = (modular(text) for text in rest[:3])

        def run(w: Warp, mask: np.ndarray) -> None:
            total = a(w) * b(w) + low(w)
            to(w, mask, total if carry_in is None else total + carry_in(w).astype(np.uint32))

        return run
    if carry_in is not None:
        raise UnknownInstruction(i)
    a, b, low = (integer if unsigned else signed)(rest[0]), (integer if unsigned else signed)(rest[1]), integer(rest[2])
    upper, to_upper = integer(rest[2], 1), put(i.operands[0], 1)
    carries = [put_predicate(text) for text in taken]
    half = np.uint64(32)

    def run_wide(w: Warp, mask: np.ndarray) -> None:
        product = a(w).astype(np.uint64) * b(w).astype(np.uint64)
        total = product + (low(w).astype(np.uint64) | upper(w).astype(np.uint64) << half)
        if wide:
            to(w, mask, total.astype(np.uint32))
            to_upper(w, mask, (total >> half).astype(np.uint32))
            for carry in carries:
                carry(w, mask, total < product)
        else:
            to(w, mask, (total >> half).astype(np.uint32))

    return run_wide


@operation("LEA", "ULEA")
def _lea(i: Instruction) -> Run:
    taken, rest = carries_of(i)
    carry_in = predicate(rest.pop()) if "X" in i.modifiers else None
    extended, to = "SX32" in i.modifiers, put(i.operands[0])
    shift = int(rest[-1], 16)
    a, b = integer(rest[0]), integer(rest[1])
    c = None if len(rest) == 3 else integer(rest[2])
    carries = [put_predicate(text) for text in taken]

    def run(w: Warp, mask: np.ndarray) -> None:
        low = a(w) & MASK
        if "HI" not in i.modifiers:
            value = (low << shift) & MASK
        elif extended:
            value = (low.astype(np.uint32).view(np.int32).astype(np.int64) << shift) >> 32 & MASK
        else:
            above = np.zeros(32, dtype=np.int64) if c is None else c(w)
            value = ((above << shift) | (low >> (32 - shift))) & MASK
        total = value + b(w)
        if carry_in is not None:
            total = total + carry_in(w)
        to(w, mask, total & MASK)
        for carry in carries:
            carry(w, mask, total >> 32 >= 1)

    return run


@operation("MOV", "UMOV")
def _mov(i: Instruction) -> Run:
    return simple(i, lambda a: a, words)


@operation("IABS")
def _iabs(i: Instruction) -> Run:
    return simple(i, np.abs, signed)


@operation("SHF", "USHF")
def _shf(i: Instruction) -> Run:
    long = i.modifiers[1] in ("U64", "S64")
    arithmetic, high, left = i.modifiers[1][0] == "S", "HI" in i.modifiers, i.modifiers[0] == "L"

    def compute(low: np.ndarray, shift: np.ndarray, above: np.ndarray) -> np.ndarray:
        shift = np.minimum(shift, 63 if long or (left and high) else 32)
        if arithmetic:
            above = above.astype(np.uint32).view(np.int32).astype(np.int64)
        if high and not left:
            return above >> shift
        pair = above << 32 | low
        if left:
            value = pair.astype(np.uint64) << shift.astype(np.uint64)
            return (value >> np.uint64(32) if high else value).astype(np.uint32)
        return pair >> shift if arithmetic else (pair.astype(np.uint64) >> shift.astype(np.uint64)).astype(np.uint32)

    return simple(i, compute, integer, integer, integer)


def lut(table: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, ones: int | bool) -> np.ndarray:
    result = a & ~a
    for row in range(8):
        if table >> row & 1:
            result = result | (a if row & 4 else a ^ ones) & (b if row & 2 else b ^ ones) & (c if row & 1 else c ^ ones)
    return result


@operation("LOP3", "ULOP3")
def _lop3(i: Instruction) -> Run:
    taken, rest = carries_of(i) if not is_predicate(i.operands[0]) else ([i.operands[0]], list(i.operands[2:]))
    to = put(i.operands[1] if taken and is_predicate(i.operands[0]) else i.operands[0])
    values, table = [integer(text) for text in rest[:3]], int(rest[3], 16)
    other = predicate(rest[4]) if len(rest) > 4 else None
    flags = [put_predicate(text) for text in taken]

    def run(w: Warp, mask: np.ndarray) -> None:
        result = lut(table, *(value(w) & MASK for value in values), MASK)
        to(w, mask, result)
        for flag in flags:
            flag(w, mask, (result != 0) | (other(w) if other else False))

    return run


@operation("PLOP3", "UPLOP3")
def _plop3(i: Instruction) -> Run:
    first, second, *given, table, other = i.operands
    values = [predicate(text) for text in given]
    to, to_second = put_predicate(first), put_predicate(second)

    def run(w: Warp, mask: np.ndarray) -> None:
        bits = [value(w) for value in values]
        results = [lut(int(t, 16), *bits, True) for t in (table, other)]
        to(w, mask, results[0])
        to_second(w, mask, results[1])

    return run


@operation("PRMT", "UPRMT")
def _prmt(i: Instruction) -> Run:
    def compute(a: np.ndarray, select: np.ndarray, b: np.ndarray) -> np.ndarray:
        source = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
        result = np.zeros(32, dtype=np.uint64)
        for n in range(4):
            nibble = select.astype(np.uint64) >> np.uint64(4 * n) & np.uint64(15)
            byte = source >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            byte = np.where(nibble & np.uint64(8), np.where(byte & np.uint64(128), 255, 0).astype(np.uint64), byte)
            result |= byte << np.uint64(8 * n)
        return result.astype(np.uint32)

    return simple(i, compute, words, words, words)


@operation("SEL", "USEL", "FSEL")
def _sel(i: Instruction) -> Run:
    kind = numbers if i.opcode == "FSEL" else integer
    return simple(i, lambda a, b, p: np.where(p, a, b), kind, kind, predicate)


@operation("VIMNMX")
def _vimnmx(i: Instruction) -> Run:
    kind = integer if "U32" in i.modifiers else signed
    return simple(i, lambda a, b, p: np.where(p, np.minimum(a, b), np.maximum(a, b)), kind, kind, predicate)


@operation("VIADDMNMX")
def _viaddmnmx(i: Instruction) -> Run:
    unsigned = "U32" in i.modifiers
    kind = integer if unsigned else signed

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray, p: np.ndarray) -> np.ndarray:
        total = ((a & MASK) + (b & MASK)) & MASK
        if not unsigned:
            total = total.astype(np.uint32).view(np.int32).astype(np.int64)
        return np.where(p, np.minimum(total, c), np.maximum(total, c))

    return simple(i, compute, kind, kind, kind, predicate)


@operation("POPC", "BREV", "FLO")
def _bits(i: Instruction) -> Run:
    def one(value: int) -> int:
        if i.opcode == "POPC":
            return value.bit_count()
        if i.opcode == "BREV":
            return int(f"{value:032b}"[::-1], 2)
        if value == 0:
            return MASK
        return 32 - value.bit_length() if "SH" in i.modifiers else value.bit_length() - 1

    return simple(i, lambda a: np.array([one(int(v)) for v in a], dtype=np.int64), words)


# ------------------------------------------------------------------------------------------------ comparisons

_COMPARE = {
    "GE": np.greater_equal, "GT": np.greater, "LE": np.less_equal, "LT": np.less, "EQ": np.equal, "NE": np.not_equal
}  # fmt: skip


def _store_comparison(i: Instruction, holds: Callable[[Warp], np.ndarray], other: str) -> Run:
    to, to_not, other_of = put_predicate(i.operands[0]), put_predicate(i.operands[1]), predicate(other)
    combine = np.logical_or if "OR" in i.modifiers else np.logical_xor if "XOR" in i.modifiers else np.logical_and

    def run(w: Warp, mask: np.ndarray) -> None:
        value, more = holds(w), other_of(w)
        to(w, mask, combine(value, more))
        to_not(w, mask, combine(~value, more))

    return run


@operation("ISETP", "UISETP")
def _isetp(i: Instruction) -> Run:
    kind = integer if "U32" in i.modifiers else signed
    a, b = kind(i.operands[2]), kind(i.operands[3])
    name = i.modifiers[0]
    low = predicate(i.operands[5]) if "EX" in i.modifiers else None

    def holds(w: Warp) -> np.ndarray:
        left, right = a(w), b(w)
        if kind is integer:
            left, right = left & MASK, right & MASK
        if low is None:
            return _COMPARE[name](left, right)
        if name == "NE":
            return (left != right) | low(w)
        strict = _COMPARE["GT" if name[0] == "G" else "LT"](left, right) if name != "EQ" else np.zeros(32, dtype=bool)
        return strict | (left == right) & low(w)

    return _store_comparison(i, holds, i.operands[4])


@operation("FSETP")
def _fsetp(i: Instruction) -> Run:
    a, b = numbers(i.operands[2]), numbers(i.operands[3])
    name = i.modifiers[0]
    unordered = len(name) == 3 and name != "NUM"

    def holds(w: Warp) -> np.ndarray:
        left, right = a(w), b(w)
        if name in ("NUM", "NAN"):
            return (np.isnan(left) | np.isnan(right)) == (name == "NAN")
        value = _COMPARE[name[:2]](left, right)
        either = np.isnan(left) | np.isnan(right)
        return value | either if unordered else value & ~either

    return _store_comparison(i, holds, i.operands[4])


@operation("FCHK")
def _fchk(i: Instruction) -> Run:
    """Whether a division by reciprocal and correction may fail."""
    to, a, b = put_predicate(i.operands[0]), numbers(i.operands[1]), numbers(i.operands[2])

    def run(w: Warp, mask: np.ndarray) -> None:
        top, bottom = np.abs(a(w)), np.abs(b(w))
        easy = (bottom > 1e-37) & (bottom < 1e37) & ((top == 0) | (top > 1e-30)) & (top < 1e37)
        to(w, mask, ~easy)

    return run
