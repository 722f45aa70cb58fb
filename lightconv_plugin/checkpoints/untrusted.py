"""Reads untrusted directories: only files inside them, of limited size, with one-line errors.

Pickles, such as checkpoints, are refused or restricted to data by loading.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from string import hexdigits
from typing import Any, NoReturn

from lightconv_plugin.errors import InputError

_LONGEST = 300  # characters of a file that a message may quote
_JSON = 2**20  # bytes: enough for thousands of layers


def shown(value: object) -> str:
    """A value of any length with any characters, shortened and escaped for a one-line message."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value)[: 2 * _LONGEST])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn errors about a value read from `path` into an InputError that names the file."""
    try:
        yield
    except (ValueError, TypeError, ArithmeticError) as error:
        raise InputError(f"{path}: {shown(error)}") from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply") from error


def file_in(directory: Path, name: str, most: int) -> Path:
    """The path of a regular file of at most `most` bytes in a directory.

    `name` is untrusted. A symbolic link may point to a file in the directory; in the cache of the Hugging Face hub,
    also to where it keeps the files of the directory's repository, or those that repositories share.

    Raises:
        InputError: there is no such file, it is too large, or `name` leads elsewhere.
    """
    if Path(name).name != name or name in ("", ".", "..") or not name.isprintable() or "\\" in name or len(name) > 255:
        raise InputError(f"{directory}: {shown(repr(name))} is not the name of a file in this directory")
    path = directory / name
    try:
        place, target = directory.resolve(strict=True), path.resolve(strict=True)
        if target.parent != place and not _in_cache_of(place, target):
            raise InputError(f"{path} is refused: it is a link to a file outside its directory")
        if not target.is_file():
            raise InputError(f"{path} is not a file")
        size = target.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{directory} is incomplete: there is no {name}") from None
    except (OSError, RuntimeError) as error:  # a cycle of links, or a directory without read permission
        raise InputError(f"{path} cannot be read: {shown(getattr(error, 'strerror', None) or error)}") from error
    if size > most:
        raise InputError(f"{path} has {size:,} bytes: at most {most:,} are read")
    return path


def _in_cache_of(place: Path, target: Path) -> bool:
    """Whether `target` holds the content of a file in the hub's snapshot of a repository that has the folder `place`.

    The layout of the cache: models--OWNER--NAME/snapshots/REVISION/FOLDERS/FILE is a link to models--OWNER--NAME/blobs/
    HASH, which is a file or, from version 2 of huggingface_hub on, a link to blobs/HA/HASH beside the repositories.
    """
    for revision in (place, *place.parents):
        repository = revision.parents[1] if revision.parent.name == "snapshots" else Path()
        if repository.name.startswith("models--"):
            shared = repository.parent / "blobs" / target.name[:2]
            is_hash = len(target.name) == 64 and set(target.name) <= set(hexdigits)
            return target.parent == repository / "blobs" or (is_hash and target.parent == shared)
    return False


def read_bytes(directory: Path, name: str, most: int) -> bytes:
    """The content of a file; see `file_in`."""
    path = file_in(directory, name, most)
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file; see `file_in`. InputError if it is not JSON or not an object."""
    content = read_bytes(directory, name, _JSON)
    path = directory / name
    try:
        with naming(path):
            value = json.loads(content.decode(), parse_constant=_refuse)
            if not isinstance(value, dict):
                raise InputError(f"{path} must hold a JSON object, got {shown(repr(value))}")
            return value
    except InputError as error:
        if isinstance(error.__cause__, UnicodeDecodeError | json.JSONDecodeError):
            raise InputError(f"{path} is not JSON: {shown(error.__cause__)}") from error
        raise


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
