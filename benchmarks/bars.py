"""Bars of the table of speed, like for like: one panel for each row, from the same files as the table.

    python -m benchmarks.bars [--out FILE]

A row in which one system alone was measured has nothing to compare, and no panel.
Needs matplotlib (pip install '.[report]').
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import report
from benchmarks.plots import COLOURS, chosen_file, figure_of
from benchmarks.tables import Cell, Table
from benchmarks.tables_like_for_like import like_for_like

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUT = Path("docs/images/like_for_like.png")
_COLUMNS = 3


def titles(name: str) -> tuple[str, str, str]:
    """(the task and its unit, the machine, type and sizes) of a row such as "**training**, tokens/s: machine; …"."""
    task, _, about = name.replace("`", "").partition(": ")
    machine, dtype, sizes = about.split("; ")
    return re.sub(r"\*\*", "", task), machine, f"{dtype}; {sizes}"


def _panel(axis: Axes, headers: list[str], row: list[Cell | str]) -> None:
    """The speeds of one row; a system that was not measured has a name and no bar."""
    task, machine, rest = titles(str(row[0]))
    axis.set_title(task, fontsize=10, fontweight="bold", loc="left", pad=26)
    axis.text(0, 1.03, f"{machine}\n{rest}", transform=axis.transAxes, fontsize=7, color="#555555")
    speeds = [cell.value if isinstance(cell, Cell) else 0 for cell in row[1:-1]]
    for place, (header, cell, speed) in enumerate(zip(headers, row[1:-1], speeds, strict=True)):
        axis.barh(place, speed, color=COLOURS[place], label=header)
        shown = str(cell) if isinstance(cell, Cell) else {"–": "no search"}.get(cell, cell)
        axis.text(speed, place, f" {shown}", va="center", fontsize=8, color="black" if speed else "#777777")
    axis.set_xlim(0, 1.3 * max(speeds))
    axis.set_xticks([])
    axis.set_yticks([])
    axis.invert_yaxis()
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def draw(table: Table, file: Path) -> None:
    """Draw the rows of the table into a PNG file, with a common legend."""
    rows = [list(row) for row in table.rows if sum(isinstance(cell, Cell) for cell in row) > 1]
    lines = -(-len(rows) // _COLUMNS)
    figure = figure_of((3.5 * _COLUMNS, 2.1 * lines + 0.3))
    axes = figure.subplots(lines, _COLUMNS, squeeze=False).flatten()
    headers = list(table.headers[1:-1])
    for axis, row in zip(axes, rows, strict=False):
        _panel(axis, headers, row)
    for axis in axes[len(rows) :]:
        axis.axis("off")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=10)
    figure.savefig(file, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    """Draw the picture and print its name."""
    out = chosen_file("bars", __doc__, OUT, arguments)
    draw(like_for_like(), out)
    print(out)


if __name__ == "__main__":
    sys.exit(report.run(main))
