"""BLEU against speed: trained models in our search, Transformers in two engines, by beam, type, shortlist and threads.

    python -m benchmarks.pareto --data DATA_BIN --path teacher=A.pt student=B.pt transformer=C.pt --shortlist FILE \\
        --threads 1 2 --json FILE --out PICTURE.png
    python -m benchmarks.pareto --draw FILE --out PICTURE.png

Every model translates the test set of DATA_BIN in our search, with each beam and type, with the lexical table of
`lightconv shortlist` and without. fairseq's Transformers also run in CTranslate2, where the table is a vocabulary map,
and in Marian (marian_engine.py), if they are installed (`pip install ctranslate2 pymarian`; pymarian is for Linux on
x86-64). For each number of threads, all take turns; medians. Each is a process of its own. Needs matplotlib for the
picture (pip install '.[report]').
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import isolated, machine, report, timing
from benchmarks.plots import COLOURS, figure_of, png
from benchmarks.report import BenchmarkError
from benchmarks.searches import CTRANSLATE2, FAST, PACKAGES, PYMARIAN, Candidate, SearchSettings, installed

_TYPES = ("float32", "int8")
_LISTED = ", shortlist"
_ENGINES = {FAST: "ours", CTRANSLATE2: "CTranslate2", PYMARIAN: "Marian"}
_SHAPES = {
    ("ours", "float32"): "o",
    ("ours", "int8"): "s",
    ("CTranslate2", "float32"): "^",
    ("CTranslate2", "int8"): "v",
    ("Marian", "float32"): "P",
    ("Marian", "int8"): "X",
}


@dataclass(frozen=True)
class Point:
    """A way to translate: a candidate and a beam."""

    candidate: Candidate
    beam: int

    @property
    def name(self) -> str:
        return named(self.described())

    def described(self) -> dict[str, Any]:
        """As in the JSON."""
        c = self.candidate
        found = {"model": c.model, "engine": _ENGINES[c.search], "dtype": c.dtype, "beam": self.beam}
        return found | {"shortlist": c.shortlist is not None}


def points(
    names: Iterable[str],
    transformers: Sequence[str],
    beams: Iterable[int],
    shortlist: Path | None,
    engines: Sequence[str],
) -> Iterator[Point]:
    """All ways; `transformers` are the models that the engines can run."""
    for name in names:
        for search in (FAST, *(engines if name in transformers else ())):
            for dtype in _TYPES:
                for file in (None, *[shortlist] * (shortlist is not None)):
                    for beam in beams:
                        yield Point(Candidate(name, search, dtype, shortlist=file), beam)


def parser() -> argparse.ArgumentParser:
    result = report.parser("pareto", __doc__)
    result.add_argument("--data", type=Path, metavar="DATA_BIN", help="its test set is translated")
    result.add_argument("--path", nargs="+", metavar="NAME=CHECKPOINT", help="the models")
    result.add_argument("--shortlist", type=Path, metavar="FILE", help="also measure with this lexical table")
    result.add_argument("--beam", type=machine.positive, nargs="+", default=[1, 4], help="default: 1 4")
    result.add_argument(
        "--threads", type=machine.positive, nargs="+", default=[1], metavar="N", help="one by one (default: 1)"
    )
    result.add_argument("--sentences", type=machine.positive, default=32, help="of a batch (default: %(default)s)")
    result.add_argument("--lenpen", type=float, default=1.0, metavar="X", help="length penalty (default: %(default)s)")
    result.add_argument(
        "--repeats", type=machine.positive, default=5, metavar="N", help="rounds (default: %(default)s)"
    )
    result.add_argument("--quick", action="store_true", help="40 sentences and two rounds: no evidence")
    result.add_argument("--systems", nargs="+", metavar="NAME", help="only these, as they are called in the table")
    result.add_argument(
        "--json", type=machine.json_file, metavar="FILE", help="write everything that was measured to FILE"
    )
    result.add_argument("--out", type=png, metavar="FILE", help="draw the picture")
    result.add_argument("--draw", type=Path, metavar="FILE", help="measure nothing: draw what --json wrote")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, write the JSON and draw the picture; BenchmarkError for wrong options."""
    options = parser().parse_args(arguments)
    if options.draw:
        if not options.out:
            raise BenchmarkError("--draw needs --out")
        draw(_measured(options.draw), options.out)
        return
    if not (options.data and options.path):
        raise BenchmarkError("--data and --path are needed: a data-bin folder, and NAME=CHECKPOINT of each model")
    if options.shortlist is not None and not options.shortlist.is_file():
        raise BenchmarkError(f"--shortlist: no such file: {options.shortlist}")
    content = measure(options)
    print(_table(content))
    if options.json:
        report.write_json(options.json, content)
    if options.out:
        draw(content, options.out)


def _measured(file: Path) -> dict[str, Any]:
    """What --json wrote; BenchmarkError for another file."""
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if content["benchmark"] == "pareto":
            return content
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise BenchmarkError(f"--draw: {file} is not a file that --json has written")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The content of the JSON."""
    # Imported late, since fairseq takes seconds to import and wrong options should be reported at once.
    from benchmarks import trained

    device = torch.device("cpu")
    description = machine.describe(device)
    models = trained.models(options.path, options.data)
    engines = _engines() if models.transformers else []
    given = (models.paths, models.transformers, options.beam, options.shortlist, engines)
    ways = {way.name: way for way in points(*given)}
    if unknown := set(options.systems or ()) - ways.keys():
        allowed = ", ".join(map(repr, ways))
        raise BenchmarkError(f"--systems: allowed are {allowed}, got {', '.join(map(repr, sorted(unknown)))}")
    ways = {name: way for name, way in ways.items() if not options.systems or name in options.systems}
    sources, references = trained.test_set(models.first, 40 if options.quick else None)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = {}
        for name, way in ways.items():
            search = SearchSettings(way.beam, options.lenpen, longest=models.longest)
            path = models.paths[way.candidate.model]
            jobs[name] = trained.Job(way.candidate, path, options.data, search, "float32", "cpu", Path(folder))
        for threads in options.threads:
            places = {name: isolated.Isolated(job, threads) for name, job in jobs.items()}
            try:
                parameters = {name: place.parameters() for name, place in places.items()}
                repeats = 2 if options.quick else options.repeats
                seconds, texts = trained.throughput(places, sources, options.sentences, repeats)
            finally:
                for place in places.values():
                    place.close()
            for name, way in ways.items():
                bleu = trained.bleu(texts[name], references, models.first)
                measured = timing.summary(seconds[name]) | {"parameters": parameters[name], "bleu": bleu}
                measured["sentences_per_s"] = len(sources) / measured["median_s"]
                found.append(way.described() | {"threads": threads} | measured)
    return {
        "benchmark": "pareto",
        "machine": description,
        "sentences": options.sentences,
        "lenpen": options.lenpen,
        "test_sentences": len(sources),
        "quick": options.quick,
        "points": found,
    }


def _engines() -> list[str]:
    """The engines that are installed; says which are not."""
    for engine, package in PACKAGES.items():
        if not installed(engine):
            print(f"{engine} is left out: the package {package} is not installed", file=sys.stderr)
    return [engine for engine in PACKAGES if installed(engine)]


def named(point: Mapping[str, Any]) -> str:
    """A point as it is called in the table."""
    listed = _LISTED if point["shortlist"] else ""
    return f"{point['model']}, {point['engine']}, {point['dtype']}, beam {point['beam']}{listed}"


def front(found: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The points that none surpasses in both, by falling speed."""
    best: list[Mapping[str, Any]] = []
    for point in sorted(found, key=lambda point: (-point["sentences_per_s"], -point["bleu"])):
        if not best or point["bleu"] > best[-1]["bleu"]:
            best.append(point)
    return best


def _table(content: Mapping[str, Any]) -> str:
    rows = []
    for threads in dict.fromkeys(point["threads"] for point in content["points"]):
        some = [point for point in content["points"] if point["threads"] == threads]
        best = front(some)
        for point in sorted(some, key=lambda point: -point["sentences_per_s"]):
            mark = "yes" if point in best else ""
            rows.append([threads, named(point), f"{point['bleu']:.2f}", report.digits(point["sentences_per_s"]), mark])
    return report.table(["threads", "system", "BLEU", "sentences/s", "unsurpassed"], rows)


def draw(content: Mapping[str, Any], file: Path) -> None:
    """A panel for each number of threads: a colour for each model, a shape for each engine, filled with a shortlist."""
    figure_of((1, 1))  # says what to install without matplotlib
    from matplotlib.ticker import LogLocator

    threads = list(dict.fromkeys(point["threads"] for point in content["points"]))
    models = list(dict.fromkeys(point["model"] for point in content["points"]))
    figure = figure_of((1.0 + 5.2 * len(threads), 4.6))
    axes = figure.subplots(1, len(threads), sharey=True, squeeze=False)[0]
    for axis, number in zip(axes, threads, strict=True):
        some = [point for point in content["points"] if point["threads"] == number]
        best = front(some)
        xs, ys = ([point[what] for point in best] for what in ("sentences_per_s", "bleu"))
        axis.step(xs, ys, where="post", color="#BBBBBB", linewidth=1, zorder=0)
        for point in some:
            colour = COLOURS[models.index(point["model"]) % len(COLOURS)]
            shape = _SHAPES[point["engine"], point["dtype"]]
            filled = colour if point["shortlist"] else "none"
            axis.plot(
                point["sentences_per_s"], point["bleu"], shape, color=colour, markerfacecolor=filled, gid=named(point)
            )
            place = (point["sentences_per_s"], point["bleu"])
            axis.annotate(f" {point['beam']}", place, fontsize=7, color=colour, va="bottom")
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.xaxis.set_minor_formatter("")
        axis.set_title(f"{number} thread{'s' * (number > 1)}", fontsize=10)
        axis.set_xlabel("sentences/s")
        axis.grid(color="#DDDDDD", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("BLEU")
    _legend(figure, models, {(point["engine"], point["dtype"]) for point in content["points"]}, 1 + 2 * len(threads))
    figure.savefig(file, dpi=130)


def _legend(figure: Any, models: Sequence[str], kinds: set[tuple[str, str]], columns: int) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker="o", linestyle="", color=COLOURS[number % len(COLOURS)], label=name)
        for number, name in enumerate(models)
    ]
    handles += [
        Line2D([], [], marker=shape, linestyle="", color="#555555", markerfacecolor="none", label=", ".join(kind))
        for kind, shape in _SHAPES.items()
        if kind in kinds
    ]
    handles.append(Line2D([], [], marker="o", linestyle="", color="#555555", label="filled: shortlist; number: beam"))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


if __name__ == "__main__":
    sys.exit(report.run(main))
