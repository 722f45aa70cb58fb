"""Computes the figures for the targets from benchmark results: ratios of times, rates and memory within one run.

A measure is a function that maps a result to the figures of its cases or systems, or to none if it does not apply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import BenchmarkError

OURS = "ours"
_LARGE = 64 * 2**20  # minimum elements of x for measuring the share of the bandwidth


@dataclass(frozen=True)
class Result:
    """One program's measurements, and their file."""

    file: str
    content: dict

    @property
    def on_gpu(self) -> bool:
        return "gpu" in self.content["machine"]

    @property
    def date(self) -> str:
        return self.content["machine"].get("date", "")


@dataclass(frozen=True)
class Figure:
    """A number, and its case or system."""

    value: float
    of: str


def read_file(path: Path) -> dict[str, Result]:
    """The results in a file, by name: "" for the output of one program, the parts' names for one collected by gpu.sh.

    Results of --quick, and files of other kinds (scores of trainings), are skipped.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BenchmarkError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        return {}
    contents = content["results"] if isinstance(content.get("results"), dict) else {"": content}
    return {name: Result(path.name, one) for name, one in contents.items() if _counts(one)}


def _counts(content: object) -> bool:
    measured = isinstance(content, dict) and isinstance(content.get("machine"), dict) and "benchmark" in content
    return measured and not content.get("quick")


def read(folder: Path) -> list[Result]:
    """All results in the folder's *.json files."""
    if not folder.is_dir():
        raise BenchmarkError(f"{folder} is not a folder")
    return [result for path in sorted(folder.glob("*.json")) for result in read_file(path).values()]


Measure = Callable[[Result], Iterable[Figure]]


def median(case: dict, candidate: str, name: str) -> float | None:
    return case["candidates"].get(candidate, {}).get(name, {}).get("median_s")


def _cases(result: Result, *operators: str, gpu: bool, dtype: str) -> Iterator[dict]:
    content = result.content
    if content["benchmark"] == "operators" and result.on_gpu == gpu and content["dtype"] == dtype:
        yield from (case for case in content["cases"] if case["operator"] in operators)


def _label(case: dict, name: str = "both") -> str:
    return f"{case['operator']} {case['name']}" + f", {name}" * (name != "both")


def against(peers: Iterable[str], passes: Iterable[str], **where) -> Measure:
    """The time of the fastest peer divided by ours, for each case accepted by `keep`."""
    operators = where.pop("operators", ("lightconv", "dynamicconv"))
    keep = where.pop("keep", lambda case: True)

    def measure(result: Result) -> Iterator[Figure]:
        for case in _cases(result, *operators, **where):
            for name in passes if keep(case["case"]) else ():
                ours = median(case, OURS, name)
                theirs = [time for peer in peers if (time := median(case, peer, name))]
                if ours and theirs:
                    yield Figure(min(theirs) / ours, _label(case, name))

    return measure


def over_floor(result: Result) -> Iterator[Figure]:
    for case in _cases(result, "lightconv", "dynamicconv", gpu=False, dtype="float32"):
        if ours := median(case, OURS, "both"):
            yield Figure(ours / case["floor"]["both"]["seconds"], _label(case))


def bandwidth(operator: str, most_taps: float) -> Measure:
    """Bytes of a pass divided by its time, as a share of the copy's rate."""

    def measure(result: Result) -> Iterator[Figure]:
        for case in _cases(result, operator, gpu=True, dtype="bfloat16"):
            sizes = case["case"]
            large = sizes["steps"] * sizes["batch"] * sizes["channels"] >= _LARGE
            plain = not (sizes["glu"] or sizes["dropout"])
            for name in ("forward", "backward") if large and plain and sizes["kernel_size"] <= most_taps else ():
                if ours := median(case, OURS, name):
                    rate = case["floor"][name]["bytes"] / ours
                    yield Figure(rate / result.content["rates"]["bytes_per_s"], _label(case, name))

    return measure


def peak_share(result: Result) -> Iterator[Figure]:
    for case in _cases(result, "lightconv", "dynamicconv", gpu=True, dtype="float16"):
        ours, theirs = (case["candidates"].get(name, {}).get("peak_bytes") for name in (OURS, "fairseq CUDA"))
        if ours and theirs:
            yield Figure(ours / theirs, _label(case))


def growth(quantity: Callable[[dict], float | None], what: str) -> Measure:
    """The largest T divided by T = 1024, for cases that differ only in T and B and have equally many tokens."""

    def measure(result: Result) -> Iterator[Figure]:
        kinds: dict[str, dict[int, dict]] = {}
        for case in _cases(result, "lightconv", "dynamicconv", gpu=True, dtype="bfloat16"):
            sizes = case["case"]
            rest = {key: value for key, value in sizes.items() if key not in ("steps", "batch")}
            kind = json.dumps([case["operator"], sizes["steps"] * sizes["batch"], rest], sort_keys=True)
            kinds.setdefault(kind, {})[sizes["steps"]] = case
        for cases in kinds.values():
            ends = [quantity(cases[steps]) if steps in cases else None for steps in (1024, 65_536)]
            if all(ends):
                yield Figure(ends[1] / ends[0], f"{_label(cases[65_536])}, {what}")

    return measure


def systems(benchmark: str, speed: str, peer: str, *, ours: str, gpu: bool, **sizes) -> Measure:
    """Our speed divided by the peer's, for runs with these sizes (for generation: for settings with these sizes).

    An update of several batches has fewer of the optimiser's steps: such runs are other measurements.
    """

    def measure(result: Result) -> Iterator[Figure]:
        content = result.content
        if content["benchmark"] != benchmark or result.on_gpu != gpu or content.get("update_freq", 1) > 1:
            return
        for setting in content.get("settings", [{}]):
            found = {**content, **setting}
            if all(found.get(key) == value for key, value in sizes.items()):
                first, second = (found["systems"].get(name, {}).get(speed) for name in (ours, peer))
                if first and second:
                    yield Figure(first / second, f"{ours} ÷ {peer}, {found['preset']}")

    return measure
