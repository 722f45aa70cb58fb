"""Output of the benchmarks: readable tables, and JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import read_lines
from lightconv_plugin.quiet import quietly

RESULTS = Path(__file__).resolve().parent / "results"


class BenchmarkError(Exception):
    """A benchmark cannot run with these arguments or in this environment; the message is for the user."""


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """The command-line parser of `python -m benchmarks.PROGRAM`; its help keeps the lines of the description."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def checkpoints(given: Sequence[str]) -> dict[str, Path]:
    """The files of --path NAME=CHECKPOINT …, by name."""
    paths: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in paths:
            raise BenchmarkError(f"--path: NAME=CHECKPOINT, each name once, got {text!r}")
        if not Path(path).is_file():
            raise BenchmarkError(f"--path: no such file: {path}")
        paths[name] = Path(path).absolute()
    return paths


def lines_of(path: Path, option: str) -> list[str]:
    """The lines of the text that `option` names."""
    try:
        lines = read_lines(path)
    except (OSError, InputError) as error:
        raise BenchmarkError(f"{option}: {error}") from error
    if not lines:
        raise BenchmarkError(f"{option}: {path} is empty")
    return lines


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An aligned Markdown table; all columns except the first are numbers and right-aligned."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        first, *rest = zip(row, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]) + " |"

    rule = (
        "|"
        + "|".join("-" * (width + 2) if not column else "-" * (width + 1) + ":" for column, width in enumerate(widths))
        + "|"
    )
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def digits(value: float | None, unit: float = 1.0) -> str:
    """Three significant digits of value/unit; a dash if it was not measured."""
    if value is None or math.isnan(value):
        return "–"
    value /= unit
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(decimals, 4)}f}"


def milliseconds(seconds: float | None) -> str:
    return digits(seconds, 1e-3)


def write_json(path: Path, content: dict) -> None:
    """Write the file atomically."""
    partial = path.with_name(path.name + f".part{os.getpid()}")
    try:
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def run(main: Callable[[], None]) -> int:
    """Run a benchmark's main, with errors as one line on stderr. Returns the exit status."""
    try:
        with quietly():
            main()
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
