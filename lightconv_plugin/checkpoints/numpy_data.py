"""Stand-ins for numpy's functions in untrusted pickles: they only make arrays and scalars of plain numbers and text.

numpy's own functions trust what a pickle says. `numpy.ndarray` takes bytes as the memory of Python objects, and the
state of a dtype may have any flags, offsets and sizes, so a file could make numpy read any address.

torch's restricted unpickler creates an array first and fills it later, through the `__setstate__` of exactly its type.
For `numpy.ndarray` that is numpy's own, which requires numpy's own dtypes, which are filled in the same way. Checked
arrays must therefore be of a subclass. Scalars are ordinary, and both are saved as numpy saves them.
"""

from __future__ import annotations

import pickle
import re
from typing import Any, NoReturn

import numpy as np

from lightconv_plugin.checkpoints.untrusted import shown

_NUMBERS = {f"{np.dtype(code).kind}{np.dtype(code).itemsize}" for code in "?bhilqBHILQefdgFDG"}
_TEXT = re.compile("[SU][0-9]{1,8}")


class NotPlainData(pickle.UnpicklingError):
    """A numpy value that is not plain numbers or text, or whose description does not match its bytes."""


class PlainDtype:
    """A dtype of numbers or text. No instance can hold another: the slots keep Namespaces from becoming one."""

    __slots__ = ("_code", "_order")

    def __init__(self, code: Any, align: Any = False, copy: Any = False) -> None:
        if not isinstance(code, str) or not (code in _NUMBERS or _TEXT.fullmatch(code)):
            raise NotPlainData(f"a numpy dtype must be numbers or text, got {shown(repr(code))}")
        self._code, self._order = code, "="

    def __setstate__(self, state: Any) -> None:
        text = self._code[0] in "SU"
        if not isinstance(state, tuple) or len(state) != 8 or state[0] != 3 or state[1] not in ("<", ">", "|"):
            raise NotPlainData(f"a numpy dtype {self._code} is described by {shown(repr(state))}")
        # The alignment and flags of text depend on numpy's version and are not used here.
        if state[2:5] != (None, None, None) or state[5:] != (
            (self.dtype.itemsize, *state[6:]) if text else (-1, -1, 0)
        ):
            raise NotPlainData(f"a numpy dtype {self._code} must have no fields or flags, got {shown(repr(state))}")
        self._order = state[1]

    def __reduce__(self) -> Any:
        return self.dtype.__reduce__()

    @property
    def dtype(self) -> np.dtype:
        """numpy's own dtype."""
        return np.dtype(self._order + self._code)


class PlainArray(np.ndarray):
    """An array from a checkpoint; it is saved as an ordinary numpy array."""

    def __new__(cls, *_: Any) -> NoReturn:
        raise NotPlainData("numpy.ndarray must not be called")

    def __setstate__(self, state: Any) -> None:
        # A tensor may share the memory of a filled array, which a second state would free.
        if self.size or not isinstance(state, tuple) or len(state) != 5:
            raise NotPlainData("a numpy array must be filled once, by its shape, type and bytes")
        _, shape, dtype, fortran, raw = state
        array = _checked(shape, dtype, bool(fortran), raw)
        super().__setstate__((1, array.shape, array.dtype, bool(fortran), raw))  # type: ignore[arg-type]

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(array)[()]  # results are ordinary

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()


def reconstruct(*_: Any) -> PlainArray:
    """An empty array, which the pickle then fills. Its arguments only matter to numpy's own function."""
    return np.ndarray.__new__(PlainArray, (0,), "b")  # type: ignore[arg-type]  # its own __new__ refuses


def scalar(dtype: Any, raw: Any = None) -> Any:
    """The numpy scalar with these bytes."""
    return _checked((), dtype, False, raw)[()]


def _checked(shape: Any, dtype: Any, fortran: bool, raw: Any) -> np.ndarray:
    """An array over the memory of `raw`, which has exactly the size of the array."""
    if not isinstance(dtype, PlainDtype) or not isinstance(raw, bytes):
        raise NotPlainData(f"a numpy value must be bytes of a plain type, got {type(raw).__name__}")
    plain = dtype.dtype
    try:
        array: np.ndarray = np.ndarray(shape, plain, raw, order="F" if fortran else "C")
    except (TypeError, ValueError) as error:
        raise NotPlainData(f"a numpy array of {plain}: {shown(error)}") from error
    # numpy infers negative sizes, and counts on bytes 0 and 1 when it indexes by booleans.
    wrong = array.shape != shape or array.nbytes != len(raw)
    if wrong or (plain.kind == "b" and raw.translate(None, b"\0\1")):
        raise NotPlainData(f"a numpy array of {plain}: shape {shown(shape)} does not match its {len(raw)} bytes")
    return array
