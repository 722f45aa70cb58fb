"""Resumable steps: outputs appear whole or not at all, and are made again only when what they depend on changed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def say(message: str) -> None:
    """One line of progress on stderr, at once (stdout stays free for results)."""
    print(message, file=sys.stderr, flush=True)


def cores() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0))


def digest(path: Path, of_file: Callable[[Path], str] | None = None) -> str:
    """SHA-256 of a file, or of a folder's relative file names and contents (the latter by `of_file`)."""
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if p.is_file()]
        listing = [(str(p.relative_to(path)), (of_file or digest)(p)) for p in files]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    with path.open("rb") as file:
        sha = hashlib.sha256()
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def remove(path: Path) -> None:
    """Remove a file or a folder tree; nothing happens when it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file so that a reader never sees half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


class Digests:
    """`digest`, which remembers large files in a file of its own, as long as their size, inode and change time stay.

    What was changed within the last seconds before it was read is not remembered: another change could have left the
    same time.
    """

    LARGE = 32 << 20  # bytes; smaller files are read in every run

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._in_this_run: dict[Path, str] = {}
        try:
            self._known = json.loads(memory.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._known = {}

    def forget(self, path: Path) -> None:
        """The path has been written anew."""
        self._in_this_run.pop(path, None)

    def __call__(self, path: Path) -> str:
        if path not in self._in_this_run:
            self._in_this_run[path] = digest(path, self._of_file) if path.is_dir() else self._of_file(path)
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
                write_text(self._memory, json.dumps(self._known, indent=1))
        return found


class Steps:
    """The steps that fill one folder.

    A step is known by its name. Its stamp `root/.steps/<name>.json` holds the parameters and the SHA-256 of every input
    and output; the step is done when all of them still agree. Outputs are written beside their final names with the
    ending `.tmp`, renamed when the step has succeeded, and the stamp is written last: wherever a run is killed, the
    next one starts that step again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stamps = root / ".steps"
        self._stamps.mkdir(parents=True, exist_ok=True)
        self._lock = (self._stamps / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting: another process is working in {root}")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._digest = Digests(self._stamps / "digests.json")

    def close(self) -> None:
        """Let the next process work in this folder."""
        self._lock.close()

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        name: str,
        title: str,
        make: Callable[..., None],
        *,
        inputs: Sequence[Path],
        outputs: Sequence[Path],
        params: Mapping[str, object],
    ) -> bool:
        """Call `make(*temporary_outputs)` unless the step is done. True if it ran.

        `params` is everything but the inputs that the outputs depend on (JSON values).
        """
        stamp = self._stamps / f"{name}.json"
        wanted = {"params": dict(params), "inputs": self._listing(inputs)}
        if self._is_done(stamp, wanted, outputs):
            say(f"{title}: done before")
            return False
        say(f"{title} ...")
        start = time.monotonic()
        stamp.unlink(missing_ok=True)
        temporaries = [path.with_name(path.name + ".tmp") for path in outputs]
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
            remove(path)
            os.replace(temporary, path)
            self._digest.forget(path)
        write_text(stamp, json.dumps({**wanted, "outputs": self._listing(outputs)}, indent=1))
        say(f"{title}: {time.monotonic() - start:.1f} s")
        return True

    def _listing(self, paths: Sequence[Path]) -> list[list[str]]:
        """[name, SHA-256] of each; names relative to the folder, so that it can be moved."""
        return [[os.path.relpath(path, self.root), self._digest(path)] for path in paths]

    def _is_done(self, stamp: Path, wanted: Mapping[str, object], outputs: Sequence[Path]) -> bool:
        if not stamp.is_file() or not all(path.exists() for path in outputs):
            return False
        try:
            known = json.loads(stamp.read_text(encoding="utf-8"))
        except ValueError:
            return False
        # Compared as JSON: a tuple in params is a list in the stamp.
        return known == json.loads(json.dumps({**wanted, "outputs": self._listing(outputs)}))
