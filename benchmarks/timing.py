"""Interleaved timing, on a CPU and on a GPU, and peak memory.

CPU: wall time of a call. Caches hold what the call before it left there: with several candidates in a round, another's.

GPU: device time between two events around a call. Before each call a buffer much larger than the L2 cache is read, so
every call reads its inputs from memory; were it written, the cache would write it back within the time of the call.
And the device first sleeps for a moment, in which the host enqueues the whole call, so that the time is the device's
and not that of Python.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

_FLUSH_BYTES = 512 * 2**20
_SLEEP_CYCLES = 2_000_000  # about a millisecond


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
        """The call's time is there once `synchronize` has been called."""
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

    The rounds of the warm-up call everything; after it, what is slow (0.25 s on a CPU, 10 ms on a GPU) is called in
    every fifth round only, and three times at least: its own noise is small. With `even` all are called alike.
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
    """The shortest of many calls, in seconds: what the machine can do."""
    return min(interleaved({"": call}, repeats, timer)[""])


def summary(seconds: list[float]) -> dict:
    """What is kept of the calls of one candidate."""
    return {
        "median_s": statistics.median(seconds),
        "best_s": min(seconds),
        "worst_s": max(seconds),
        "calls": len(seconds),
    }


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most memory of torch's allocator that a call holds at once, beyond what was held before it.

    On a GPU torch.cuda.max_memory_allocated; on a CPU the running sum of the allocator's events, from torch.profiler
    (what a library takes from the system by other ways is not seen).
    """
    gc.collect()  # what waits for it would be freed within the call
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
