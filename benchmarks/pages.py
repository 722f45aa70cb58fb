"""The measured figures of README.md and docs/: written from benchmarks/results, or compared with it.

    python -m benchmarks.pages            # write the figures that are out of date
    python -m benchmarks.pages --check    # write nothing; name each stale figure, exit status 2

Comments, which no reader sees, mark what comes from a file:

- `<!-- table: NAME -->`, a line before a table: the whole table is one of `TABLES`.
- `NUMBER<!-- figure: NAME / ROW / COLUMN -->`, anywhere in a page: the number is a cell of that table. ROW may have
  wildcards; if several rows match, `least` or `most` before the address picks one. `A ÷ B` and `A − B` compare two
  cells. The number keeps its decimals.

RESULTS.md and benchmarks/COSTS.md are written as a whole.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks import (
    costs,
    report,
    tables_counted,
    tables_cpu,
    tables_gpu,
    tables_like_for_like,
    tables_scores,
    tables_sizes,
)
from benchmarks.report import BenchmarkError
from benchmarks.tables import Cell, Table
from lightconv_plugin.paths import configs_dir
from lightconv_plugin.recipes.reproduce.table import table_text

ROOT = Path(__file__).resolve().parents[1]
TABLES: dict[str, Callable[[], Table]] = {
    name: table
    for module in (tables_counted, tables_cpu, tables_gpu, tables_scores, tables_sizes, tables_like_for_like)
    for name, table in module.TABLES.items()
}
WHOLE = {
    ROOT / "RESULTS.md": lambda: table_text(ROOT / "benchmarks/results/reproduction", configs_dir(), ROOT),
    ROOT / "benchmarks/COSTS.md": costs.page,
}

_TABLE = re.compile(r"^ *<!-- table: (?P<name>.+?) -->\n(?P<text>(?: *\|.*\n)*)", re.MULTILINE)
_FIGURE = re.compile(r"(?P<number>-?[\d,]*\d(?:\.\d+)?(?: ± [\d.]+)?)<!-- figure: (?P<address>.+?) -->", re.DOTALL)
_MARK = re.compile(r"<!-- (?:figure|table):")
_PICKS = {"least": min, "most": max}


@dataclass(frozen=True)
class Stale:
    """A figure that is not what its file says. line: in the page, from 1."""

    page: Path
    line: int
    on_page: str
    in_file: str
    source: str

    def __str__(self) -> str:
        name = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{name}:{self.line}: {self.on_page!r} on the page, {self.in_file!r} from {self.source}"


def pages() -> list[Path]:
    return [path for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))) if path not in WHOLE]


@cache
def _table(name: str) -> Table:
    if name not in TABLES:
        raise BenchmarkError(f"there is no table {name!r}: {', '.join(TABLES)}")
    return TABLES[name]()


def _cells(address: str) -> tuple[list[Cell], str]:
    """The cells of `NAME / ROW / COLUMN`, and the table's source; BenchmarkError if there are none."""
    parts = address.split(" / ")
    if len(parts) != 3:
        raise BenchmarkError(f"a figure is NAME / ROW / COLUMN, got {address!r}")
    table = _table(parts[0])
    cells = table.find(parts[1], parts[2])
    if not cells:
        raise BenchmarkError(f"the table {parts[0]!r} has no {parts[1]!r} with a number in {parts[2]!r}")
    return cells, table.source


def _operand(text: str) -> tuple[Cell, str]:
    pick, _, rest = text.partition(" ")
    if pick in _PICKS:
        cells, source = _cells(rest)
        return _PICKS[pick](cells, key=lambda cell: cell.value), source
    cells, source = _cells(text)
    if len(cells) > 1:
        raise BenchmarkError(f"{text!r} is {len(cells)} cells: say least or most")
    return cells[0], source


def _figure(address: str, number: str) -> tuple[str, str]:
    """The figure in the form of `number`, and its source."""
    address = " ".join(address.split())
    left, sign, right = re.fullmatch(r"(.*?)(?: ([÷−]) (.*))?", address).groups()
    cell, source = _operand(left)
    if "±" in number:
        return cell.text, source
    value = cell.value
    if sign:
        other, its_source = _operand(right)
        value = value / other.value if sign == "÷" else value - other.value
        source = " and ".join(dict.fromkeys((source, its_source)))
    decimals = len(number.partition(".")[2])
    return f"{value:,.{decimals}f}", source


def _renew(text: str, page: Path, found: list[Stale]) -> str:
    """The page with its figures from the files; appends what differs to `found`."""

    def line(place: int) -> int:
        return text.count("\n", 0, place) + 1

    def whole(match: re.Match) -> str:
        table = _table(match["name"])
        new = table.markdown()
        if new != match["text"]:
            begin = line(match.start("text"))
            found.extend(_differences(match["text"], new, page, begin, table.source))
        return match[0][: match.start("text") - match.start()] + new

    def one(match: re.Match) -> str:
        new, source = _figure(match["address"], match["number"])
        if new != match["number"]:
            found.append(Stale(page, line(match.start()), match["number"], new, source))
        return new + match[0][len(match["number"]) :]

    marks, known = len(_MARK.findall(text)), len(_TABLE.findall(text)) + len(_FIGURE.findall(text))
    if marks != known:
        raise BenchmarkError(f"{page}: {marks} comments mark a figure or a table, but only {known} have one")
    try:
        renewed = _FIGURE.sub(one, text)  # first, while the lines are those of the page
        return _TABLE.sub(whole, text if renewed == text else renewed)
    except BenchmarkError as error:
        raise BenchmarkError(f"{page}: {error}") from None


def _differences(old: str, new: str, page: Path, begin: int, source: str) -> Iterator[Stale]:
    """Cell by cell, or in one line if the tables have different shapes."""
    before, after = ([line.strip("| ").split(" | ") for line in text.splitlines()] for text in (old, new))
    if list(map(len, before)) != list(map(len, after)):
        shapes = (f"a table of {len(lines)} lines, {len(lines[0])} columns" for lines in (before or [[]], after))
        yield Stale(page, begin, *shapes, source)
        return
    for number, (ours, theirs) in enumerate(zip(before, after, strict=True)):
        for mine, other in zip(ours, theirs, strict=True):
            if mine != other:
                yield Stale(page, begin + number, mine, other, source)


def renew(write: bool) -> list[Stale]:
    """Compare all pages with the files, and write those that differ if `write`. Returns the stale figures."""
    found: list[Stale] = []
    texts = {page: page.read_text(encoding="utf-8") for page in (*pages(), *WHOLE)}
    renewed = {page: _renew(texts[page], page, found) for page in pages()}
    for page, make in WHOLE.items():
        renewed[page] = make()
        lines = zip((*texts[page].splitlines(), ""), (*renewed[page].splitlines(), ""), strict=False)
        differ = next((number for number, (old, new) in enumerate(lines, 1) if old != new), None)
        if texts[page] != renewed[page]:
            old, new = (text.splitlines()[(differ or 1) - 1 :][:1] for text in (texts[page], renewed[page]))
            found.append(Stale(page, differ or 1, "".join(old), "".join(new), "benchmarks/results and configs"))
    for page, text in renewed.items():
        if write and text != texts[page]:
            page.write_text(text, encoding="utf-8")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Write or check; BenchmarkError if a check finds stale figures."""
    parser = report.parser("pages", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 2 if a figure is stale")
    options = parser.parse_args(arguments)
    found = renew(write=not options.check)
    for stale in found:
        print(stale)
    if found and options.check:
        raise BenchmarkError(f"{len(found)} figures are stale: python -m benchmarks.pages writes them")


if __name__ == "__main__":
    sys.exit(report.run(main))
