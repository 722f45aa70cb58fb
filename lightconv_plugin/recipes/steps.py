"""Resumable steps: outputs appear complete or not at all, and are made again only when their dependencies changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.files import check_folder, take_lock, write_text
from lightconv_plugin.progress import say

STAMPS = ".steps"  # in a folder that steps fill


def digest(path: Path, of_file: Callable[[Path], str] | None = None, written: Collection[str] | None = None) -> str:
    """SHA-256 of a file, or of a folder's relative file names and contents (hashed by `of_file`).

    written: only these files of the folder.
    """
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if p.is_file()]
        if written is not None:
            known = set(written)
            files = [p for p in files if str(p.relative_to(path)) in known]
        listing = [(str(p.relative_to(path)), (of_file or digest)(p)) for p in files]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    from lightconv_plugin.downloads.download import digest as of_a_file  # with modules for the network

    return of_a_file("sha256", path)


def remove(path: Path) -> None:
    """Remove a file or a folder tree if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def entries(folder: Path) -> list[str]:
    """The relative names of everything in a folder tree except its folders; links are not followed."""
    return [
        os.path.relpath(os.path.join(place, name), folder)
        for place, folders, files in os.walk(folder)
        for name in [*files, *(name for name in folders if os.path.islink(os.path.join(place, name)))]
    ]


def check_own(root: Path, outputs: Sequence[Path]) -> None:
    """Raise CorpusError for an output that exists in a folder in which no steps have begun."""
    if not (root / STAMPS).exists():
        for path in filter(os.path.lexists, outputs):
            raise CorpusError(
                f"`out` {root} has a {path.relative_to(root)} that lightconv did not make, and that would be replaced: "
                "name another folder, or move it away (lightconv reproduce takes what is there with `no_prepare`)"
            )


class Digests:
    """`digest` with a cache on disk for large files, valid while their size, inode and change time stay the same.

    A file changed only seconds before it was read is not cached: another change could have left the same time.
    """

    LARGE = 32 << 20  # bytes; smaller files are hashed in every run

    def __init__(self, memory: Path) -> None:
        self.memory = memory
        self._in_this_run: dict[Path, str] = {}
        try:
            self._known = json.loads(memory.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._known = {}

    def forget(self, path: Path) -> None:
        """Drop a path that has been rewritten."""
        self._in_this_run.pop(path, None)

    def __call__(self, path: Path, written: Collection[str] | None = None) -> str:
        """The digest; of a folder, for only the `written` files if they are given."""
        if path not in self._in_this_run:
            self._in_this_run[path] = digest(path, self._of_file, written) if path.is_dir() else self._of_file(path)
        return self._in_this_run[path]

    def _of_file(self, path: Path) -> str:
        before = path.stat()
        if before.st_size < self.LARGE:
            return digest(path)
        state = [before.st_size, before.st_ino, before.st_ctime_ns]
        name = str(path.resolve())
        *known, found = self._known.get(name, [None])
        if known != state:
            found = digest(path)
            if time.time_ns() - before.st_ctime_ns > 3_000_000_000:
                self._known[name] = [*state, found]
                write_text(self.memory, json.dumps(self._known, indent=1))
        return found


def _place(output: Path) -> Path:
    """Where an output is: a folder that is linked, such as one on a larger disk, where the link leads."""
    place = Path(os.path.realpath(output)) if output.is_symlink() and output.is_dir() else output
    if os.path.ismount(place):
        raise CorpusError(f"{output} is a mount point, which cannot be replaced: link a folder in it instead")
    if place != output and (place.parent / STAMPS).exists():
        raise CorpusError(f"{output} leads to {place}, which is another preparation's: remove the link")
    return place


class Steps:
    """The steps that fill one folder; the object holds a lock on it.

    Each step has a name. Its stamp `root/.steps/NAME.json` holds its dependencies and its result. The stamp is written
    last and atomically: wherever a run is killed, the next one repeats that step. A step is done when its stamp still
    matches its dependencies and outputs. Other files in an output folder are the user's: they are ignored and stay.
    """

    def __init__(self, root: Path) -> None:
        check_folder(root)
        self.root = root
        self._stamps = root / STAMPS
        self._stamps.mkdir(parents=True, exist_ok=True)
        self._lock = (self._stamps / "lock").open("w")
        # A program started by a step may outlive this process, so it can hold the lock too (Popen, close_fds=False).
        os.set_inheritable(self._lock.fileno(), True)
        take_lock(self._lock, self._stamps / "lock", lambda: say(f"waiting: another process is working in {root}"))
        self._digest = Digests(self._stamps / "digests.json")
        self._record_of_files = self._stamps / "files"  # {a step's output folder: the files that it wrote}
        try:
            self._files: dict[str, list[str]] = json.loads(self._record_of_files.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            self._files = {}

    def close(self) -> None:
        """Let the next process work in this folder."""
        self._lock.close()

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The lock's file descriptor: a process that inherits it holds the lock as well."""
        return self._lock.fileno()

    def run(
        self,
        name: str,
        title: str,
        make: Callable[..., object],
        *,
        inputs: Sequence[Path],
        outputs: Sequence[Path],
        params: Mapping[str, object],
    ) -> bool:
        """Call `make(*temporary_outputs)` unless the step is done. True if it ran.

        `params`: everything that the outputs depend on besides the contents of the inputs (JSON values). Outputs are
        written with the suffix `.tmp` and renamed when the step has succeeded; a folder that is
        linked is replaced where the link leads.

        Raises CorpusError, before the work, for an output that is a mount point or leads to another preparation's.
        """
        depends = {"params": dict(params), "inputs": self._listing(inputs)}
        if self._is_done(
            name, title, depends, lambda made: all(p.exists() for p in outputs) and made == self._listing(outputs)
        ):
            for path in outputs:  # of an earlier version, without a record
                if path.is_dir() and os.path.relpath(path, self.root) not in self._files:
                    self._remember(path, entries(path))
            return False
        start = time.monotonic()
        temporaries = [(place := _place(path)).with_name(place.name + ".tmp") for path in outputs]
        for path, temporary in zip(outputs, temporaries, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove(temporary)
        try:
            make(*temporaries)
        except BaseException:
            for temporary in temporaries:
                remove(temporary)
            raise
        for path, temporary in zip(outputs, temporaries, strict=True):
            self._put(temporary, path)
            self._digest.forget(path)
        self.record(name, depends, self._listing(outputs))
        say(f"{title}: {time.monotonic() - start:.1f} s")
        return True

    def _put(self, temporary: Path, path: Path) -> None:
        """Move a new output to its place; the user's files in the folder there stay."""
        place = _place(path)
        if not temporary.is_dir():
            remove(place)
            os.replace(temporary, place)
            return
        new, found = entries(temporary), entries(place)
        # Without a record, all files are the step's, but for those of a folder that the user has linked.
        old = self._files.get(os.path.relpath(path, self.root), [] if path.is_symlink() else found)
        self._remember(path, {*old, *new})  # a run that is killed below leaves both kinds
        if set(found) <= set(old):
            remove(place)
            os.replace(temporary, place)
        else:
            for file in old:
                (place / file).unlink(missing_ok=True)
            for file in new:
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                os.replace(temporary / file, place / file)
            remove(temporary)
        self._remember(path, new)

    def _remember(self, path: Path, files: Collection[str]) -> None:
        self._files[os.path.relpath(path, self.root)] = sorted(files)
        write_text(self._record_of_files, json.dumps(self._files, indent=1))

    def value(
        self,
        name: str,
        title: str,
        make: Callable[[], Any],
        depends: Mapping[str, Any],
        intact: Callable[[Any], bool] = lambda result: True,
    ) -> Any:
        """The result of `make()`, or the previous one if nothing in `depends` has changed (all JSON values).

        intact: takes the previous result and checks that the files it refers to still exist.
        """
        if self._is_done(name, title, depends, intact):
            return self.result(name)
        return self.record(name, depends, make())

    def _is_done(self, name: str, title: str, depends: Mapping[str, Any], intact: Callable[[Any], bool]) -> bool:
        """Print what is done and why; forget a step that is not done."""
        again = ""
        if self.is_known(name):
            changed = self.changed(name, depends)
            if not changed and intact(self.result(name)):
                say(f"{title}: done before")
                return True
            again = f" again, changed: {shorten(changed)}" if changed else " again: what it left is gone or has changed"
        say(f"{title}{again} ...")
        self._stamp(name).unlink(missing_ok=True)
        return False

    def is_known(self, name: str) -> bool:
        """Whether a step was started or done."""
        return self._read(name) is not None

    def result(self, name: str) -> Any:
        """The result of a step when it was last done; None if it never was."""
        return (self._read(name) or {}).get("outputs")

    def changed(self, name: str, depends: Mapping[str, Any]) -> list[str]:
        """How `depends` differs from what a known step depended on, one line per difference."""
        known = {key: value for key, value in (self._read(name) or {}).items() if key != "outputs"}
        return changes(known, json.loads(json.dumps(depends)))  # a tuple is a list in the stamp

    def record(self, name: str, depends: Mapping[str, Any], result: Any) -> Any:
        """Record that a step is done, or started if the result is None; returns the result."""
        write_text(self._stamp(name), json.dumps({**depends, "outputs": result}, indent=1))
        return result

    def forget(self, prefix: str) -> None:
        """Forget all steps whose names begin with `prefix`."""
        for path in self._stamps.glob("*.json"):
            if path.name.startswith(prefix.replace("/", ".")):
                path.unlink()

    def digests(self, paths: Sequence[Path], root: Path) -> dict[str, str]:
        """{name relative to `root`: SHA-256}."""
        written = {path: self._files.get(os.path.relpath(path, self.root)) for path in paths}
        return {os.path.relpath(path, root): self._digest(path, files) for path, files in written.items()}

    def _listing(self, paths: Sequence[Path]) -> list[list[str]]:
        """[name, SHA-256] of each path; names are relative to the folder, so that it can be moved."""
        return [[name, sha] for name, sha in self.digests(paths, self.root).items()]

    def _stamp(self, name: str) -> Path:
        return self._stamps / f"{name.replace('/', '.')}.json"

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            stamp = json.loads(self._stamp(name).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return stamp if isinstance(stamp, dict) else None


def changes(old: Any, new: Any, name: str = "") -> list[str]:
    """The differences between two JSON values, one line each."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = sorted({*old, *new})
        return [line for key in keys for line in changes(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))]
    if old == new:
        return []
    if old is None or new is None:
        return [f"{name} is {'new' if old is None else 'gone'}"]
    # The values of checksums and times are of no interest to the reader.
    return [name if any(_is_opaque(v) for v in (old, new)) else f"{name} {_shown(old)} → {_shown(new)}"]


def _is_opaque(value: Any) -> bool:
    return len(str(value)) == 64 if isinstance(value, str) else isinstance(value, list) and len(str(value)) > 80


def _shown(value: Any) -> str:
    return (" ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def shorten(lines: Sequence[str], most: int = 6) -> str:
    """Join lines into one; at most `most` are shown."""
    return "; ".join(lines[:most]) + (f"; and {len(lines) - most} more" if len(lines) > most else "")
