"""Where the time of a training step goes on a GPU, by torch.profiler: kernels by kind, launches and gaps.

    python -m benchmarks.gpu_profile --device cuda --dtype bfloat16 --preset wmt_en_de_big --json FILE

First, what a launch costs the host of this machine: a loop of `x.add_(1)`, and the same loop without it. Then some
steps of fairseq's Trainer with DynamicConv and with fairseq's Transformer, on random tokens.

A gap is time between the first kernel's start and the last one's end in which no kernel runs. On a CPU (--quick, to see
that it runs) the operators that torch calls first take the place of kernels.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import machine, report

_BATCHES = {3584: (128, 28), 16384: (512, 32)}  # tokens → sentences and their length
_STEPS, _CALLS = 3, 10_000
# What is in the names of kernels, and how each kind is called; the first that matches.
_KINDS = (
    ("ours", ("lightconv",)),
    ("attention", ("attention", "fmha", "flash")),
    ("matrix products", ("gemm", "gemv", "cutlass", "nvjet", "linear", "addmm", "::mm", "::bmm")),
    ("optimizer", ("multi_tensor", "adam", "foreach")),
    ("norm", ("layer_norm", "layernorm")),
    ("loss and softmax", ("softmax", "nll")),
    ("dropout", ("dropout",)),
    ("copies", ("memcpy", "memset", "copy", "cat")),
    ("reductions", ("reduce", "::sum")),
    ("element-wise", ("elementwise", "::add", "::mul", "relu", "glu")),
)


class Kernel(NamedTuple):
    """Times in microseconds."""

    name: str
    start: float
    end: float


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and write the JSON."""
    parser = machine.parser("gpu_profile", __doc__)
    parser.add_argument("--preset", choices=("iwslt_de_en", "multi30k_en_de", "wmt_en_de_big"), default="wmt_en_de_big")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options = parser.parse_args(arguments)
    device = machine.prepare(options)
    # Imported late, since it takes seconds and wrong options should be reported at once.
    from benchmarks import systems

    host = host_costs(device, 100 if options.quick else _CALLS)
    results: dict[str, Any] = {}
    for system in (systems.DYNAMIC, systems.TRANSFORMER):
        results[system] = _steps(system, options, device)
    description = machine.describe(device)
    print(f"{machine.headline(description)}\n{options.preset}, {options.dtype}")
    print(f"a launch takes the host {host['launch_s'] * 1e6:.1f} µs, an empty loop {host['loop_s'] * 1e6:.2f} µs")
    print(_table(results))
    if options.json:
        content = {
            "benchmark": "gpu_profile",
            "machine": description,
            "preset": options.preset,
            "dtype": options.dtype,
            "quick": options.quick,
            "host": host,
            "systems": results,
        }
        report.write_json(options.json, content)


def host_costs(device: torch.device, calls: int) -> dict[str, float]:
    """Seconds of the host for one launch, the device not waited for, and for one turn of an empty loop."""
    x = torch.zeros(1, device=device)
    seconds = {}
    for name, call in {"loop_s": lambda: None, "launch_s": lambda: x.add_(1)}.items():
        call()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds[name] = (time.perf_counter() - start) / calls
    return seconds


def _steps(system: str, options: Any, device: torch.device) -> dict[str, Any]:
    """The summaries of a system's steps by tokens per batch."""
    from benchmarks import systems, trainers

    found = {}
    for tokens, (sentences, length) in ({24: (4, 6)} if options.quick else _BATCHES).items():
        preset = systems.sized(systems.PRESETS[options.preset], options.quick, sentences, length)
        task = systems.task(systems.dictionary(preset.vocabulary))
        model = systems.build(system, preset, task, tiny=options.quick)
        batches = systems.random_batches(preset, task.target_dictionary, 2)
        step = trainers.steps(model, task, device, options.dtype, itertools.cycle(batches))
        for _ in range(trainers.WARM_UP):
            step()
        found[f"{tokens} tokens"] = summary(_kernels(step, device), _STEPS)
    return found


def _kernels(step: Any, device: torch.device) -> list[Kernel]:
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(_STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = [event for event in profiler.events() if (_is_kernel if on_gpu else _is_called_first)(event)]
    return [Kernel(event.name, event.time_range.start, event.time_range.end) for event in wanted]


def _is_kernel(event: Any) -> bool:
    return event.device_type == DeviceType.CUDA


def _is_called_first(event: Any) -> bool:
    parent = event.cpu_parent
    return event.name.startswith("aten::") and not (parent is not None and parent.name.startswith("aten::"))


def summary(kernels: Iterable[Kernel], steps: int) -> dict[str, Any]:
    """Of one step: launches, milliseconds of kernels by kind, busy and in gaps, and the ten that take longest."""
    kernels = sorted(kernels, key=lambda kernel: kernel.start)
    kinds: dict[str, tuple[int, float]] = {}
    names: dict[str, float] = {}
    busy, end = 0.0, -float("inf")
    for kernel in kernels:
        count, time_ = kinds.get(kind(kernel.name), (0, 0.0))
        kinds[kind(kernel.name)] = (count + 1, time_ + kernel.end - kernel.start)
        names[kernel.name] = names.get(kernel.name, 0.0) + kernel.end - kernel.start
        busy += max(0.0, kernel.end - max(end, kernel.start))  # kernels of several streams overlap
        end = max(end, kernel.end)
    span = end - kernels[0].start if kernels else 0.0
    scale = 1e-3 / steps
    longest = sorted(names, key=lambda name: -names[name])[:10]
    return {
        "launches": len(kernels) / steps,
        "busy_ms": busy * scale,
        "gaps_ms": (span - busy) * scale,
        "kinds": {name: {"launches": count / steps, "ms": time_ * scale} for name, (count, time_) in kinds.items()},
        "longest": {name: names[name] * scale for name in longest},
    }


def kind(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in _KINDS if any(part in lower for part in parts)), "other")


def _table(results: dict[str, dict[str, Any]]) -> str:
    rows = []
    for system, by_tokens in results.items():
        for tokens, found in by_tokens.items():
            kinds = sorted(found["kinds"].items(), key=lambda item: -item[1]["ms"])[:3]
            most = ", ".join(f"{name} {report.digits(of['ms'])}" for name, of in kinds)
            numbers = [report.digits(found[key]) for key in ("launches", "busy_ms", "gaps_ms")]
            rows.append([f"{system}, {tokens}", *numbers, most])
    return report.table(["a step of", "launches", "busy, ms", "gaps, ms", "most of it, ms"], rows)


if __name__ == "__main__":
    sys.exit(report.run(main))
