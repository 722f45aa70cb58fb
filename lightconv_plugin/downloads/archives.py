"""Downloaded archives: checked for completeness, and unpacked without writing outside the target folder."""

from __future__ import annotations

import bz2
import contextlib
import errno
import fnmatch
import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from lightconv_plugin.errors import CorpusError

_BLOCK = 1 << 20
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".tbz": ".tar.bz2", ".txz": ".tar.xz"}
# What the standard library raises for truncated or damaged data; ValueError: a name with bytes that no name has;
# IndexError: an empty name in a zip.
_DAMAGE = (EOFError, OSError, ValueError, IndexError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)


class Member(NamedTuple):
    """A file in an archive.

    name   in the archive
    plain  whether it is a plain file
    open   opens it; must be read before the next member
    """

    name: str
    plain: bool
    open: Callable[[], Any]  # a stream of bytes


class _Counted:
    """A readable stream that counts the bytes read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.position = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.position += len(data)
        return data


def kind(name: str) -> tuple[str, str]:
    """An archive's kind by its name: ("tar", "zip" or "" for a single file, the compression's suffix or "")."""
    name = name.lower()
    for short, long in _SHORT.items():
        if name.endswith(short):
            name = name.removesuffix(short) + long
    if name.endswith(".zip"):
        return "zip", ""
    packing = next((suffix for suffix in _OPENERS if name.endswith(suffix)), "")
    return "tar" if name.removesuffix(packing).endswith(".tar") else "", packing


@contextlib.contextmanager
def _damage(archive: Path) -> Iterator[None]:
    """Turn what a damaged archive raises into a CorpusError that names it. File system errors pass through."""
    try:
        yield
    except NotImplementedError as error:  # a compression that this Python does not know
        raise CorpusError(f"{archive} cannot be unpacked: {error}") from error
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # EINVAL: a place before the archive
            raise
        raise CorpusError(f"{archive} is cut short or damaged: {error}") from error


class _Header(tarfile.TarInfo):
    """A header that raises ReadError if it is damaged: tarfile takes any but the first for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> _Header:
        try:
            return super().fromtarfile(tar)
        except tarfile.InvalidHeaderError as error:  # type: ignore[attr-defined]  # has no stub
            raise tarfile.ReadError(str(error)) from error


def _tar_members(archive: Path, packing: str) -> Iterator[Member]:
    with _OPENERS[packing](archive) if packing else archive.open("rb") as file:
        stream: Any = _Counted(file)
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as tar:
            while (member := tar.next()) is not None:
                if not member.isdir():
                    yield Member(member.name, member.isreg(), partial(tar.extractfile, member))
                tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all of them, perhaps millions
            end = tar.offset
        while stream.read(_BLOCK):
            pass  # read to the last byte: the compression's checksum follows the end of the archive
        if stream.position < end + tarfile.BLOCKSIZE:
            raise CorpusError(f"{archive} is cut short or damaged: its end mark is missing")


def _zip_members(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            if info.flag_bits & 1:
                raise CorpusError(f"{archive} is encrypted: unpack it yourself")
            if not info.is_dir():
                form = stat.S_IFMT(info.external_attr >> 16)  # 0 if the system that packed it has no file types
                yield Member(info.filename, form in (0, stat.S_IFREG), partial(file.open, info))


def _members(archive: Path, name: str) -> Iterator[Member]:
    """The files of an archive in its own order; iteration only completes if the archive is complete."""
    form, packing = kind(name)
    if not archive.stat().st_size:
        raise CorpusError(f"{archive} is empty")
    if form == "zip":
        yield from _zip_members(archive)
    elif form == "tar":
        yield from _tar_members(archive, packing)
    else:
        inner = name.removesuffix(Path(name).suffix) if packing else name
        with _OPENERS[packing](archive) if packing else archive.open("rb") as file:
            yield Member(inner, True, lambda: file)


@contextlib.contextmanager
def _reading(archive: Path, member: Member) -> Iterator[IO[bytes]]:
    with _damage(archive), member.open() as stream:
        yield stream


def read_members(archive: Path) -> Iterator[tuple[str, Callable[[], contextlib.AbstractContextManager[IO[bytes]]]]]:
    """(name, open) of every file of an archive in one pass, without unpacking.

    `with open() as stream` reads a file; do so before advancing.

    Raises:
        CorpusError: the archive is truncated or damaged (also when a file is read), or holds a link or a device.
    """
    with _damage(archive):
        for member in _members(archive, archive.name):
            _refuse_special(archive, member)
            yield member.name, partial(_reading, archive, member)


def verify(archive: Path, name: str | None = None) -> None:
    """Read an archive to its end: .tar, .tar.gz, .tgz, .tar.bz2, .tar.xz, .zip, or a single file, compressed or not.

    Args:
        name: determines the kind if the file has a temporary name (an unfinished download)

    Raises:
        CorpusError: it is truncated, damaged, empty, or not what its name says.
    """
    members = 0
    with _damage(archive):
        for member in _members(archive, name or archive.name):
            members += 1
            if member.plain:
                with member.open() as file:
                    while file.read(_BLOCK):
                        pass
    if not members:
        raise CorpusError(f"{archive} holds no files")


def _refuse_special(archive: Path, member: Member) -> None:
    if not member.plain:
        raise CorpusError(f"{archive}: {member.name} is a link or a device, which is not unpacked")


def _place(archive: Path, member: Member, into: Path) -> Path:
    """A member's path below `into`. CorpusError for a link, a device, or a name that leads outside.

    Stricter than tarfile's data filter, which allows links within the folder and renames absolute names, and the same
    for a zip.
    """
    _refuse_special(archive, member)
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name or not name.parts:
        raise CorpusError(f"{archive}: the name {member.name!r} leads out of the folder to unpack into")
    output = into.joinpath(*name.parts)
    if not output.parent.resolve().is_relative_to(into.resolve()):  # by a link already in the folder
        raise CorpusError(f"{archive}: {member.name} would be written outside {into}")
    return output


def unpack(archive: Path, into: Path, members: Sequence[str], limit: int) -> list[Path]:
    """Unpack the files whose names in the archive match one of the patterns `members` (fnmatch; `*` also matches `/`).

    A compressed single file has one member, named like it without the compression's suffix. Names and folders stay as
    in the archive. The whole archive is always read, so that a truncated one is detected.

    Args:
        limit: how many bytes may be unpacked at most

    Returns:
        the files written, in the archive's order

    Raises:
        CorpusError: the archive is truncated or damaged; a matching file is a link or a device or would lie outside
            `into`; a pattern matches nothing; more than `limit` bytes would be unpacked.
    """
    written: list[Path] = []
    missing, room = set(members), limit
    with _damage(archive):
        for member in _members(archive, archive.name):
            wanted = [pattern for pattern in members if fnmatch.fnmatchcase(member.name.removeprefix("./"), pattern)]
            if not wanted:
                continue
            missing.difference_update(wanted)
            output = _place(archive, member, into)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.unlink(missing_ok=True)
            with member.open() as source, output.open("wb") as file:
                while block := source.read(_BLOCK):
                    room -= len(block)
                    if room < 0:
                        raise CorpusError(f"{archive} holds more than the {limit:,} bytes expected of it")
                    file.write(block)
            written.append(output)
    if missing:
        raise CorpusError(f"{archive} has no file {', '.join(sorted(missing))}")
    return written
