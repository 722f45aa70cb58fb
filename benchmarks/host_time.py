"""Host time per call: the overhead of a call, measured on tensors so small that the computation takes no time.

    python -m benchmarks.host_time --json benchmarks/results/cpu_host_time.json

On a GPU, a small problem takes as long as the host needs to launch it, so the overhead determines the training speed of
short sequences there.
Each operator is compared with torch.nn.functional.linear, on one thread: without gradients, with autograd recording,
and with the backward pass. *in Python*: the same call with the operators' autograd recorded in Python, as without a
native library. Microseconds, medians of many rounds in which all calls take turns.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._library import autograd as recording

from benchmarks import machine, report, timing
from benchmarks.report import BenchmarkError
from lightconv_plugin import ops
from lightconv_plugin.ops import registration

_CALLS = 100  # timed together: a single call is too short for the clock
_LINEAR = "F.linear"
_MODES = ("forward", "forward, recorded", "forward + backward")

Call = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def calls(device: torch.device) -> dict[str, Call]:
    """Each operator with the tensors that it is called with."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    x, static, dynamic, offsets = normal(2, 1, 8), normal(2, 3), normal(2, 1, 2, 3), normal(2, 1, 2).sigmoid()
    return {
        _LINEAR: (F.linear, (x, normal(8, 8), normal(8))),
        "lightconv": (lambda x, w: ops.lightconv(x, w, 1), (x, static)),
        "dynamicconv": (lambda x, w: ops.dynamicconv(x, w, 1), (x, dynamic)),
        "dynamicconv, weight dropout": (lambda x, w: ops.dynamicconv(x, w, 1, dropout=0.1), (x, dynamic)),
        "talkconv": (lambda x, left: ops.talkconv(x, left, None, 3, 0), (x, offsets)),
    }


def timed(call: Call, mode: str) -> Callable[[], None]:
    """A function that makes the call many times."""
    function, tensors = call
    arguments = [tensor.detach().requires_grad_(mode != _MODES[0]) for tensor in tensors]
    grad = torch.ones_like(function(*arguments))

    def run() -> None:
        for _ in range(_CALLS):
            out = function(*arguments)
            if mode == _MODES[2]:
                torch.autograd.backward(out, grad)

    return run


@contextlib.contextmanager
def recorded_in_python(device: torch.device) -> Iterator[None]:
    """Within the block, registration.py records the operators' autograd, even if a native library is loaded."""
    library = torch.library.Library("lightconv", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name, _, save, backward in registration.OPERATORS:
                operator = getattr(torch.ops.lightconv, name).default
                record = recording.make_autograd_impl(operator, recording.Info(backward, save))
                library.impl(name, record, f"Autograd{device.type.upper()}", with_keyset=True)
        yield
    finally:
        library._destroy()


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and write the JSON; BenchmarkError for wrong options."""
    options = machine.parser("host_time", __doc__).parse_args(arguments)
    options.threads = options.threads or 1
    device = machine.prepare(options)
    repeats = options.repeats or (2 if options.quick else 100)
    description = machine.describe(device)
    if description["backend"] == "reference":
        raise BenchmarkError("the host's time is that of native kernels, which cannot be used here")

    every = {(name, mode): timed(call, mode) for name, call in calls(device).items() for mode in _MODES}
    timer = timing.WallClock(device)
    seconds = timing.interleaved(every, repeats, timer, even=True)
    with recorded_in_python(device):
        ours = {key: call for key, call in every.items() if key[0] != _LINEAR and key[1] != _MODES[0]}
        in_python = timing.interleaved(ours, max(2, repeats // 4), timer, even=True)
    results: dict[str, dict] = {}
    for (name, mode), rounds in seconds.items():
        result = results.setdefault(name, {}).setdefault(mode, {})
        result["native"] = timing.summary([one / _CALLS for one in rounds])
        if (name, mode) in in_python:
            result["in_python"] = timing.summary([one / _CALLS for one in in_python[name, mode]])

    print(f"{machine.headline(description)}\nmicroseconds of the host for a call")
    print(_table(results))
    if options.json:
        content = {
            "benchmark": "host_time",
            "machine": description,
            "calls_per_round": _CALLS,
            "repeats": repeats,
            "quick": options.quick,
            "busy_cores_at_end": round(machine.busy_cores(), 2),
            "calls": results,
        }
        report.write_json(options.json, content)


def _table(results: dict) -> str:
    rows = []
    for name, modes in results.items():
        row = [name]
        for result in modes.values():
            row.append(report.digits(result["native"]["median_s"], 1e-6))
            row.append(report.digits(result.get("in_python", {}).get("median_s"), 1e-6))
        del row[2]  # nothing is recorded in a forward pass alone
        rows.append(row)
    headers = ["call", _MODES[0]]
    for mode in _MODES[1:]:
        headers += [mode, "in Python"]
    return report.table(headers, rows)


if __name__ == "__main__":
    sys.exit(report.run(main))
