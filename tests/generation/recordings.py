"""The kinds of search, and what stands in for CUDA graphs on the CPU."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from lightconv_plugin.generation import batch_search, native
from lightconv_plugin.generation.graphs import CapturedSearch
from lightconv_plugin.ops import backends
from tests.waiting import RefuseToWait

SEARCHES = ("native", "torch", "recorded")
NO_KERNELS = backends.Decision("reference", reason="there is no compiler")


@contextlib.contextmanager
def searching(kind: str) -> Iterator[None]:
    """Inside, this one searches: both of the CPU, and the one with CUDA graphs, for which recordings stand in."""
    with pytest.MonkeyPatch.context() as patch:
        if kind != "native":
            patch.setattr(native.backends, "decision", lambda device_type: NO_KERNELS)
        if kind == "recorded":
            recorded = functools.partial(CapturedSearch, recorder=Recordings())
            patch.setattr(batch_search, "TorchSearch", recorded)
        yield


class Recordings:
    """A Recorder (modules/recorder.py) that notes what torch was called with, once, and calls it with the same again.

    Like a CUDA graph, a recording knows nothing of Python: every number is as it was, every tensor from outside is the
    same one, and those made inside are made anew. `record` fails where the host would wait for a tensor, and where a
    tensor made inside is still there afterwards.

    recorded, replayed: how many steps. outside: the tensors from outside that recordings use.
    """

    def __init__(self):
        self.recorded = self.replayed = 0
        self.outside: list[Tensor] = []

    def warm_up(self, function):
        function()

    def record(self, function):
        self.recorded += 1
        calls = _Calls()
        with RefuseToWait(), calls:
            function()
        left = [tuple(tensor.shape) for tensor in calls.made]
        assert not left, f"tensors of a step that are there after it, of shapes {left}"
        self.outside += calls.outside
        return lambda: self._replay(calls.noted)

    @torch.no_grad()
    def _replay(self, noted):
        self.replayed += 1
        values: dict[int, Tensor] = {}
        for function, leaves, tree, numbers in noted:
            leaves = [values[leaf.number] if isinstance(leaf, _Made) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(leaves, tree)
            for number, out in zip(numbers, _tensors(function(*args, **kwargs)), strict=True):
                values[number] = out


@dataclass(frozen=True)
class _Made:
    """A tensor that a call of the recording returns."""

    number: int


class _Calls(TorchDispatchMode):
    """noted: each operation, its arguments as leaves and their tree, and the numbers of the tensors that it returns.
    made: those of them that are still there. outside: all other arguments."""

    def __init__(self):
        super().__init__()
        self.noted, self.outside = [], []
        self.made = WeakTensorKeyDictionary()
        self._count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves, tree = tree_flatten((args, kwargs or {}))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.outside += [leaf for leaf in given if leaf not in self.made]
        leaves = [_Made(self.made[x]) if isinstance(x, Tensor) and x in self.made else x for x in leaves]
        out = func(*args, **(kwargs or {}))
        numbers = []
        for tensor in _tensors(out):
            if tensor in self.made:  # written in place
                numbers.append(self.made[tensor])
                continue
            self._count += 1
            numbers.append(self._count)
            if not any(tensor is other for other in given):
                self.made[tensor] = self._count
        self.noted.append((func, leaves, tree, numbers))
        return out


def _tensors(out) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def reachable(thing, seen: set[int] | None = None) -> set[int]:
    """The addresses of the storages of all tensors that an object keeps."""
    seen = set() if seen is None else seen
    if isinstance(thing, Tensor):
        return {thing.untyped_storage().data_ptr()}
    if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type)):
        return set()
    seen.add(id(thing))
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, (list, tuple, set)):
        parts = list(thing)
    elif type(thing).__module__.startswith(("lightconv_plugin", "torch.nn")):
        parts = list(vars(thing).values())
    else:
        parts = []
    return set().union(*(reachable(part, seen) for part in parts))
