"""Measures separately what an operator's pass spends on memory, on memory order, and on arithmetic, on a CPU.

    python -m benchmarks.apart                            # lightconv and dynamicconv, K = 3 to 31
    python -m benchmarks.apart --operators talkconv --shapes cpu

In the same rounds as the whole pass, and scaled to the same number of bytes or tokens:

    linear      a copy of x: memory in linear order
    walk        lightconv with one tap and no normalisation: memory in the order of the kernels
    in caches   the same pass repeated over a few sentences that stay in the caches: the arithmetic, with its reads and
                writes in the caches

If memory and arithmetic overlap, a pass takes as long as the longest of them; if not, as long as their sum.
Milliseconds on one thread, since waking others takes as long as a few sentences; medians of interleaved rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from benchmarks import candidates, floors, machine, report, timing
from benchmarks.report import BenchmarkError
from benchmarks.shapes import Case, parse
from lightconv_plugin import ops

_PASSES = ("forward", "both")
_PARTS = ("whole", "linear", "walk", "in caches")
_CACHED_BYTES = 2**20  # of x; with fewer, the overhead of a call would be visible
_CALLS = 8  # calls with these few sentences, timed together


def cached(case: Case, itemsize: int) -> Case:
    """The case with as many sentences as fit into the caches, at least one."""
    return replace(case, batch=max(1, min(case.batch, _CACHED_BYTES // (case.steps * case.channels * itemsize))))


def parts(operator: str, case: Case, dtype: torch.dtype) -> dict[tuple[str, str], tuple[Callable[[], object], float]]:
    """For every pass and part: (a call, the factor for its time)."""
    device = torch.device("cpu")
    arguments = candidates.arguments(operator, case, device, dtype)
    few = cached(case, dtype.itemsize)
    whole, small = candidates.ours(arguments), candidates.ours(candidates.arguments(operator, few, device, dtype))
    x, target, one = arguments.x, torch.empty_like(arguments.x), torch.ones(case.heads, 1, dtype=dtype)
    work = floors.work(operator, case, dtype.itemsize)

    def walk() -> None:
        with torch.no_grad():
            ops.lightconv(x, one, 0, normalize="none")

    def several(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(_CALLS):
                call()

        return run

    calls: dict[tuple[str, str], tuple[Callable[[], object], float]] = {}
    for name in _PASSES:
        per_byte = work[name].bytes / (2 * x.nbytes)
        calls[name, "whole"] = getattr(whole, name), 1.0
        calls[name, "linear"] = (lambda: target.copy_(x)), per_byte
        calls[name, "walk"] = walk, per_byte
        calls[name, "in caches"] = several(getattr(small, name)), case.batch / few.batch / _CALLS
    return calls


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and write the JSON; BenchmarkError for wrong options."""
    parser = machine.parser("apart", __doc__)
    parser.add_argument("--operators", nargs="+", choices=("lightconv", "dynamicconv", "talkconv"))
    parser.add_argument("--dtype", choices=machine.DTYPES, default="float32")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="sets of shapes or T,B,C,H,K; default: lengths")
    options = parser.parse_args(arguments)
    if options.device != "cpu":
        raise BenchmarkError("--device cuda is not measured: this is about the caches of a CPU")
    options.threads = options.threads or 1
    device = machine.prepare(options)
    repeats = options.repeats or (2 if options.quick else 20)
    description, timer = machine.describe(device), timing.WallClock(device)
    dtype = machine.DTYPES[options.dtype]
    shapes = [case for name in options.shapes or ["quick" if options.quick else "lengths"] for case in parse(name)]

    print(f"{machine.headline(description)}\n{options.dtype}; milliseconds")
    results = []
    for operator in options.operators or ["lightconv", "dynamicconv"]:
        for case in shapes:
            calls = parts(operator, case, dtype)
            rounds = timing.interleaved({key: call for key, (call, _) in calls.items()}, repeats, timer, even=True)
            seconds: dict[str, dict[str, float]] = {name: {} for name in _PASSES}
            for (name, part), values in rounds.items():
                seconds[name][part] = timing.summary(values)["median_s"] * calls[name, part][1]
            results.append({"operator": operator, "name": case.name, "case": asdict(case), "seconds": seconds})
    print(_table(results))
    if options.json:
        content = {
            "benchmark": "apart",
            "machine": description,
            "dtype": options.dtype,
            "repeats": repeats,
            "quick": options.quick,
            "busy_cores_at_end": round(machine.busy_cores(), 2),
            "cases": results,
        }
        report.write_json(options.json, content)


def _table(results: list[dict]) -> str:
    headers = ["", *(f"{name}: {part}" for name in _PASSES for part in _PARTS)]
    rows = [
        [
            f"{result['operator']} {result['name']}",
            *(report.milliseconds(result["seconds"][name][part]) for name in _PASSES for part in _PARTS),
        ]
        for result in results
    ]
    return report.table(headers, rows)


if __name__ == "__main__":
    sys.exit(report.run(main))
