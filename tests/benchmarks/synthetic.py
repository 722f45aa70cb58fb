"""Results as the benchmarks write them, with numbers that are made up; for the tests of what reads them."""

from dataclasses import asdict

import torch

from benchmarks import floors, shapes

RATES = floors.Rates(4e12, 8e14)
MACHINE = {
    "date": "2026-01-02T03:04:05+00:00",
    "cpu": "A processor",
    "cores": 2,
    "threads": 2,
    "backend": "cpu",
    "simd": "AVX512",
    "busy_cores": 0.0,
    "versions": {"python": "3.11", "torch": "2.13.0"},
}
GPU = {"gpu": "A card", "driver": "600.1", "cuda": "13.0", "backend": "cuda"}


def machine(*, gpu: bool, date: str = MACHINE["date"]) -> dict:
    return MACHINE | {"date": date} | (GPU if gpu else {})


def case(operator: str, shape: shapes.Case, dtype: str, times: dict[str, float], **peaks: float) -> dict:
    """One case. times: seconds of a candidate's forward pass; its backward takes twice as long, both together thrice.

    peaks: peak bytes of candidates (with "_" for the spaces of their names).
    """
    work = floors.work(operator, shape, getattr(torch, dtype).itemsize)
    floor = {name: asdict(w) | {"seconds": w.seconds(RATES), "bound": w.bound(RATES)} for name, w in work.items()}
    candidates = {
        name: {key: {"median_s": times[name] * n} for key, n in (("forward", 1), ("backward", 2), ("both", 3))}
        for name in times
    }
    for name, peak in peaks.items():
        candidates[name.replace("_", " ")]["peak_bytes"] = peak
    return {
        "operator": operator,
        "name": shape.name,
        "case": asdict(shape),
        "backend": "cuda",
        "floor": floor,
        "candidates": candidates,
    }


def operators(measured: list[dict], *, gpu: bool, dtype: str, **changes) -> dict:
    content = {"benchmark": "operators", "machine": machine(gpu=gpu), "dtype": dtype, "rates": RATES.as_dict()}
    return content | {"quick": False, "cases": measured} | changes


def models(benchmark: str, preset: str, speeds: dict[str, float], *, gpu: bool, dtype: str, **changes) -> dict:
    """A result of benchmarks.training or .generation; speeds: tokens or sentences a second by system."""
    unit = {"training": "tokens_per_s", "generation": "sentences_per_s"}[benchmark]
    content = {"benchmark": benchmark, "machine": machine(gpu=gpu), "preset": preset, "dtype": dtype, "quick": False}
    systems = {name: {unit: speed} for name, speed in speeds.items()}
    if benchmark == "training":
        return content | {"systems": systems} | changes
    of_setting = {name: changes.pop(name) for name in ("beam", "sentences") if name in changes}
    other = {"beam": 7, "sentences": 7, "systems": {name: {unit: 1.0} for name in speeds}}
    return content | {"settings": [other, {**of_setting, "systems": systems}]} | changes
