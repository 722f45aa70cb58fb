"""Plots validation loss against updates, one line per seed, from the rows made by `lightconv reproduce`.

    python -m benchmarks.curves TASK [--systems NAME …] [--results DIR] [--out FILE]

TASK is a folder of configurations, such as multi30k_en_de. The loss is in bits per token, without label smoothing.
Needs matplotlib (pip install '.[report]').
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import report
from benchmarks.plots import COLOURS, Rows, figure_of, png, rows_of, rows_parser
from benchmarks.report import BenchmarkError

_TOP = 1.5  # times the best final loss; the higher ones of the first updates would take up most of the picture


def draw(rows: Rows, title: str, file: Path) -> None:
    """Draw the curves of a task's rows, by system, into a PNG file."""
    figure = figure_of((6.4, 4.2))
    axis = figure.subplots()
    ends = []
    for place, (system, row) in enumerate(rows.items()):
        look = {"color": COLOURS[place % len(COLOURS)], "linestyle": ("-", "--", ":")[place // len(COLOURS) % 3]}
        for number, run in enumerate(row["runs"]):
            updates, losses = zip(*run["curve"], strict=True)
            label = row["system_title"] if number == 0 else None
            axis.plot(updates, losses, linewidth=1.3, label=label, gid=f"{system} {run['seed']}", **look)
            ends.append(losses[-1])
    axis.set_ylim(0.95 * min(ends), _TOP * min(ends))
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlabel("updates")
    axis.set_ylabel("validation loss, bits a token")
    axis.set_title(title, fontsize=10)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    figure.savefig(file, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    """Draw the picture and print its name; BenchmarkError if there is nothing to draw."""
    parser = rows_parser("curves", __doc__)
    parser.add_argument("task", metavar="TASK")
    parser.add_argument("--out", type=png, metavar="FILE", help="a .png; default: TASK.png, with _ for /")
    options = parser.parse_args(arguments)
    out = options.out or Path(options.task.replace("/", "_") + ".png")
    rows = rows_of(options.task, options)
    if without := [name for name, row in rows.items() if not all(run.get("curve") for run in row["runs"])]:
        raise BenchmarkError(f"rows of an older version, without curves: {', '.join(without)}")
    draw(rows, next(iter(rows.values()))["title"], out)
    print(out)


if __name__ == "__main__":
    sys.exit(report.run(main))
