"""Archives from the network: checked for being whole, and unpacked without writing anywhere else."""

from __future__ import annotations

import bz2
import contextlib
import fnmatch
import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from lightconv_plugin.recipes.data.parallel_folder import CorpusError

_BLOCK = 1 << 20
_OPENERS: dict[str, Callable[[Path], IO[bytes]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".tbz": ".tar.bz2", ".txz": ".tar.xz"}
# What the standard library raises for data that is cut short or damaged.
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)


class Member(NamedTuple):
    """A file in an archive.

    name   in the archive
    plain  whether it is a plain file
    open   its bytes, to be read before the next member
    tar    its header in a tar
    """

    name: str
    plain: bool
    open: Callable[[], IO[bytes]]
    tar: tarfile.TarInfo | None = None


class _Counted:
    """A stream to read from that knows how much has been read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.position = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.position += len(data)
        return data


class _Guarded:
    """A member's stream: damage to the archive is a CorpusError also where the stream is read."""

    def __init__(self, archive: Path, stream: IO[bytes]) -> None:
        self._archive = archive
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        with _damage(self._archive):
            return self._stream.read(size)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> _Guarded:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def kind(name: str) -> tuple[str, str]:
    """What an archive is by its name: ("tar", "zip" or "" for a single file, the compression's ending or "")."""
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
    """Turn what a damaged archive raises into one line that names it. Errors of the file system stay as they are."""
    try:
        yield
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorpusError(f"{archive} is cut short or damaged: {error}") from error


def _tar_members(archive: Path, packing: str) -> Iterator[Member]:
    with _OPENERS[packing](archive) if packing else archive.open("rb") as file:
        stream = _Counted(file)
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            while (member := tar.next()) is not None:
                if not member.isdir():
                    yield Member(member.name, member.isreg(), lambda member=member: tar.extractfile(member), member)
                tar.members.clear()  # it would remember all of them, which may be millions
            end = tar.offset
        while stream.read(_BLOCK):
            pass  # to the last byte: the checksum of the compression comes after the end of the archive
        if stream.position < end + tarfile.BLOCKSIZE:
            raise CorpusError(f"{archive} is cut short or damaged: its end mark is missing")


def _zip_members(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            if not info.is_dir():
                form = stat.S_IFMT(info.external_attr >> 16)  # 0 where the packing system had no such thing
                yield Member(info.filename, form in (0, stat.S_IFREG), lambda info=info: file.open(info))


def _members(archive: Path, name: str) -> Iterator[Member]:
    """The files of an archive in its own order; the end is reached only when the archive is whole."""
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


def read_members(archive: Path) -> Iterator[tuple[str, Callable[[], _Guarded]]]:
    """(name, open) of every file of an archive in one pass, for reading without unpacking; `open` before the next one.

    Raises:
        CorpusError: the archive is cut short or damaged (also where a file is read), or holds a link or a device.
    """
    with _damage(archive):
        for member in _members(archive, archive.name):
            _refuse_special(archive, member)
            yield member.name, lambda member=member: _Guarded(archive, member.open())


def verify(archive: Path, name: str | None = None) -> None:
    """Read an archive through: .tar, .tar.gz, .tgz, .tar.bz2, .tar.xz, .zip, or a single file, compressed or not.

    Args:
        name: tells the kind where the file itself has another name (a download under way)

    Raises:
        CorpusError: it is cut short, damaged, empty, or not what its name says.
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
    """Where a member goes below `into`. CorpusError for a link, a device, or a name that leads elsewhere."""
    _refuse_special(archive, member)
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name or not name.parts:
        raise CorpusError(f"{archive}: the name {member.name!r} leads out of the folder to unpack into")
    output = into.joinpath(*name.parts)
    outside = not output.parent.resolve().is_relative_to(into.resolve())  # a link that lay in the folder before
    # tarfile's filter knows tars alone, renames what is absolute, and allows links, hence the checks before it; the
    # first releases of Python 3.10 and 3.11 lack it.
    if member.tar is not None and hasattr(tarfile, "data_filter"):
        try:
            tarfile.data_filter(member.tar, str(into))
        except tarfile.FilterError:
            outside = True
    if outside:
        raise CorpusError(f"{archive}: {member.name} would be written outside {into}")
    return output


def unpack(archive: Path, into: Path, members: Sequence[str], limit: int) -> list[Path]:
    """Unpack the files whose names in the archive match one of the patterns `members` (fnmatch; `*` also matches `/`).

    A compressed single file has one member, its name without the compression's ending. Names and folders stay as they
    are in the archive. The whole archive is read, so that one that is cut short is noticed whatever was wanted of it.

    Args:
        limit: the most bytes that may come out

    Returns:
        the files written, in the archive's order

    Raises:
        CorpusError: the archive is cut short or damaged; a file wanted is a link or a device or would lie outside
            `into`; a pattern matches nothing; more than `limit` bytes would come out.
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
