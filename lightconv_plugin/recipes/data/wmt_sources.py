"""The parts of the WMT corpora, and how they come out of their archives: parallel text, and test sets as sgm files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lightconv_plugin.downloads.archives import unpack
from lightconv_plugin.errors import CorpusError
from lightconv_plugin.recipes.data.download import sources
from lightconv_plugin.recipes.data.stages import scratch
from lightconv_plugin.recipes.data.text_pool import BLOCK, BOM, count_lines, iter_lines, open_text, write_lines
from lightconv_plugin.validation import read

_SEGMENT = re.compile(r"<seg\s[^>]*>(.*)</seg>")


@dataclass(frozen=True)
class Source:
    """A part of a corpus, in one archive."""

    name: str
    archive: str
    members: tuple[str, str]  # patterns of both sides, as for `archives.unpack`; matches of a * are in numeric order
    gib: int  # upper bound of the unpacked size
    pairs: int | None = None  # None: unknown; the archive's checksum shows that it is the published one


@dataclass(frozen=True)
class WmtTask:
    """The parts of a task and how they are used."""

    src: str
    tgt: str
    train: tuple[Source, ...]  # concatenated in this order
    valid: int | Source  # every N-th pair of the training text, or a separate set
    test: Source
    joint: bool  # joint merges, and one dictionary for both languages unless the options separate them


TASKS = {name: read(WmtTask, table) for name, table in sources()["wmt"].items()}


def _numeric(path: Path) -> list[object]:
    """A sort key that puts Book2 before Book10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def unpack_sides(source: Source, archive: Path, into: Path) -> list[tuple[Path, Path]]:
    """The files of both sides, matched one to one."""
    files = unpack(archive, into, source.members, source.gib << 30)
    sides = []
    for pattern in source.members:
        matching = [path for path in files if fnmatchcase(path.relative_to(into).as_posix(), pattern)]
        sides.append(sorted(matching, key=_numeric))
    if len(sides[0]) != len(sides[1]):
        counts = [f"{len(side)} files {pattern}" for side, pattern in zip(sides, source.members, strict=True)]
        raise CorpusError(f"{archive} has {' and '.join(counts)}: each needs its other side")
    return list(zip(*sides, strict=True))


def same_length(source: Path, target: Path, what: str) -> int:
    """The number of lines of both files, which must be equal and positive; `what` names them in the message."""
    counts = count_lines(source), count_lines(target)
    if counts[0] != counts[1]:
        names = f"{source.name} has {counts[0]:,} lines but {target.name} has {counts[1]:,}"
        raise CorpusError(f"{what}: the sides do not belong together: {names}")
    if not counts[0]:
        raise CorpusError(f"{what}: {source.name} is empty")
    return counts[0]


def expect(pairs: int, published: int | None, what: str, any_size: bool) -> None:
    """CorpusError if a number of pairs differs from the published one."""
    if published is not None and pairs != published and not any_size:
        raise CorpusError(f"{what} has {pairs:,} pairs, expected {published:,} as published (`any_size` accepts it)")


def _append(source: Path, output: Path) -> None:
    """Append a text (plain or .gz) unchanged, but without a byte order mark and with a line feed at its end."""
    with open_text(source) as file, output.open("ab") as out:
        block = file.read(BLOCK).removeprefix(BOM)
        last = b""
        while block:
            out.write(block)
            last = block[-1:]
            block = file.read(BLOCK)
        if last != b"\n":
            out.write(b"\n")


def append_source(source: Source, data: Path, unpacked: Path, outputs: Sequence[Path], any_size: bool) -> int:
    """Append both sides of a parallel text to `outputs`; returns the number of pairs.

    Args:
        data: the folder of the archives
        unpacked: a folder to unpack into; it is removed afterwards
    """
    pairs = 0
    with scratch(unpacked):
        for files in unpack_sides(source, data / source.archive, unpacked):
            pairs += same_length(*files, f"{source.name} in {source.archive}")
            for path, output in zip(files, outputs, strict=True):
                _append(path, output)
    expect(pairs, source.pairs, f"{source.name} in {source.archive}", any_size)
    return pairs


def read_sgm(path: Path) -> list[str]:
    """The segments of a WMT sgm file, one per line, runs of white space collapsed to one space (as in sacreBLEU).

    These files are not proper SGML; like other readers, this one does not resolve entities.
    """
    segments = []
    for number, line in enumerate(iter_lines(path), 1):
        if "<seg" not in line.lower() and "</seg" not in line.lower():
            continue
        match = _SEGMENT.fullmatch(line.strip())
        if match is None or "<seg" in match[1].lower():
            raise CorpusError(f"{path.name}: line {number} is not one <seg …>text</seg>: {line.strip()[:80]}")
        segments.append(" ".join(match[1].split()))
    if not segments:
        raise CorpusError(f"{path.name} has no segments")
    return segments


def extract_sgm(source: Source, data: Path, unpacked: Path, outputs: Sequence[Path], any_size: bool) -> int:
    """Write both sides of a test set as plain text; returns the number of segments. Arguments as in `append_source`."""
    with scratch(unpacked):
        files = unpack_sides(source, data / source.archive, unpacked)
        if len(files) != 1:
            raise CorpusError(f"{source.archive} has {len(files)} files {source.members[0]} instead of one")
        sides = [read_sgm(path) for path in files[0]]
    if len(sides[0]) != len(sides[1]):
        counts = f"{files[0][0].name} has {len(sides[0])} segments but {files[0][1].name} has {len(sides[1])}"
        raise CorpusError(f"{source.name} in {source.archive}: the sides do not belong together: {counts}")
    expect(len(sides[0]), source.pairs, f"{source.name} in {source.archive}", any_size)
    for side, output in zip(sides, outputs, strict=True):
        write_lines(output, side)
    return len(sides[0])
