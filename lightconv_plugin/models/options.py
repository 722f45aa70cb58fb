"""How the models' configurations declare their options."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that fairseq shows as an option with this help."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help, **metadata})
    return field(default=default, metadata={"help": help, **metadata})


def choice(value: Any) -> str:
    """A choice as text; fairseq passes members of an enumeration from the command line, and text from checkpoints."""
    return str(getattr(value, "value", value))


def flag(name: str) -> str:
    """The command line's name of an option."""
    return "--" + name.replace("_", "-")
