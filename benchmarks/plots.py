"""Log-log plots of time against T, including the floor, from the results of benchmarks.operators.

    python -m benchmarks.plots [FILE …] [--out DIR]

The default files are cpu_operators*.json and gpu_timing.json in benchmarks/results/. Cases of a file that differ only
in T, B and H and have the same number of tokens form a curve, if there are at least three values of T. A picture has
one panel per operator: forward and backward pass of ours and its peers, and the floor. As the number of tokens is
constant, quadratic growth in T appears as a rising straight line, and linear growth as a level one. Needs matplotlib
(pip install '.[report]').
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import report
from benchmarks.figures import OURS, Result, median, read_file
from benchmarks.report import RESULTS, BenchmarkError
from lightconv_plugin.recipes.reproduce.rows import read_rows
from lightconv_plugin.recipes.reproduce.table import default_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Mapping[str, Mapping[str, Any]]  # of `lightconv reproduce`, by system

_LEAST = 3  # points that a curve must have
_PASS = "both"
# From Okabe and Ito's palette, and two from Tol's, which are also distinct for the colour-blind. A candidate looks the
# same in every picture.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999999", "#332288", "#882255")
_MARKERS = "osD^vP*Xh"
_KNOWN = (OURS, "our reference", "fairseq band", "fairseq unfold", "conv1d depthwise", "attention")


@dataclass(frozen=True)
class Panel:
    """One operator's cases by T: the candidates' medians and the floor, in seconds. `title` has everything else."""

    title: str
    steps: tuple[int, ...]
    floor: tuple[float, ...]
    times: dict[str, tuple[float | None, ...]]


def panels(result: Result) -> Iterator[Panel]:
    """The curves of a result of benchmarks.operators."""
    sets: dict[str, dict[int, dict]] = {}
    for case in result.content["cases"]:
        sizes = case["case"]
        # H may differ: the number of multiplications is the same, the floor counts the filters' bytes, and the title
        # names H.
        rest = {key: value for key, value in sizes.items() if key not in ("steps", "batch", "heads")}
        key = json.dumps([case["operator"], sizes["steps"] * sizes["batch"], rest], sort_keys=True)
        if _PASS in case["floor"]:
            sets.setdefault(key, {}).setdefault(sizes["steps"], case)
    for cases in sets.values():
        if len(cases) >= _LEAST:
            yield _panel([cases[steps] for steps in sorted(cases)])


def _panel(cases: list[dict]) -> Panel:
    sizes = [case["case"] for case in cases]
    heads = list(dict.fromkeys(str(size["heads"]) for size in sizes))
    first = sizes[0]
    title = f"{cases[0]['operator']}, K = {first['kernel_size']}" + ", causal" * first["causal"]
    title += f"\n{first['steps'] * first['batch']:,} tokens × {first['channels']} channels, H = {', '.join(heads)}"
    names = dict.fromkeys(name for case in cases for name in case["candidates"])
    times = {name: tuple(median(case, name, _PASS) for case in cases) for name in names}
    return Panel(
        title,
        tuple(size["steps"] for size in sizes),
        tuple(case["floor"][_PASS]["seconds"] for case in cases),
        {name: values for name, values in times.items() if any(values)},
    )


def _looks(names: list[str]) -> dict[str, dict]:
    """Colour and marker of each name, ours first; "attention (flash)" and plain "attention" look the same."""
    places = {name: _KNOWN.index(base) for name in names if (base := name.partition(" (")[0]) in _KNOWN}
    places |= {name: len(_KNOWN) + i for i, name in enumerate(name for name in names if name not in places)}
    order = sorted(places, key=places.get)
    count = len(COLOURS)
    return {name: {"color": COLOURS[places[name] % count], "marker": _MARKERS[places[name] % count]} for name in order}


def _labelled(steps: tuple[int, ...]) -> list[int]:
    """Those whose labels fit next to each other."""
    chosen = [steps[0]]
    for t in steps[1:]:
        if t >= 4 * chosen[-1]:
            chosen.append(t)
    return chosen


def png(text: str) -> Path:
    """The value of --out: the name of a picture in a folder that exists."""
    path = Path(text)
    if path.suffix != ".png" or not path.parent.is_dir():
        raise BenchmarkError(f"--out: must be a .png in a folder that exists, got {text}")
    return path


def chosen_file(command: str, doc: str | None, default: Path, arguments: list[str] | None) -> Path:
    """--out of a command that draws one picture and has no other option."""
    parser = report.parser(command, doc)
    parser.add_argument("--out", type=png, default=default, metavar="FILE", help="a .png; default: %(default)s")
    return parser.parse_args(arguments).out


def rows_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of a command that draws some systems' rows of `lightconv reproduce`."""
    parser = report.parser(command, doc)
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="default: all that have a row")
    parser.add_argument("--results", type=Path, default=default_results(), metavar="DIR", help="default: %(default)s")
    return parser


def rows_of(task: str, options: argparse.Namespace) -> Rows:
    """The rows of a task that the options of `rows_parser` choose, by system; at least one."""
    known = read_rows(options.results).get(task, {})
    if missing := [name for name in options.systems or () if name not in known]:
        raise BenchmarkError(f"--systems: {options.results} has no row of {task}/{', '.join(missing)}")
    if not known:
        raise BenchmarkError(f"TASK: {options.results} has no rows of {task}")
    return {name: known[name] for name in options.systems or known}


def figure_of(size: tuple[float, float]) -> Figure:
    """An empty matplotlib figure of a size in inches; BenchmarkError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise BenchmarkError(f"{error.name} is not installed: pip install '.[report]'") from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(drawn: list[Panel], title: str, file: Path) -> None:
    """Draw the panels side by side into a PNG file, with a common legend."""
    figure = figure_of((1.2 + 4.4 * len(drawn), 4.6))
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    names = list(dict.fromkeys(name for panel in drawn for name in panel.times))
    looks = _looks(names)
    names = list(looks)
    axes = figure.subplots(1, len(drawn), sharey=True, squeeze=False)[0]
    lines = {}
    for axis, panel in zip(axes, drawn, strict=True):
        floor = [1e3 * seconds for seconds in panel.floor]
        lines["floor"] = axis.plot(panel.steps, floor, color="black", linestyle="--", linewidth=1.5)[0]
        for name in names:
            points = [(t, 1e3 * s) for t, s in zip(panel.steps, panel.times.get(name, ()), strict=False) if s]
            if points:
                width = 2.4 if name == OURS else 1.4
                lines[name] = axis.plot(*zip(*points, strict=True), linewidth=width, markersize=5, **looks[name])[0]
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(_labelled(panel.steps))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("T")
        axis.set_title(panel.title, fontsize=10)
        axis.grid(which="major", color="#DDDDDD", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("forward + backward, ms")
    figure.suptitle(title, fontsize=9)
    order = [*(name for name in names if name in lines), "floor"]
    figure.legend([lines[name] for name in order], order, loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(file, dpi=130)


def pictures(path: Path, folder: Path) -> list[Path]:
    """Draw the pictures of a file's results, FOLDER/NAME.png or FOLDER/NAME_PROGRAM.png; returns those drawn."""
    made = []
    for name, result in read_file(path).items():
        if result.content["benchmark"] != "operators":
            continue
        if drawn := list(panels(result)):
            machine = result.content["machine"]
            hardware = machine.get("gpu", machine["cpu"])
            threads = f", {machine['threads']} threads" * ("gpu" not in machine)
            title = f"{hardware}{threads}, {result.content['dtype']}, torch {machine['versions']['torch']}"
            file = folder / (f"{path.stem}_{name}.png" if name else f"{path.stem}.png")
            draw(drawn, title + "; floor: the least time for the bytes and operations", file)
            made.append(file)
    return made


def main(arguments: list[str] | None = None) -> None:
    """Draw the pictures and print their names; BenchmarkError if there is nothing to draw."""
    parser = report.parser("plots", __doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="default: benchmarks/results")
    options = parser.parse_args(arguments)
    files = options.files or sorted([*RESULTS.glob("cpu_operators*.json"), *RESULTS.glob("gpu_timing.json")])
    if not options.out.is_dir():
        raise BenchmarkError(f"--out: {options.out} is not a folder")
    made = [picture for path in files for picture in pictures(path, options.out)]
    if not made:
        raise BenchmarkError(f"no {_LEAST} cases that differ in T only in {', '.join(map(str, files)) or RESULTS}")
    for picture in made:
        print(picture)


if __name__ == "__main__":
    sys.exit(report.run(main))
