"""The file of a training's records: appends a record, and reads a folder's records from it or from an old log."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightconv_plugin.records.fairseq_log import records_of_log

FILE = "records.jsonl"
# Logs of runs without records: of lightconv train, of hydra, and of the usual redirections.
LOGS = ("train.log", "hydra/hydra_train.log", "hydra_train.log", "log.txt", "train.txt")
_TAIL = 1 << 16  # bytes at the end of the file that hold the last statistics


def append(folder: Path, record: dict[str, Any]) -> None:
    """Append a record in one write, on a line of its own even if a killed writer has left half a line.

    Raises:
        OSError: it cannot be written.
    """
    # Half a surrogate pair, as in a name that is not UTF-8, becomes JSON's escape of it.
    line = json.dumps(record, ensure_ascii=False, default=str).encode(errors="backslashreplace") + b"\n"
    with (folder / FILE).open("ab+", buffering=0) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        if (written := file.write(line)) != len(line):
            raise OSError(f"only {written} of {len(line)} bytes of a record were written to {folder / FILE}")


def size(folder: Path) -> int:
    """The number of bytes of the records so far."""
    path = folder / FILE
    return path.stat().st_size if path.is_file() else 0


def last_statistics(folder: Path, since: int = 0) -> dict[str, Any] | None:
    """The last statistics within an epoch, of those written after the first `since` bytes."""
    begin = max(since, size(folder) - _TAIL)
    if not size(folder) > begin:
        return None
    with (folder / FILE).open("rb") as file:
        file.seek(begin)
        found, _ = _parsed(file.read().decode(errors="replace"))
    return next((record for record in reversed(found) if record.get("part") == "train/inner"), None)


@dataclass(frozen=True)
class Records:
    """The records of a folder: those of `file`, "" if it has none.

    broken: the number of truncated lines that were left out. searched: the names of all files that were read.
    """

    records: list[dict[str, Any]]
    broken: int = 0
    file: str = ""
    searched: tuple[str, ...] = ()


def read_folder(folder: Path) -> Records:
    """The records in a training's folder: from records.jsonl, otherwise from the first log that has statistics.

    Records that begin in the middle of a training, begun by an earlier version, are passed over for its log.
    """
    first = Records([])
    searched: list[str] = []
    for path in _files(folder):
        searched.append(path.name)
        text = path.read_text(encoding="utf-8", errors="replace")
        records = Records(*(_parsed if path.name == FILE else records_of_log)(text), path.name, tuple(searched))
        if any(record["record"] == "statistics" for record in records.records) and not _begins_late(records):
            return records
        first = first if first.records else records
    return Records(first.records, first.broken, first.file, tuple(searched))


def _files(folder: Path) -> Iterator[Path]:
    known = [folder / name for name in (FILE, *LOGS)]
    others = sorted(path for path in folder.glob("*.log") if path not in known)
    return (path for path in (*known, *others) if path.is_file())


def _begins_late(found: Records) -> bool:
    return found.file == FILE and found.records[0].get("update", 0) > 0


def _parsed(text: str) -> tuple[list[dict[str, Any]], int]:
    """(the records of a text, the number of truncated lines)."""
    found, broken = [], 0
    for line in filter(None, text.split("\n")):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("record"), str):
            found.append(record)
        else:
            broken += 1
    return found, broken
