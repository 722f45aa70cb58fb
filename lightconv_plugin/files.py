"""Files that are written whole or not at all, and text that is read with checks."""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from lightconv_plugin.errors import InputError


@contextlib.contextmanager
def atomic_write(path: Path, binary: bool = False) -> Iterator[IO]:
    """Open a temporary file beside `path` that takes its name only when the block ends without an error.

    Whoever reads `path` sees the old content or all of the new one, and a failure leaves no file behind. What a process
    that was killed has left goes at the next write of the same file. Text is UTF-8 with "\\n" line ends.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file to write")
    if not path.absolute().parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.absolute().parent}")
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    how: dict[str, Any] = {"mode": "xb"} if binary else {"mode": "x", "encoding": "utf-8", "newline": "\n"}
    try:
        with temporary.open(**how) as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _lock(file: IO) -> bool:
    """Lock a file for as long as it is open; whether it is locked now. Not where neither system nor place has locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files of `path` whose writers were killed: no such process is here, and nobody locks them.

    The lock tells of writers on other machines that share the folder.
    """
    pattern = re.compile(re.escape(f".{path.name}.") + r"(\d+)\.[0-9a-f]{8}\.tmp")
    with contextlib.suppress(OSError):  # what cannot be removed stays
        for entry in path.absolute().parent.iterdir():
            if (match := pattern.fullmatch(entry.name)) and not _is_running(int(match[1])):
                with entry.open("rb") as file:
                    if _lock(file):
                        entry.unlink()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file without their ends; only "\\n" and "\\r\\n" end a line, as for `wc -l`."""
    if not path.is_file():
        raise InputError(f"no such file: {path}")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path} is not UTF-8: byte {content[error.start]:#04x} in line {line}") from error
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise InputError(f"{path} is empty")
    return [line.removesuffix("\r") for line in lines]
