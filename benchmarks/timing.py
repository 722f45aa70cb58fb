"""Interleaved timing, on a CPU and on a GPU, and peak memory.

CPU: wall time of a call. The caches hold the data of the previous call, which is another candidate's if a round has
several.

GPU: device time between two events around a call. Before each call, a buffer much larger than the L2 cache is read, so
that every call reads its inputs from memory. (If it were written, its write-back would fall into the time of the call.)
The device also sleeps first while the host enqueues the whole call, so that device time is measured, not Python's.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import report

_FLUSH_BYTES = 512 * 2**20
_SLEEP_CYCLES = 2_000_000  # about a millisecond
_RESAMPLES = 4000


class WallClock:
    """Wall time, until the device is done."""

    slow = 0.25

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def time(self, call: Callable[[], object]) -> Callable[[], float]:
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        seconds = time.perf_counter() - start
        return lambda: seconds

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


class CudaClock:
    """Time on the current CUDA stream; see the module's docstring."""

    slow = 0.01

    def __init__(self, device: torch.device) -> None:
        self.flush = torch.zeros(_FLUSH_BYTES // 4, device=device)
        self.sum = torch.zeros((), device=device)

    def time(self, call: Callable[[], object]) -> Callable[[], float]:
        """The call's time is available after `synchronize`."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_SLEEP_CYCLES)
        torch.sum(self.flush, 0, out=self.sum)
        start.record()
        call()
        end.record()
        return lambda: start.elapsed_time(end) * 1e-3

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def clock(device: torch.device) -> WallClock | CudaClock:
    return CudaClock(device) if device.type == "cuda" else WallClock(device)


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    timer: WallClock | CudaClock,
    warm_up: int = 2,
    *,
    even: bool = False,
) -> dict[str, list[float]]:
    """Seconds of each call in each round.

    Warm-up rounds call everything. After that, slow calls (0.25 s on a CPU, 10 ms on a GPU), which have little noise,
    are made only in every fifth round, but at least three times. With `even`, all calls are made equally often.
    """
    pace = {}
    for _ in range(warm_up):
        for name, call in calls.items():
            reading = timer.time(call)
            timer.synchronize()
            pace[name] = max(1, min(5, repeats // 3)) if reading() > timer.slow and not even else 1
    readings: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
    for number in range(repeats):
        for name, call in calls.items():
            if number % pace[name] == 0:
                readings[name].append(timer.time(call))
        timer.synchronize()
    return {name: [reading() for reading in values] for name, values in readings.items()}


def best(call: Callable[[], object], repeats: int, timer: WallClock | CudaClock) -> float:
    """The shortest of many calls, in seconds: the machine's best."""
    return min(interleaved({"": call}, repeats, timer)[""])


def summary(seconds: list[float]) -> dict:
    """The summary of one candidate's calls that is stored, with the calls themselves in their order, for `ratio`."""
    return {
        "median_s": statistics.median(seconds),
        "best_s": min(seconds),
        "worst_s": max(seconds),
        "calls": len(seconds),
        "samples_s": [float(f"{one:.6g}") for one in seconds],
    }


class Ratio(NamedTuple):
    """How many times as long something takes as something else, and the 95 % confidence interval, if it is known.

    With fewer than about ten calls, the interval is little more than the least and the most of them.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{report.digits(self.value)}{self.interval()}"

    def interval(self, decimals: int | None = None) -> str:
        """The interval in brackets, after a space; nothing if it is not known."""
        if self.low is None or self.high is None:
            return ""
        low, high = (
            report.digits(end) if decimals is None else f"{end:,.{decimals}f}" for end in (self.low, self.high)
        )
        return f" ({low}–{high})"


def ratio(theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> Ratio | None:
    """Of the medians of two summaries; None if one is missing. Summaries without samples are of older files."""
    if not theirs or not ours:
        return None
    value = theirs["median_s"] / ours["median_s"]
    if "samples_s" not in theirs or "samples_s" not in ours:
        return Ratio(value)
    return Ratio(value, *_bootstrap(theirs["samples_s"], ours["samples_s"]))


def _bootstrap(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of median(theirs) / median(ours).

    If both were called equally often, the n-th calls belong to one turn, and turns are drawn: what slows down the whole
    machine for a while then cancels out.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(theirs), (_RESAMPLES, len(theirs)), generator=generator)
    paired = len(theirs) == len(ours)
    others = drawn if paired else torch.randint(len(ours), (_RESAMPLES, len(ours)), generator=generator)
    above = torch.tensor(theirs, dtype=torch.float64)[drawn].quantile(0.5, dim=1)
    below = torch.tensor(ours, dtype=torch.float64)[others].quantile(0.5, dim=1)
    low, high = (above / below).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The peak memory of torch's allocator during a call, without what was allocated before it.

    On a GPU, this is torch.cuda.max_memory_allocated; on a CPU, the running sum of the allocator's events, from
    torch.profiler (which does not see memory that a library gets from the system in other ways).
    """
    gc.collect()  # otherwise garbage could be freed during the call
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        # fairseq's Trainer resets the peak at the end of every step.
        with mock.patch.object(torch.cuda, "reset_peak_memory_stats"):
            call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    changes = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda change: change[0],
    )
    held = peak = 0
    for _, nbytes in changes:
        held += nbytes
        peak = max(peak, held)
    return peak
