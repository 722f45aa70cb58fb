"""Draws the test score of each seed as a dot, and their mean, from the rows made by `lightconv reproduce`.

    python -m benchmarks.seeds TASK … [--systems NAME …] [--results DIR] [--out FILE]

TASK is a folder of configurations, such as multi30k_en_de; each has a panel. Needs matplotlib
(pip install '.[report]').
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.plots import COLOURS, Rows, figure_of, png, rows_of, rows_parser


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
    parser = rows_parser("seeds", __doc__)
    parser.add_argument("tasks", nargs="+", metavar="TASK")
    parser.add_argument("--out", type=png, default=Path("seeds.png"), metavar="FILE", help="default: %(default)s")
    options = parser.parse_args(arguments)
    draw({task: rows_of(task, options) for task in options.tasks}, options.out)
    print(options.out)


if __name__ == "__main__":
    sys.exit(report.run(main))
