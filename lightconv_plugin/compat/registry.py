"""What a patch is, and how a topic declares one."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Patch:
    """A change to fairseq in memory: `apply()` makes it, and is called only where `needed()` finds the bug."""

    name: str
    reason: str
    """What goes wrong without it, in one sentence."""
    versions: str
    """The versions concerned, of fairseq or of a library that it runs on."""
    needed: Callable[[], bool]
    apply: Callable[[], None]


def _always() -> bool:
    return True


def patch(*, versions: str, needed: Callable[[], bool] = _always) -> Callable[[Callable[[], None]], Patch]:
    """Declare the decorated function a patch: its name is the patch's, the first line of its docstring the reason."""

    def declare(function: Callable[[], None]) -> Patch:
        reason = (function.__doc__ or "").partition("\n")[0]
        return Patch(function.__name__, reason, versions, needed, function)

    return declare


def patches_of(*topics: ModuleType) -> dict[str, Patch]:
    """The patches of these modules by name, in the order in which they are written."""
    return {value.name: value for topic in topics for value in vars(topic).values() if isinstance(value, Patch)}
