"""Writes files and directories atomically, and reads text with checks."""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.progress import say

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)
"""The errors of a file system without locks."""


def take_lock(file: IO | int, path: Path, waiting: Callable[[], object], needed: bool = False) -> bool:
    """Take the lock of an open file or folder, and say whether another process had it.

    If so, it calls `waiting`, which may raise an error, and waits. The kernel releases the lock when the file is closed
    or its process ends. On a file system without locks, it warns and goes on, or raises OSError if one is `needed`.
    """
    import fcntl  # not available on Windows, where this is never called

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        pass
    except OSError as error:
        if needed or error.errno not in NO_LOCKS:
            raise
        say(f"warning: no locks on {path} ({error.strerror}): do not let two commands write to its folder at once")
        return False
    waiting()
    fcntl.flock(file, fcntl.LOCK_EX)
    return True


@contextlib.contextmanager
def locked(
    path: Path, taken: str | None = None, waiting: Callable[[], object] = lambda: None, needed: bool = False
) -> Iterator[bool]:
    """Hold the lock of a file (created if missing) or of a folder within the block.

    If another process has it, raises InputError(taken), or calls `waiting` and waits if `taken` is None. Yields whether
    it waited. `needed` as for `take_lock`.
    """
    import fcntl

    def refuse() -> None:
        raise InputError(taken)

    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        yield take_lock(descriptor, path, waiting if taken is None else refuse, needed)
    finally:
        with contextlib.suppress(OSError):  # without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that another thread has forked would keep it
        os.close(descriptor)


def _descriptor(path: Path) -> int | None:
    """The open file of this process that a path stands for, such as /dev/stdout; None for any other path."""
    name = os.path.abspath(path)  # its links lead to the file, whose place would be lost
    match = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", name)
    return int(match[1]) if match else {"/dev/stdout": 1, "/dev/stderr": 2}.get(name)


def check_writable(path: Path) -> None:
    """Raise InputError if `path` is a folder, or if the folder that it would be in does not exist or is read-only."""
    if (descriptor := _descriptor(path)) is not None:
        try:
            os.fstat(descriptor)
        except OSError:
            raise InputError(f"cannot write {path}: it is not open") from None
        return
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file to write")
    for folder in (path.absolute().parent, Path(os.path.realpath(path)).parent):  # the latter of a link's target
        if not folder.is_dir():
            raise InputError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK) and (path.is_file() or not path.exists()):  # a device is opened as it is
        raise InputError(f"cannot write {path}: the folder {folder} is read-only")


def same_file(path: Path, other: Path) -> bool:
    """Whether both are names of one file, so that writing one would replace the other; a device is no file."""
    return path.is_file() and other.is_file() and path.samefile(other)


def check_folder(path: Path) -> None:
    """Raise InputError if no folder can be at `path`: this place, or one above it, is a file or a broken link."""
    for place in (path, *path.parents):
        if os.path.lexists(place) and not place.is_dir():
            kind = "a file" if place.exists() else f"a link to {os.readlink(place)}, which does not exist"
            raise InputError(f"{place} is {kind}: name a folder")


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """The error of a full disk, which names no file, names this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.filename = str(path)
        raise


@contextlib.contextmanager
def atomic_write(path: Path, binary: bool = False) -> Iterator[IO]:
    """Open a temporary file next to `path` that is renamed to `path` if the block ends without an error.

    A reader of `path` sees either the old content or all of the new content, and a failure leaves no file behind. Files
    left by killed processes are removed at the next write of the same path. Text is UTF-8 with "\\n" line ends; what
    UTF-8 does not have, as in names of files that are in another encoding, is written as \\udcfc, which JSON reads.

    A file that is replaced keeps its permissions, and its owner and group where the user may give them.

    If `path` is a link, the file that it leads to is written. A device or a pipe is opened as it is, and what this
    process has open, such as /dev/stdout, is written from its position on: renaming a file to it would replace it.
    """
    check_writable(path := Path(path))
    text: dict[str, Any] = {} if binary else {"encoding": "utf-8", "errors": "backslashreplace", "newline": "\n"}
    kind = "b" if binary else ""
    descriptor = _descriptor(path)
    if descriptor is not None or (path.exists() and not path.is_file()):
        with _naming(path), open(path if descriptor is None else os.dup(descriptor), f"w{kind}", **text) as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with _naming(path), temporary.open(f"x{kind}", **text) as file:
            _lock(file)
            _keep_permissions(path, file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a small file by `atomic_write`."""
    with atomic_write(path) as file:
        file.write(text)


def _keep_permissions(path: Path, descriptor: int) -> None:
    """Give an open file the owner, the group and the permissions of the file at `path`, if there is one."""
    if not path.exists() or not hasattr(os, "fchown"):  # not on Windows
        return
    old = path.stat()
    for owner in (old.st_uid, -1):  # only root may give a file away
        with contextlib.suppress(OSError):
            os.fchown(descriptor, owner, old.st_gid)
            break
    with contextlib.suppress(OSError):  # a file system without permissions
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def check_new_file(path: Path, force: bool) -> None:
    """Raise InputError unless a command can write the file that it was told to write.

    A file with content is replaced only with `force`. Devices, pipes and redirected streams, such as /dev/stdout, lose
    nothing.
    """
    check_writable(path)
    if not force and _descriptor(path) is None and path.is_file() and path.stat().st_size > 0:
        raise InputError(f"{path} exists already: give `force` to replace it")


@dataclass(frozen=True)
class DirectoryKind:
    """A directory that a command writes as a whole.

    name: such as "an exported model". recognise: whether a directory is one. files: patterns of the names of its files.
    """

    name: str
    recognise: Callable[[Path], bool]
    files: tuple[str, ...]


def check_new_directory(path: Path, force: bool, kind: DirectoryKind) -> None:
    """Raise InputError unless a command can write the directory that it was told to write.

    It may be empty. Another directory of the same kind is replaced only with `force`, and only if it has no other
    files; anything else is never replaced.
    """
    check_replaceable(path)
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise InputError(f"{path} exists and is not a directory")
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return
    if not kind.recognise(path):
        raise InputError(f"{path} is not empty, and not {kind.name}: choose another directory")
    if not force:
        raise InputError(f"{path} is {kind.name} already: give `force` to replace it")
    others = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in kind.files)]
    if others:
        raise InputError(
            f"{path} has files that are not part of {kind.name}: {', '.join(others[:3])}; move them away before it is "
            "replaced"
        )


def check_replaceable(directory: Path) -> None:
    """Raise InputError for a directory that `atomic_directory` cannot make, or put another one in the place of."""
    path = Path(os.path.realpath(directory))
    if os.path.ismount(path):
        raise InputError(f"{directory} is a mount point, which cannot be replaced: name a new directory in it")
    with contextlib.suppress(FileNotFoundError):  # a working directory that was removed
        if path in (here := Path.cwd(), *here.parents):
            raise InputError(
                f"{directory} is or contains the working directory, which cannot be replaced: name another one, or run "
                "the command elsewhere"
            )
    if not path.parent.is_dir():
        raise InputError(f"cannot write {directory}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write {directory}: the folder {path.parent} is read-only")


@contextlib.contextmanager
def atomic_directory(path: Path, replace: bool = False) -> Iterator[Path]:
    """Create a temporary directory next to `path` that is renamed to `path` if the block ends without an error.

    Its content is synced to disk before that. With `replace`, an existing directory is replaced atomically (on file
    systems that cannot exchange names, there is a short moment without either). Without `replace`, `path` may only be
    an empty directory. A failure leaves nothing behind, and files left by killed processes are removed at the next
    call.

    Raises:
        InputError: the folder of `path` does not exist, or `path` cannot be replaced.
        OSError: `path` cannot be written, or is a non-empty directory and `replace` is not set.
    """
    check_replaceable(path)
    path = Path(os.path.realpath(path))
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            _lock(descriptor)
            yield temporary
            for entry in sorted(temporary.rglob("*")):
                sync(entry)
            os.fsync(descriptor)
            if replace and path.is_dir() and any(path.iterdir()):
                _exchange(temporary, path)
            else:
                os.rename(temporary, path)
            sync(path.parent)
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Write a file or a folder to the disk: after a power cut, what was renamed may otherwise be empty."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Exchange the names of two directories."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
            return
        if (number := ctypes.get_errno()) not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(other))
    aside = one.with_name(f"{one.name}.old")  # never cleaned up: after a kill it may be the only copy of `other`
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise
    os.rename(aside, one)


def _lock(file: IO | int) -> bool:
    """Lock a file for as long as it is open. False if it is already locked or locks are not supported."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of `path` left by killed writers: nobody holds their lock, which writers take at once.

    A number of a process says little: containers give each of theirs the same, and other machines share the folder.
    """
    pattern = re.compile(re.escape(f".{path.name}.") + r"(\d+)\.[0-9a-f]{8}\.tmp")
    try:
        entries = list(path.absolute().parent.iterdir())
    except OSError:  # a folder whose names cannot be read
        return
    for entry in entries:
        if not (match := pattern.fullmatch(entry.name)):
            continue
        with contextlib.suppress(OSError):  # ignore files that are gone, or another user's
            if _is_running(int(match[1])) and time.time() - entry.stat().st_mtime < 60:  # may not be locked yet
                continue
            descriptor = os.open(entry, os.O_RDONLY if entry.is_dir() else os.O_RDWR)  # NFS locks what it may write
            try:
                if not _lock(descriptor):
                    continue
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            finally:
                os.close(descriptor)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        return True
    return True


def is_older(path: Path, than: Path) -> bool:
    """Whether a file was last written before another, by their times; False if one does not exist."""
    return path.is_file() and than.is_file() and path.stat().st_mtime_ns < than.stat().st_mtime_ns


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file without line ends; only "\\n" and "\\r\\n" end a line, as for `wc -l`."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file to read")
    if not path.exists():
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
