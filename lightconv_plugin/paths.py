"""Locations of the package and its files."""

import difflib
import os
from pathlib import Path

import lightconv_plugin
from lightconv_plugin.errors import InputError


def package_dir() -> Path:
    """The folder this package was imported from.

    Links in it are not resolved: fairseq compares its --user-dir with the package's `__path__` as text.
    """
    return Path(lightconv_plugin.__path__[0]).absolute()


def configs_dir() -> Path:
    """The folder of configurations: inside an installed package, or next to the package in a checkout."""
    installed = package_dir() / "configs"
    return installed if installed.is_dir() else package_dir().parent / "configs"


def workspace() -> Path:
    """The folder of data/ and runs/, and of relative paths in configurations.

    It is LIGHTCONV_HOME (set by the scripts of a checkout), or else the working directory.
    """
    return Path(os.environ.get("LIGHTCONV_HOME") or os.getcwd()).absolute()


def short(path: Path) -> Path:
    """The same path, relative to the working directory if it is below it: for what is passed on to other people."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def beside(folder: Path, name: str) -> Path:
    """The path of a file beside a folder; if the folder is a link and has none there, beside what it links to."""
    near = folder.absolute().parent / name
    return near if near.exists() else folder.resolve().parent / name


def user_caches() -> Path:
    """XDG_CACHE_HOME, or else ~/.cache. RuntimeError if the user has no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()).absolute()


def cache_dir() -> Path:
    """Where downloaded models are kept: LIGHTCONV_HOME, or else lightconv in the user's caches.

    Raises InputError if there is neither.
    """
    if home := os.environ.get("LIGHTCONV_HOME"):
        return Path(home).absolute()
    try:
        return user_caches() / "lightconv"
    except RuntimeError:
        raise InputError("there is no home folder for downloaded models: set LIGHTCONV_HOME to a folder") from None


def find_config(name: str | Path, suffix: str = ".yaml") -> Path:
    """The absolute path of a configuration file; `name` may omit the suffix.

    name: a path, relative to the working directory or the workspace, or a name within `configs_dir()`, such as
    multi30k_en_de/dynamicconv (or configs/multi30k_en_de/dynamicconv).

    Raises InputError, with suggestions, if there is no such file.
    """
    configs = configs_dir()
    for folder in (Path.cwd(), workspace(), configs, configs.parent):
        for path in (folder / name, folder / f"{name}{suffix}"):
            if path.is_file():
                path, own = path.resolve(), configs.resolve()
                # Callers compare it with `configs_dir()`, which may be below a link.
                return configs / path.relative_to(own) if path.is_relative_to(own) else path
    found = (path.relative_to(configs) for path in configs.rglob(f"*{suffix}") if path.stem != "protocol")
    known = sorted(path.as_posix().removesuffix(".yaml") for path in found)
    asked = str(name).removeprefix("configs/").removesuffix(".yaml")
    alike = difflib.get_close_matches(asked, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(alike)}?" if alike else f"give a path, or a name such as {known[0]}"
    raise InputError(f"there is no configuration {name}: {hint}")
