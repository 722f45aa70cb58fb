"""How the models' configurations declare their options."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that fairseq shows as an option with this help."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help, **metadata})
    return field(default=default, metadata={"help": help, **metadata})


def flag(name: str) -> str:
    """The command line's name of an option."""
    return "--" + name.replace("_", "-")
