"""What instructions on floats compute, and conversions (sm_90). Rounding follows IEEE's nearest everywhere: the other
directions occur in paths for special numbers only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .listing import UnknownInstruction
from .operands import MASK, Run, Value, integer, numbers, operation, predicate, put, signed, simple, words

if TYPE_CHECKING:
    from .device import Warp
    from .listing import Instruction


@operation("FADD")
def _fadd(i: Instruction) -> Run:
    return simple(i, np.add, numbers, numbers)


@operation("FMUL")
def _fmul(i: Instruction) -> Run:
    return simple(i, np.multiply, numbers, numbers)


@operation("FFMA")
def _ffma(i: Instruction) -> Run:
    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)

    return simple(i, compute, numbers, numbers, numbers)


@operation("FMNMX")
def _fmnmx(i: Instruction) -> Run:
    return simple(i, lambda a, b, p: np.where(p, np.fmin(a, b), np.fmax(a, b)), numbers, numbers, predicate)


@operation("MUFU")
def _mufu(i: Instruction) -> Run:
    compute = {
        "EX2": np.exp2,
        "RCP": lambda a: np.float32(1) / a,
        "RSQ": lambda a: np.float32(1) / np.sqrt(a),
        "SQRT": np.sqrt,
        "LG2": np.log2,
        "TANH": np.tanh,
    }[i.modifiers[0]]
    return simple(i, lambda a: compute(a).astype(np.float32), numbers)


def narrowed(values: np.ndarray, bfloat16: bool) -> np.ndarray:
    """Floats as 16 bits, in 64-bit integers."""
    if not bfloat16:
        return values.astype(np.float16).view(np.uint16).astype(np.int64)
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.int64)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded & 0xFFFF)


def widened(halves: np.ndarray, bfloat16: bool) -> np.ndarray:
    if bfloat16:
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return halves.astype(np.uint16).view(np.float16).astype(np.float32)


@operation("F2FP")
def _f2fp(i: Instruction) -> Run:
    brain = "BF16" in i.modifiers
    return simple(i, lambda a, b: narrowed(a, brain) << 16 | narrowed(b, brain), numbers, numbers)


def _half(text: str) -> Value:
    """A half of a register as floats (H0_H0, H1_H1), "-" applied."""
    negative = text.startswith("-")
    name, _, which = text.lstrip("-").partition(".")
    inner, shift = words(name), 16 if which.startswith("H1") else 0
    sign = np.float32(-1 if negative else 1)
    return lambda w: sign * widened(inner(w) >> np.uint32(shift) & np.uint32(0xFFFF), False)


@operation("HADD2")
def _hadd2(i: Instruction) -> Run:
    if "F32" not in i.modifiers:
        raise UnknownInstruction(i)
    return simple(i, lambda a, b: (a + b).astype(np.float32), _half, _half)


@operation("HFMA2")
def _hfma2(i: Instruction) -> Run:
    """Only as the compiler loads constants: two halves times zero, added to two immediates."""
    if [text.lstrip("-") for text in i.operands[1:3]] != ["RZ", "RZ"]:
        raise UnknownInstruction(i)
    high, low = (int(np.array(float(text), dtype=np.float16).view(np.uint16)) for text in i.operands[3:5])
    value, to = np.full(32, high << 16 | low, dtype=np.int64), put(i.operands[0])
    return lambda w, mask: to(w, mask, value)


@operation("I2F", "I2FP")
def _i2f(i: Instruction) -> Run:
    kind = integer if {"U32", "U64"} & set(i.modifiers) else signed
    upper = integer(i.operands[1], 1) if {"U64", "S64"} & set(i.modifiers) else None
    inner, to = kind(i.operands[1]), put(i.operands[0])

    def run(w: Warp, mask: np.ndarray) -> None:
        value = inner(w).astype(np.float64)
        if upper is not None:
            value = (inner(w) & MASK).astype(np.float64) + upper(w).astype(np.float64) * 2.0**32
        result = value.astype(np.float32)
        if "RP" in i.modifiers:
            result = np.where(result < value, np.nextafter(result, np.float32(np.inf)), result).astype(np.float32)
        to(w, mask, result)

    return run


@operation("F2I")
def _f2i(i: Instruction) -> Run:
    long = {"U64", "S64"} & set(i.modifiers)
    to, upper, inner = put(i.operands[0]), put(i.operands[0], 1), numbers(i.operands[1])

    def run(w: Warp, mask: np.ndarray) -> None:
        value = np.trunc(inner(w).astype(np.float64))
        limits = (0, 2**64 - 2**11) if long else (0, MASK) if "U32" in i.modifiers else (-(2**31), 2**31 - 1)
        value = np.clip(np.nan_to_num(value), *limits)
        exact = [int(v) for v in value]
        to(w, mask, np.array([v & MASK for v in exact], dtype=np.int64))
        if long:
            upper(w, mask, np.array([v >> 32 & MASK for v in exact], dtype=np.int64))

    return run
