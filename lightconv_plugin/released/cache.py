"""Where the released models are kept, and what is known of their files.

CACHE/released/files.json            sizes and checksums of the archives as first seen, parameters of the models
CACHE/released/FOLDER/               model.pt, dict.XX.txt and bpecodes, as released
CACHE/released/FOLDER/exported/      what `lightconv export` makes of them
CACHE/released/TEST/                 a binarised test set
CACHE/released/downloads/            archives that are not complete or not unpacked yet
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from lightconv_plugin.errors import InputError, TranslationError
from lightconv_plugin.files import atomic_write, locked
from lightconv_plugin.paths import cache_dir
from lightconv_plugin.released.models import MODELS, Model, find

EXPORTED = "exported"


def home() -> Path:
    """The folder of all released models."""
    return cache_dir() / "released"


def downloads(folder: str) -> Path:
    """Where the archive of a folder of the cache is while it is downloaded and unpacked."""
    return home() / "downloads" / folder


def checkpoint(model: Model) -> Path:
    return home() / model.folder / "model.pt"


def exported(model: Model) -> Path:
    return home() / model.folder / EXPORTED


def test_set(model: Model) -> Path:
    return home() / model.test_folder


def directory(name: str) -> Path:
    """The exported directory of a released model.

    Raises InputError if there is no such model, and its subclass TranslationError if it is not in the cache.
    """
    path = exported(find(name))
    if not path.is_dir():
        raise TranslationError(f"{name} is a released model that is not in the cache: run lightconv released {name}")
    return path


def resolve(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """A path as it is; the exported directory for the name of a released model, unless there is such a path.

    Raises the TranslationError of `directory`.
    """
    name = os.fspath(path)
    return directory(name) if name in MODELS and not os.path.lexists(name) else path


def known() -> dict[str, dict[str, Any]]:
    """{file or folder: {"bytes", "sha256"} or {"parameters"}}, as recorded when a file was first seen and a model
    last exported.

    A file with another name than upstream's is recorded as FOLDER/FILE.

    Raises InputError if the table is damaged.
    """
    path = home() / "files.json"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{path} is damaged: delete it, and later downloads are recorded anew ({error})") from None
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise InputError(f"{path} is damaged: delete it, and later downloads are recorded anew")
    return table


def record(name: str, **facts: Any) -> None:
    """Put facts into the table, in place of those of this name. Writers take turns."""
    with locked(home()):
        table = known()
        if table.get(name) != facts:
            with atomic_write(home() / "files.json") as file:
                json.dump({**table, name: facts}, file, indent=1, sort_keys=True)


def clear(name: str | None = None) -> tuple[int, list[str]]:
    """Delete a model, or without a name all models, test sets and downloads and the table.

    Downloads of the model that were interrupted are deleted, and its test set unless another model in the cache has
    the same. The recorded checksums of a single model are kept: another download has to match them.

    Returns the number of bytes freed and, without a name, what else is in the folder and stays.
    """
    freed = 0
    for path in _own() if name is None else _folders(find(name)):
        freed += size(path)
        if path.is_dir():
            shutil.rmtree(path.resolve())
        if path.is_symlink() or path.is_file():  # files.json, or a link: its folder is gone
            path.unlink()
    if name is not None or not home().is_dir():
        return freed, []
    left = sorted(path.name for path in home().iterdir())
    with contextlib.suppress(OSError):  # it has other files, or is a link, to a larger disk, say, to be used again
        home().rmdir()
    return freed, left


def _own() -> list[Path]:
    """What lightconv has put into the cache, also what processes that were killed have left."""
    models = {folder for model in MODELS.values() for folder in (model.folder, model.test_folder)}
    names = [*models, "downloads", "files.json"]
    return [path for name in names for path in (home() / name, *home().glob(f".{name}.*.tmp"))]


def _folders(model: Model) -> list[Path]:
    """The folders of the cache that only this model needs."""
    names = [model.folder]
    if not any(
        other.test_folder == model.test_folder and other.folder != model.folder and (home() / other.folder).is_dir()
        for other in MODELS.values()
    ):
        names.append(model.test_folder)
    return [place for name in names for place in (home() / name, downloads(name))]


def size(folder: Path) -> int:
    """Bytes in a folder, or of a file; 0 if it does not exist."""
    paths = [folder] if folder.is_file() else folder.rglob("*")
    return sum(path.lstat().st_size for path in paths if path.is_file())
