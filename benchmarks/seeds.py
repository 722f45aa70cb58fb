"""Draws the test score of each seed as a dot, and their mean, from the rows made by `lightconv reproduce`.

    python -m benchmarks.seeds TASK … [--systems NAME …] [--results DIR] [--out FILE]

TASK is a folder of configurations, such as multi30k_en_de; each has a panel. Needs matplotlib
(pip install '.[report]').
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.plots import COLOURS, figure_of, png
from benchmarks.report import BenchmarkError
from lightconv_plugin.recipes.reproduce.rows import read_rows
from lightconv_plugin.recipes.reproduce.table import default_results

Rows = Mapping[str, Mapping[str, Any]]


def scores(row: Mapping[str, Any]) -> list[float]:
    """The test score by which the row was tuned, of each seed."""
    return [run["test"][row["by"]] for run in row["runs"]]


def draw(panels: Mapping[str, Rows], file: Path) -> None:
    """Draw the rows of each task, by system, into a PNG file; the panels share the axis of the scores."""
    systems = list(dict.fromkeys(name for rows in panels.values() for name in rows))
    figure = figure_of((1.6 + 4.2 * len(panels), 1.0 + 0.5 * len(systems)))
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    titles = {name: row["system_title"] for rows in panels.values() for name, row in rows.items()}
    for axis, rows in zip(axes, panels.values(), strict=True):
        for name, row in rows.items():
            place, values = systems.index(name), scores(row)
            colour = COLOURS[place % len(COLOURS)]
            axis.plot(values, [place] * len(values), "o", color=colour, markersize=8, alpha=0.7, gid=name)
            axis.plot([statistics.fmean(values)] * 2, [place - 0.3, place + 0.3], color=colour, linewidth=2)
        first = next(iter(rows.values()))
        axis.set_title(first["title"], fontsize=10)
        axis.set_xlabel(first["measure"])
        axis.set_yticks(range(len(systems)), [titles[name] for name in systems])
        axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(len(systems) - 0.5, -0.5)
    figure.savefig(file, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    """Draw the picture and print its name; BenchmarkError if there is nothing to draw."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.seeds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", metavar="TASK")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="default: all that have a row")
    parser.add_argument("--results", type=Path, default=default_results(), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--out", type=png, default=Path("seeds.png"), metavar="FILE", help="default: %(default)s")
    options = parser.parse_args(arguments)
    known = read_rows(options.results)
    panels = {}
    for task in options.tasks:
        rows = known.get(task, {})
        if missing := [name for name in options.systems or () if name not in rows]:
            raise BenchmarkError(f"--systems: {options.results} has no row of {task}/{', '.join(missing)}")
        if not rows:
            raise BenchmarkError(f"TASK: {options.results} has no rows of {task}")
        panels[task] = {name: rows[name] for name in options.systems or rows}
    draw(panels, options.out)
    print(options.out)


if __name__ == "__main__":
    sys.exit(report.run(main))
