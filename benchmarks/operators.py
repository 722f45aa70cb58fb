"""Forward and backward passes of the operators, compared with floors and peers.

    python -m benchmarks.operators                                     # float32 on this machine's cores, five shapes
    python -m benchmarks.operators --device cuda --dtype bfloat16      # 64M elements, K = 3 to 63
    python -m benchmarks.operators --device cuda --dtype bfloat16 --shapes short sweep --operators dynamicconv

Passes: `forward` without gradients; `backward`: only the gradients of x and the filters; `both`: forward and backward
as in training. *Bytes*, on a CPU: the time for the bytes of a pass at the rate of copying x in its rounds.
Floor: the minimum time for the bytes and the operations of a pass (floors.py), at the rates of this machine in the same
run. timing.py measures time and memory; candidates.py and gpu_peers.py define the peers. A peer that fails, or computes
other numbers than ours, is listed at the end and does not affect other results. The JSON is written after every case.
talkconv has a window instead of K taps: max_left and max_right reach equally far at offsets of 1; here the offsets are
sigmoids of normal numbers. Before timing, each peer's output is compared with ours (except with dropout).
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch

from benchmarks import candidates, floors, gpu_peers, machine, naive, report, timing
from benchmarks.candidates import OURS, Arguments, Candidate
from benchmarks.report import BenchmarkError
from benchmarks.shapes import SETS, VARIANTS, Case, parse
from lightconv_plugin.ops import backends

OPERATORS = ("lightconv", "dynamicconv", "talkconv")
PASSES = ("forward", "backward", "both")
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_OUT_OF_MEMORY = "out of memory"
_COPY = "copy of x"


def parser() -> argparse.ArgumentParser:
    result = machine.parser("operators", __doc__)
    gpu_peers.add_arguments(result)
    result.add_argument("--operators", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    result.add_argument("--dtype", choices=machine.DTYPES, default="float32")
    result.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help=f"sets ({', '.join(SETS)}) or T,B,C,H,K (…Kc: causal); default: the device's",
    )
    result.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=["plain"],
        help="each shape as it is, with GLU, with dropout …",
    )
    result.add_argument("--passes", nargs="+", choices=PASSES, help="default: forward both; on a GPU all three")
    result.add_argument("--without", nargs="+", default=[], metavar="NAME", help="candidates to leave out, by name")
    result.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure, print tables and write the JSON; BenchmarkError for wrong options."""
    options = parser().parse_args(arguments)
    device = machine.prepare(options)
    gpu_peers.check(options)
    tasks = _tasks(options, device)
    dtype = machine.DTYPES[options.dtype]
    if dtype == torch.float64 and device.type == "cuda":
        raise BenchmarkError("--dtype float64 is for the CPU; on a GPU float32, bfloat16 and float16 are measured")
    passes = [p for p in PASSES if p in (options.passes or (PASSES if device.type == "cuda" else ("forward", "both")))]
    repeats = options.repeats or (3 if options.quick else 50 if device.type == "cuda" else 20)

    description = machine.describe(device)
    timer = timing.clock(device)
    rates = floors.measure(device, dtype, quick=options.quick, timer=timer)
    print(report_head(description, options, rates))
    results: list[dict] = []
    content = {
        "benchmark": "operators",
        "machine": description,
        "dtype": options.dtype,
        "rates": rates.as_dict(),
        "repeats": repeats,
        "quick": options.quick,
        "busy_cores_at_end": None,
        "cases": results,
    }
    for operator, case in tasks:
        result = _measure(operator, case, dtype, device, options, passes, repeats, timer, rates)
        print(_case_table(result, passes), flush=True)
        results.append(result)
        if options.json:
            report.write_json(options.json, content)
    print(overview(results, passes[-1]))
    if options.json:
        report.write_json(options.json, content | {"busy_cores_at_end": round(machine.busy_cores(), 2)})
    if failures := _failures(results):
        raise BenchmarkError("; ".join(failures))


def report_head(description: dict, options: argparse.Namespace, rates: floors.Rates) -> str:
    timed = "device time, caches flushed before each call" if options.device == "cuda" else "wall time"
    return (
        f"{machine.headline(description)}\n{options.dtype}; copy {rates.bytes_per_s / 1e9:.1f} GB/s (read + written), "
        f"matrix product {rates.flops_per_s / 1e9:.0f} GFLOP/s; {timed}, medians of interleaved rounds"
    )


def _tasks(options: argparse.Namespace, device: torch.device) -> list[tuple[str, Case]]:
    names = options.shapes or ["quick" if options.quick else "gpu" if device.type == "cuda" else "cpu"]
    shapes = [case for name in names for case in parse(name)]
    cases = dict.fromkeys(VARIANTS[variant](case) for variant in options.variants for case in shapes)
    # talkconv has neither GLU nor dropout; in a model, they come before it.
    lacks = {"talkconv": [case for case in cases if case.glu or case.dropout]}
    tasks = [(name, case) for name in options.operators for case in cases if case not in lacks.get(name, [])]
    if not tasks:
        raise BenchmarkError(
            "--variants: talkconv has neither GLU nor dropout, and --operators names no other operator"
        )
    return tasks


# ------------------------------------------------------------------------------------------------ measuring


def _measure(
    operator: str,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    options: argparse.Namespace,
    passes: list[str],
    repeats: int,
    timer,
    rates: floors.Rates,
) -> dict:
    """Measure every candidate and pass of one case; returns its entry in the JSON."""
    arguments = candidates.arguments(operator, case, device, dtype)
    timings: dict[str, dict] = {}
    everyone = [c for c in _candidates(arguments, options, timings) if c.name not in options.without]
    timings = {c.name: {} for c in everyone} | timings
    everyone = _checked(everyone, arguments, timings)
    if not options.no_memory:
        for candidate in list(everyone):
            peak = _try(lambda candidate=candidate: timing.peak_bytes(candidate.both, device), candidate, timings)
            timings[candidate.name]["peak_bytes"] = peak
    everyone = [c for c in everyone if "error" not in timings[c.name]]
    copied: dict[str, float] = {}
    for name in passes:
        calls = {c.name: _call(c, name, timings) for c in everyone}
        calls = {candidate: call for candidate, call in calls.items() if call is not None}
        if device.type == "cpu":
            target = torch.empty_like(arguments.x)
            calls[_COPY] = lambda x=arguments.x, target=target: target.copy_(x)
        for candidate, seconds in timing.interleaved(calls, repeats, timer).items():
            if candidate == _COPY:
                copied[name] = timing.summary(seconds)["median_s"]
            else:
                timings[candidate][name] = timing.summary(seconds)
        del calls
    work = floors.work(operator, case, dtype.itemsize)
    result = {
        "operator": operator,
        "name": case.name,
        "case": asdict(case),
        "backend": backends.backend(device.type),
        "floor": {
            p: asdict(work[p])
            | {"seconds": work[p].seconds(rates), "bound": work[p].bound(rates)}
            | ({"bytes_as_copy_s": work[p].bytes * copied[p] / (2 * arguments.x.nbytes)} if copied else {})
            for p in passes
        },
        "candidates": timings,
    }
    del everyone, arguments
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _candidates(arguments: Arguments, options: argparse.Namespace, timings: dict[str, dict]) -> list[Candidate]:
    peers = []
    for name, make in gpu_peers.named(arguments, options).items():
        try:
            peers += make()
        except Exception as error:  # other projects' code may not compile, import …
            timings[name] = {"error": _message(error)}
    return [
        candidates.ours(arguments),
        candidates.our_reference(arguments),
        *candidates.fairseq_modules(arguments),
        *naive.fused_loop(arguments),
        *peers,
        *candidates.depthwise(arguments),
        *candidates.prefix_sums(arguments),
        *candidates.attention(arguments),
    ]


def _checked(everyone: list[Candidate], arguments: Arguments, timings: dict[str, dict]) -> list[Candidate]:
    """The candidates that work and compute the same numbers as ours."""
    fitting, expected = [], None
    for candidate in everyone:
        with torch.no_grad():
            out = _try(candidate.run, candidate, timings)
        if out is None:
            continue
        if candidate.to_tbc is None or arguments.case.dropout:
            fitting.append(candidate)
            continue
        out = candidate.to_tbc(out).float()
        if expected is None:
            expected = out
        error = ((out - expected).norm() / expected.norm().clamp_min(1e-30)).item()
        if error <= _TOLERANCE[arguments.x.dtype]:
            fitting.append(candidate)
        else:
            timings[candidate.name]["error"] = f"other numbers than {OURS}: relative error {error:.1e}"
    return fitting


def _call(candidate: Candidate, name: str, timings: dict[str, dict]) -> Callable[[], None] | None:
    """A call of this pass, which has been made once successfully."""

    def tried() -> Callable[[], None]:
        call = candidate.backward() if name == "backward" else getattr(candidate, name)
        call()
        return call

    return _try(tried, candidate, timings)


def _try(call: Callable, candidate: Candidate, timings: dict[str, dict]):
    """The call's result; None, with a note, if memory is too small or a peer fails. Ours must not fail."""
    try:
        return call()
    except torch.OutOfMemoryError:
        timings[candidate.name]["error"] = _OUT_OF_MEMORY
    except Exception as error:
        if candidate.name == OURS:
            raise
        timings[candidate.name]["error"] = _message(error)
    gc.collect()
    torch.cuda.empty_cache()
    return None


def _message(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _failures(results: list[dict]) -> list[str]:
    """The candidates' errors by case; running out of memory is a result, not an error."""
    return [
        f"{name} for {result['operator']} {result['name']}: {measured['error']}"
        for result in results
        for name, measured in result["candidates"].items()
        if measured.get("error", _OUT_OF_MEMORY) != _OUT_OF_MEMORY
    ]


# ------------------------------------------------------------------------------------------------ tables


def _median(result: dict, candidate: str, name: str) -> float | None:
    return result["candidates"].get(candidate, {}).get(name, {}).get("median_s")


def _ratio(numerator: float | None, denominator: float | None) -> str:
    return report.digits(numerator / denominator) if numerator and denominator else "–"


def _case_table(result: dict, passes: list[str]) -> str:
    """A row for each candidate: its times, as multiples of the floor, and as multiples of ours."""
    headers = ["candidate"]
    for name in passes:
        headers += [f"{name}, ms", "÷ floor", "÷ ours"]
    rows = []
    bytes_row = ["bytes, as fast as a copy of x"]
    for name in passes:
        seconds = result["floor"][name].get("bytes_as_copy_s")
        floor, ours = result["floor"][name]["seconds"], _median(result, OURS, name)
        bytes_row += [report.milliseconds(seconds), _ratio(seconds, floor), _ratio(seconds, ours)]
    if "bytes_as_copy_s" in result["floor"][passes[0]]:
        rows.append([*bytes_row, "–"])
    for candidate, measured in result["candidates"].items():
        label = f"{candidate} ({result['backend']})" if candidate == OURS else candidate
        row = [label if "error" not in measured else f"{label}: {measured['error']}"]
        for name in passes:
            median = _median(result, candidate, name)
            row += [
                report.milliseconds(median),
                _ratio(median, result["floor"][name]["seconds"]),
                _ratio(median, _median(result, OURS, name)),
            ]
        peak = measured.get("peak_bytes")
        rows.append([*row, report.digits(peak, 2**20)])
    floors_text = ", ".join(
        f"{name} {report.milliseconds(result['floor'][name]['seconds'])} ms ({result['floor'][name]['bound']})"
        for name in passes
    )
    title = f"\n{result['operator']} {result['name']}; floor: {floors_text}\n"
    return title + report.table([*headers, "peak, MiB"], rows)


def overview(results: list[dict], name: str) -> str:
    """A row for each case: our time, its floor, and the peers' times as multiples of ours."""
    peers = list(dict.fromkeys(c for result in results for c in result["candidates"] if c != OURS))
    rows = []
    for result in results:
        ours, floor = _median(result, OURS, name), result["floor"][name]["seconds"]
        times = [_ratio(_median(result, peer, name), ours) for peer in peers]
        label = f"{result['operator']} {result['name']}"
        rows.append([label, report.milliseconds(ours), report.milliseconds(floor), _ratio(ours, floor), *times])
    title = f"\n{name}: ours, and how many times as long the others take\n"
    return title + report.table(["case", "ours, ms", "floor, ms", "÷ floor", *peers], rows)


if __name__ == "__main__":
    sys.exit(report.run(main))
