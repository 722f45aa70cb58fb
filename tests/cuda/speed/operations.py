"""What SASS instructions compute, as far as the kernels use them (sm_90).

`compiled(instruction)` gives a function of a warp and a mask of 32 lanes. Registers are rows of 32 unsigned words; what
is not computed for the lanes of the mask keeps its value. Rounding follows IEEE's nearest everywhere: the other
directions occur in paths for special numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .device import Warp
    from .listing import Instruction

LANES = np.arange(32)
MASK = 0xFFFFFFFF  # of a word
Value = Callable[["Warp"], np.ndarray]
Run = Callable[["Warp", np.ndarray], None]
OPERATIONS: dict[str, Callable[[Instruction], Run]] = {}


def operation(*names: str):
    def add(function):
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return add


def compiled(instruction: Instruction) -> Run:
    if instruction.opcode not in OPERATIONS:
        raise NotImplementedError(str(instruction))
    return OPERATIONS[instruction.opcode](instruction)


# ------------------------------------------------------------------------------------------------ operands

_REGISTER = re.compile(r"(U?)R(\d+|Z)$")
_CONSTANT = re.compile(r"c\[(0x[0-9a-f]+)\]\[(?:(U?R(?:\d+|Z))\+?)?(-?0x[0-9a-f]+)?\]$")


def register(text: str) -> tuple[bool, int]:
    """(uniform?, number); 255 for RZ and URZ."""
    match = _REGISTER.match(text.split(".")[0])
    if match is None:
        raise ValueError(f"not a register: {text}")
    return match[1] == "U", 255 if match[2] == "Z" else int(match[2])


def words(text: str, part: int = 0) -> Value:
    """32 unsigned words; `part` 1 is the second register of a pair (0 for an immediate: its sign is not extended)."""
    text = re.sub(r"\.(64|U32|X\d+)\b", "", text)
    if match := _CONSTANT.match(text):
        bank, index, offset = int(match[1], 16), match[2], int(match[3] or "0", 16) + 4 * part
        if index is None:
            return lambda w: w.constant(bank, offset)
        at = words(index)
        return lambda w: w.constants(bank, at(w).astype(np.int64) + offset)
    if re.match(r"U?R", text):
        uniform, number = register(text)
        if number == 255:
            return lambda w: w.zeros
        number += part
        return (lambda w: w.U[number]) if uniform else (lambda w: w.R[number])
    value = np.full(32, int(text, 0) & MASK if not part else 0, dtype=np.uint32)
    return lambda w: value


def integer(text: str, part: int = 0) -> Value:
    """Signed or unsigned does not matter: words with "-" and "~" applied, as 64 bits below 2^33 (see IADD3)."""
    if text.startswith("-") and not text.startswith("-0x"):
        inner = integer(text[1:], part)
        return lambda w: (1 << 32) - inner(w)
    if text.startswith("~"):
        inner = integer(text[1:], part)
        return lambda w: MASK - inner(w)
    if text.startswith("|"):
        inner = words(text.strip("|"))
        return lambda w: np.abs(inner(w).view(np.int32).astype(np.int64))
    inner = words(text, part)
    return lambda w: inner(w).astype(np.int64)


def signed(text: str) -> Value:
    inner = integer(text)
    return lambda w: (inner(w) & MASK).astype(np.uint32).view(np.int32).astype(np.int64)


def modular(text: str) -> Value:
    """32-bit words, with "-" and "~" applied."""
    if text.startswith("-") and not text.startswith("-0x"):
        inner = words(text[1:])
        return lambda w: w.zeros - inner(w)
    if text.startswith("~"):
        inner = words(text[1:])
        return lambda w: ~inner(w)
    return words(text)


def numbers(text: str) -> Value:
    """32 floats."""
    if text.startswith("-") and not re.match(r"-[\d.]|-INF|-QNAN", text):
        inner = numbers(text[1:])
        return lambda w: -inner(w)
    if text.startswith("|"):
        inner = numbers(text.strip("|"))
        return lambda w: np.abs(inner(w))
    if re.match(r"[+-]?(\d|\.|INF|QNAN)", text):
        value = np.full(32, float(text.replace("QNAN", "nan").replace("INF", "inf")) if "0x" not in text else 0.0)
        if "0x" in text:
            value = np.full(32, int(text, 16) & MASK, dtype=np.uint32).view(np.float32)
        value = value.astype(np.float32)
        return lambda w: value
    inner = words(text)
    return lambda w: inner(w).view(np.float32)


def predicate(text: str) -> Value:
    negated, text = text.startswith("!"), text.lstrip("!")
    if text in ("PT", "UPT"):
        value = np.full(32, not negated)
        return lambda w: value
    uniform, number = text[0] == "U", int(text[-1])
    if uniform:
        return (lambda w: ~w.UP[number]) if negated else (lambda w: w.UP[number])
    return (lambda w: ~w.P[number]) if negated else (lambda w: w.P[number])


def is_predicate(text: str) -> bool:
    return re.match(r"!?U?P(\d|T)$", text) is not None


def put(text: str, part: int = 0) -> Callable[[Warp, np.ndarray, np.ndarray], None]:
    """Stores words (of any integer type, or floats) into a register."""
    uniform, number = register(text)
    if number == 255:
        return lambda w, mask, value: None
    number += part

    def store(w: Warp, mask: np.ndarray, value: np.ndarray) -> None:
        if value.dtype == np.float32:
            value = value.view(np.uint32)
        elif value.dtype != np.uint32:
            value = (value & MASK).astype(np.uint32)
        if uniform:
            w.U[number][:] = value[int(np.argmax(mask))]
        else:
            np.copyto(w.R[number], value, where=mask)

    return store


def put_predicate(text: str) -> Callable[[Warp, np.ndarray, np.ndarray], None]:
    if text in ("PT", "UPT"):
        return lambda w, mask, value: None
    uniform, number = text[0] == "U", int(text[-1])

    def store(w: Warp, mask: np.ndarray, value: np.ndarray) -> None:
        if uniform:
            w.UP[number][:] = value[int(np.argmax(mask))]
        else:
            np.copyto(w.P[number], value, where=mask)

    return store


# ------------------------------------------------------------------------------------------------ integers


def _simple(i: Instruction, compute: Callable[..., np.ndarray], *kinds: Callable[[str], Value]) -> Run:
    to = put(i.operands[0])
    values = [kind(text) for kind, text in zip(kinds, i.operands[1:], strict=False)]
    return lambda w, mask: to(w, mask, compute(*(value(w) for value in values)))


def _carries(i: Instruction) -> tuple[list[str], list[str]]:
    """The predicates that take carries, and the other operands after the result."""
    rest = list(i.operands[1:])
    taken = []
    while rest and is_predicate(rest[0]):
        taken.append(rest.pop(0))
    return taken, rest


@operation("IADD3", "UIADD3")
def _iadd3(i: Instruction) -> Run:
    taken, rest = _carries(i)
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
    return _simple(i, np.add, modular, modular)


@operation("IMAD", "UIMAD")
def _imad(i: Instruction) -> Run:
    taken, rest = _carries(i)
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
        raise NotImplementedError(str(i))
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
    taken, rest = _carries(i)
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
    return _simple(i, lambda a: a, words)


@operation("IABS")
def _iabs(i: Instruction) -> Run:
    return _simple(i, np.abs, signed)


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

    return _simple(i, compute, integer, integer, integer)


def lut(table: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, ones: int | bool) -> np.ndarray:
    result = a & ~a
    for row in range(8):
        if table >> row & 1:
            result = result | (a if row & 4 else a ^ ones) & (b if row & 2 else b ^ ones) & (c if row & 1 else c ^ ones)
    return result


@operation("LOP3", "ULOP3")
def _lop3(i: Instruction) -> Run:
    taken, rest = _carries(i) if not is_predicate(i.operands[0]) else ([i.operands[0]], list(i.operands[2:]))
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

    return _simple(i, compute, words, words, words)


@operation("SEL", "USEL", "FSEL")
def _sel(i: Instruction) -> Run:
    kind = numbers if i.opcode == "FSEL" else integer
    return _simple(i, lambda a, b, p: np.where(p, a, b), kind, kind, predicate)


@operation("VIMNMX")
def _vimnmx(i: Instruction) -> Run:
    kind = integer if "U32" in i.modifiers else signed
    return _simple(i, lambda a, b, p: np.where(p, np.minimum(a, b), np.maximum(a, b)), kind, kind, predicate)


@operation("VIADDMNMX")
def _viaddmnmx(i: Instruction) -> Run:
    unsigned = "U32" in i.modifiers
    kind = integer if unsigned else signed

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray, p: np.ndarray) -> np.ndarray:
        total = ((a & MASK) + (b & MASK)) & MASK
        if not unsigned:
            total = total.astype(np.uint32).view(np.int32).astype(np.int64)
        return np.where(p, np.minimum(total, c), np.maximum(total, c))

    return _simple(i, compute, kind, kind, kind, predicate)


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

    return _simple(i, lambda a: np.array([one(int(v)) for v in a], dtype=np.int64), words)


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


# ------------------------------------------------------------------------------------------------ floats


@operation("FADD")
def _fadd(i: Instruction) -> Run:
    return _simple(i, np.add, numbers, numbers)


@operation("FMUL")
def _fmul(i: Instruction) -> Run:
    return _simple(i, np.multiply, numbers, numbers)


@operation("FFMA")
def _ffma(i: Instruction) -> Run:
    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)

    return _simple(i, compute, numbers, numbers, numbers)


@operation("FMNMX")
def _fmnmx(i: Instruction) -> Run:
    return _simple(i, lambda a, b, p: np.where(p, np.fmin(a, b), np.fmax(a, b)), numbers, numbers, predicate)


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
    return _simple(i, lambda a: compute(a).astype(np.float32), numbers)


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
    return _simple(i, lambda a, b: narrowed(a, brain) << 16 | narrowed(b, brain), numbers, numbers)


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
        raise NotImplementedError(str(i))
    return _simple(i, lambda a, b: (a + b).astype(np.float32), _half, _half)


@operation("HFMA2")
def _hfma2(i: Instruction) -> Run:
    """Only as the compiler loads constants: two halves times zero, added to two immediates."""
    if [text.lstrip("-") for text in i.operands[1:3]] != ["RZ", "RZ"]:
        raise NotImplementedError(str(i))
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


# ------------------------------------------------------------------------------------------------ the warp


@operation("S2R", "S2UR")
def _s2r(i: Instruction) -> Run:
    to, name = put(i.operands[0]), i.operands[1]
    return lambda w, mask: to(w, mask, w.special(name))


@operation("CS2R")
def _cs2r(i: Instruction) -> Run:
    if i.operands[1] != "SRZ":
        raise NotImplementedError(str(i))
    to = [put(i.operands[0], part) for part in range(1 if "32" in i.modifiers else 2)]

    def run(w: Warp, mask: np.ndarray) -> None:
        for each in to:
            each(w, mask, w.zeros)

    return run


@operation("R2UR")
def _r2ur(i: Instruction) -> Run:
    return _simple(i, lambda a: a, words)


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
        raise NotImplementedError(str(i))
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
