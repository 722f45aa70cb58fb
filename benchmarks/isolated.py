"""Runs each search in its own process, since engines with spinning threads would slow down whatever runs after them.

This also makes memory measurable: each process holds one model and one search.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import BenchmarkError
from lightconv_plugin.quiet import quietly

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_REST = 0.25  # seconds for the previous process's threads to go to sleep


class Isolated:
    """Runs the search returned by `build()` (see searches.py) in a new process.

    Args:
        build: must be picklable.
        threads: number of torch threads in that process.

    If the process fails, the next method called raises BenchmarkError.
    """

    def __init__(self, build: Callable[[], Any], threads: int):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not daemonic, since daemonic processes may not start others, as our search does.
        self._process = context.Process(target=_serve, args=(theirs, build, threads))
        self._process.start()
        theirs.close()

    def parameters(self) -> int | None:
        """Number of the model's parameters; None if unknown. Must be called once, before anything else."""
        return self._receive()

    def translate(self, batches: list) -> tuple[list[float], list[list[list[int]]]]:
        """(seconds for each batch in sequence, their translations)."""
        time.sleep(_REST)
        return self._ask("translate", batches)

    def forget_peak(self) -> None:
        """Let peak_bytes tell of no more than the calls from here on, and of what is in memory now."""
        self._ask("forget", None)

    def peak_bytes(self) -> int | None:
        """Peak memory of model, search and translations, without the libraries; None if unknown."""
        return self._ask("peak", None)

    def _ask(self, what: str, argument: Any) -> Any:
        self._connection.send((what, argument))
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise BenchmarkError(f"a search's process ended with status {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._connection.close()  # ends the process
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()


class OnGPU:
    """The same in this process: GPU memory is too small for several contexts, and nothing spins on a GPU."""

    def __init__(self, build: Callable[[], Any], threads: int):
        self._search = build()

    def parameters(self) -> int | None:
        return self._search.parameters

    def translate(self, batches: list) -> tuple[list[float], list[list[list[int]]]]:
        return _translate(self._search, batches)

    def forget_peak(self) -> None:
        """The peak is that of one call anyway."""

    def peak_bytes(self) -> int | None:
        """Peak memory of the last call of translate, without what was allocated before it."""
        return self._search.peak_bytes

    def close(self) -> None:
        self._search = None


def begin(jobs: Mapping[str, Callable[[], Any]], device: torch.device) -> dict[str, Isolated | OnGPU]:
    """Start each job's search in its process (or on the GPU), ready to translate."""
    kind = OnGPU if device.type == "cuda" else Isolated
    return {name: kind(job, torch.get_num_threads()) for name, job in jobs.items()}


def _translate(search: Any, batches: list) -> tuple[list[float], list[list[list[int]]]]:
    seconds, found = [], []
    for batch in batches:
        start = time.perf_counter()
        found.append(search.translate(batch))  # results are lists, so the device is done
        seconds.append(time.perf_counter() - start)
    return seconds, found


def _serve(connection, build: Callable[[], Any], threads: int) -> None:
    with quietly(), contextlib.suppress(EOFError, OSError):
        torch.set_num_threads(threads)
        try:
            before = _libraries()
            search = build()
            connection.send(search.parameters)
            while True:
                what, argument = connection.recv()
                if what == "forget":
                    before = before if _forgotten() else None  # a peak that cannot be forgotten is no answer
                connection.send(_translate(search, argument) if what == "translate" else _peak(before))
        except BenchmarkError as error:
            connection.send(error)
        except (RuntimeError, ValueError, TypeError) as error:
            connection.send(BenchmarkError(f"{type(error).__name__}: {error}"))


def _libraries() -> int | None:
    """Load all libraries; returns the resident memory before any model is built."""
    import fairseq.sequence_generator  # noqa: F401

    import lightconv_plugin.generation  # noqa: F401
    from lightconv_plugin.ops import backends

    with contextlib.suppress(ImportError):
        import ctranslate2  # noqa: F401
    backends.backend("cpu")
    return _resident("VmRSS")


def _peak(before: int | None) -> int | None:
    """Peak memory of this process, plus the pages of its child processes that are not shared with it."""
    if before is None:
        return None
    children = [process.pid for process in multiprocessing.active_children()]
    return _resident("VmHWM") - before + sum(_private(pid) for pid in children)


def _forgotten() -> bool:
    """Lower the high-water mark to the memory in use; False if the system does not allow it."""
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _private(pid: int) -> int:
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith(("Private_Dirty:", "Private_Clean:")):
            total += int(line.split()[1]) * 1024
    return total


def _resident(name: str) -> int | None:
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{_STATUS} has no {name}")
