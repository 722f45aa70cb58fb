"""What instructions read and write: registers, predicates, constants, numbers; and the table of what they compute.

A value is a function of a warp that gives 32 words, floats or booleans, one for each lane. Registers are rows of 32
unsigned words; what is not stored for a lane keeps its value.
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


def simple(i: Instruction, compute: Callable[..., np.ndarray], *kinds: Callable[[str], Value]) -> Run:
    to = put(i.operands[0])
    values = [kind(text) for kind, text in zip(kinds, i.operands[1:], strict=False)]
    return lambda w, mask: to(w, mask, compute(*(value(w) for value in values)))


def carries_of(i: Instruction) -> tuple[list[str], list[str]]:
    """The predicates that take carries, and the other operands after the result."""
    rest = list(i.operands[1:])
    taken = []
    while rest and is_predicate(rest[0]):
        taken.append(rest.pop(0))
    return taken, rest
