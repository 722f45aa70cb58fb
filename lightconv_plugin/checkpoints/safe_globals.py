"""Types in fairseq's checkpoints besides tensors and plain containers, for torch's safe loading (weights_only)."""

import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

METERS = ("AverageMeter", "TimeMeter", "StopwatchMeter")
_LOCK = threading.RLock()  # torch has one list of allowed types for all threads


def checkpoint_globals() -> list:
    """Types that can only hold data: Namespace, and numpy's arrays and numbers.

    Every old-style model or optimizer has a Namespace. --eval-bleu and best scores store numpy values, named
    `numpy.core` in files written with numpy 1 and `numpy._core` with numpy 2. Stand-ins have numpy's names
    (numpy_data.py).
    """
    from lightconv_plugin.checkpoints import numpy_data

    functions = {"_reconstruct": numpy_data.reconstruct, "scalar": numpy_data.scalar}
    named = [(f, f"numpy.{core}.multiarray.{name}") for name, f in functions.items() for core in ("core", "_core")]
    return [Namespace, (numpy_data.PlainArray, "numpy.ndarray"), (numpy_data.PlainDtype, "numpy.dtype"), *named]


def meters(types: dict[str, type]) -> list:
    """The training statistics in files of fairseq 0.6 to 0.9, as (type, name in the file); `types`: by name."""
    return [(types[name], f"fairseq.meters.{name}") for name in METERS]


def allow(entries: Sequence[Any]) -> None:
    """Add to the types that torch.load allows, in place of others with the same names."""
    import torch

    with _LOCK:
        _replace(_with(torch.serialization.get_safe_globals(), entries))


@contextmanager
def allowed(entries: Sequence[Any], unless_present: Sequence[Any] = ()) -> Iterator[None]:
    """`allow` until the end of the block, for one thread at a time; afterwards the list is as it was before.

    unless_present: entries that are only added if their names are not allowed yet.
    """
    import torch

    with _LOCK:
        before = torch.serialization.get_safe_globals()
        names = {_name(entry) for entry in before}
        wanted = _with(before, [*entries, *(entry for entry in unless_present if _name(entry) not in names)])
        if set(wanted) == set(before):  # other threads may be loading with torch.load itself
            yield
            return
        _replace(wanted)
        try:
            yield
        finally:
            _replace(before)


def _with(before: Sequence[Any], entries: Sequence[Any]) -> list:
    names = {_name(entry) for entry in entries}
    return [*(entry for entry in before if _name(entry) not in names), *entries]


def _replace(entries: Sequence[Any]) -> None:
    import torch

    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(entries))


def _name(entry: Any) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
