"""Defines patches, and the decorator with which each topic declares its own."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Patch:
    """A change to fairseq in memory: `apply()` makes it, and is called only if `needed()` finds the bug."""

    name: str
    reason: str
    """What goes wrong without it, in one sentence."""
    versions: str
    """The affected versions, of fairseq or of a library that it uses."""
    needed: Callable[[], bool]
    apply: Callable[[], None]


def _always() -> bool:
    return True


def patch(*, versions: str, needed: Callable[[], bool] = _always) -> Callable[[Callable[[], None]], Patch]:
    """Make the decorated function a patch, with its name, and the first line of its docstring as the reason."""

    def declare(function: Callable[[], None]) -> Patch:
        reason = (function.__doc__ or "").partition("\n")[0]
        return Patch(function.__name__, reason, versions, needed, function)

    return declare


def patches_of(*topics: ModuleType) -> dict[str, Patch]:
    """The patches of these modules by name, in the order in which they are written."""
    return {value.name: value for topic in topics for value in vars(topic).values() if isinstance(value, Patch)}
