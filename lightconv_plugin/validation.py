"""Reads mappings from YAML and JSON into dataclasses, strictly; every error names its key."""

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_WANTED = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


def read(cls: type[T], value: object, name: str = "") -> T:
    """Make an instance of the dataclass from a mapping of its fields; `name` identifies the mapping in errors.

    Fields can have the types str, bool, int, float, Literal, tuple[type, ...] (from a list), dict[str, type],
    dataclasses, and unions of these. __post_init__ does all further checks.

    Raises:
        ValueError: a key is unknown or missing, or a value is wrong; the message names the key.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{name or 'the whole'} must be a mapping, got {value!r}")
    known = {field.name: field for field in fields(typing.cast(Any, cls)) if field.init}
    prefix = f"{name}." if name else ""
    for key in value:
        if key not in known:
            raise ValueError(f"unknown key {prefix}{key}; known: {', '.join(known)}")
    hints = typing.get_type_hints(cls)
    for key, field in known.items():
        if key not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{prefix}{key} is missing: {_wanted(hints[key])}")
    given = {key: _convert(hints[key], item, f"{prefix}{key}") for key, item in value.items()}
    try:
        return cls(**given)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def _convert(kind: Any, value: Any, name: str) -> Any:
    """The value converted to this type."""
    if is_dataclass(kind):
        return read(typing.cast(type, kind), value, name)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(value, list):
        if is_dataclass(inner[0]):
            return tuple(_convert(inner[0], item, f"{name}[{i}]") for i, item in enumerate(value))
        try:
            return tuple(_convert(inner[0], item, name) for item in value)
        except ValueError:
            pass  # the error below shows the whole list
    elif origin is dict and isinstance(value, Mapping):
        return {str(key): _convert(inner[1], item, f"{name}.{key}") for key, item in value.items()}
    elif origin in (types.UnionType, typing.Union):
        if any(_is(one, value) for one in inner):
            return value
        for one in inner:
            if is_dataclass(one) and isinstance(value, Mapping):
                return read(typing.cast(type, one), value, name)
    elif origin is typing.Literal:
        if any(type(value) is type(one) and value == one for one in inner):
            return value
    elif typing.get_origin(kind) is None and _is(kind, value):
        return float(value) if kind is float else value
    raise ValueError(f"{name} must be {_wanted(kind)}, got {value!r}")


def _is(kind: Any, value: Any) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(kind, type) and isinstance(value, (int, float) if kind is float else kind)


def _wanted(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return f"a list, each item {_wanted(inner[0])}"
    if origin is dict or is_dataclass(kind):
        return "a mapping"
    if origin is typing.Literal:
        return f"one of {', '.join(str(item) or repr(item) for item in inner)}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_wanted(one) for one in inner)
    return _WANTED.get(kind, "null")
