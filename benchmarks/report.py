"""Output of the benchmarks: readable tables, and JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightconv_plugin.quiet import quietly

RESULTS = Path(__file__).resolve().parent / "results"


class BenchmarkError(Exception):
    """A benchmark cannot run with these arguments or in this environment; the message is for the user."""


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
