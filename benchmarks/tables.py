"""Tables of measured numbers: rows of cells that know their value and how a page shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from benchmarks import targets, timing
from benchmarks.figures import OURS, median, read
from benchmarks.report import RESULTS, BenchmarkError, digits


@dataclass(frozen=True)
class Cell:
    """A number, in the unit in which a page shows it, its text there, and what a table shows after it."""

    value: float
    text: str
    interval: str = ""

    def __str__(self) -> str:
        return self.text + self.interval


@dataclass(frozen=True)
class Table:
    """source: the files behind it. headers: the first is that of the rows' names."""

    source: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]

    def markdown(self) -> str:
        lines = [self.headers, ["---"] * len(self.headers), *self.rows]
        shown = [f"| {' | '.join(map(str, line))} |" for line in lines]
        shown[0] = shown[0].replace("|  |", "| |")
        shown[1] = shown[1].replace(" ", "")
        return "".join(f"{line}\n" for line in shown)

    def find(self, row: str, column: str) -> list[Cell]:
        """The numbers in a column, where the row's name matches the pattern.

        column: a header, or `HEADER #2` for the second with this name.
        """
        titles = [f"{header} #{self.headers[: i + 1].count(header)}" for i, header in enumerate(self.headers)]
        places = [i for i, header in enumerate(self.headers) if column in (header, titles[i])]
        cells = [line[place] for line in self.rows for place in places if fnmatchcase(str(line[0]), row)]
        return [cell for cell in cells if isinstance(cell, Cell)]


@cache
def load(name: str) -> dict[str, Any]:
    """The content of benchmarks/results/NAME.json; BenchmarkError if --quick wrote it."""
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    if content.get("quick"):
        raise BenchmarkError(f"{name}.json was measured with --quick, which is no evidence: measure it again")
    return content


def source(*names: str) -> str:
    return ", ".join(f"{name}.json" for name in names)


@dataclass(frozen=True)
class Form:
    """How a page shows a number: in this unit, with so many decimals, or with three significant digits (None)."""

    decimals: int | None = None
    unit: float = 1.0
    suffix: str = ""


NUMBER, SHARE = Form(), Form(0, 0.01, " %")


def cell(value: float | None, form: Form = NUMBER) -> Cell | str:
    """A dash if nothing was measured."""
    if value is None:
        return "–"
    value /= form.unit
    return Cell(value, (digits(value) if form.decimals is None else f"{value:,.{form.decimals}f}") + form.suffix)


def ratio_cell(found: timing.Ratio | None, form: Form = NUMBER) -> Cell | str:
    """With its confidence interval, if the calls behind it were kept."""
    if found is None:
        return "–"
    shown = cell(found.value, form)
    assert isinstance(shown, Cell)
    return replace(shown, interval=found.interval(form.decimals))


def sizes(case: dict[str, Any]) -> str:
    """`lightconv 32, 128, 512, 4, 31`, as the tables name a case."""
    of = case["case"]
    numbers = ", ".join(str(of[key]) for key in ("steps", "batch", "channels", "heads", "kernel_size"))
    return f"{case['operator']} {numbers}" + " causal" * of["causal"]


def ratio(case: dict[str, Any], candidate: str, name: str, form: Form = NUMBER) -> Cell | str:
    """How many times as long the candidate takes as ours."""
    theirs, ours = median(case, candidate, name), median(case, OURS, name)
    return cell(theirs / ours if theirs and ours else None, form)


def judged(kind: str) -> Table:
    """The targets whose names begin with `kind`, at their worst cases."""
    rows: list[list[Cell | str]] = []
    results = read(RESULTS)
    for target in targets.TARGETS:
        if target.name.startswith(kind):
            verdict = targets.judge(target, results)
            worst, at = (cell(verdict.figure.value), verdict.figure.of) if verdict.figure else ("–", "–")
            status = f"**{verdict.status}**" if verdict.status == targets.REACHED else verdict.status
            rows.append([target.name.removeprefix(f"{kind} "), target.text, status, worst, at])
    return Table("benchmarks/results, by benchmarks.targets", [kind, "target", "", "worst", "at"], rows)
