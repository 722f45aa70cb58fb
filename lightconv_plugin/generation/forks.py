"""Processes that share the sentences of a batch. They are forked from this one and so have its models at once.

A search step is a hundred small operations. Threads that share each operation wait for one another longer than they
compute, and threads with separate sentences wait for Python's lock. Processes do neither.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch


class ForkError(RuntimeError):
    """A worker process ended unexpectedly; the text says how."""


def can_fork() -> bool:
    """Whether this process may fork workers: only on Linux, and not from a worker."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


class Forks:
    """`number` processes that answer `work(part)`, each with one thread of torch's.

    They see the state of this moment, and end with this process, however it ends.

    Args:
        number: of processes.
        work: its argument and result are sent between processes; they must not be tensors, whose memory is shared.
    """

    def __init__(self, number: int, work: Callable[[Any], Any]):
        context = multiprocessing.get_context("fork")
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        # Also where the object is forgotten without `close`.
        self._finalizer = weakref.finalize(self, _end, self._processes, self._connections)
        for _ in range(number):
            ours, theirs = context.Pipe()
            # A connection ends when no process holds its other end: they must not hold each other's.
            process = context.Process(
                target=_serve, args=(theirs, [ours, *self._connections], work), daemon=True, name="lightconv search"
            )
            with warnings.catch_warnings():
                # Of other threads here, whose locks would stay locked: these processes call torch and nothing else.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def map(self, parts: Sequence[Any]) -> list[Any]:
        """[work(part) for part in parts], at most one part per process.

        Whatever `work` raises is raised here; ForkError if a process has ended. Either way, all processes are ended.
        """
        try:
            for worker, part in enumerate(parts):
                with self._told(worker):
                    self._connections[worker].send(part)
            answers = []
            for worker in range(len(parts)):
                with self._told(worker):
                    answers.append(self._connections[worker].recv())
                if isinstance(answers[-1], BaseException):
                    raise answers[-1]
            return answers
        except BaseException:  # or answers still on their way would be taken for those of a later call
            self.close()
            raise

    @contextlib.contextmanager
    def _told(self, worker: int):
        """ForkError instead of what a broken connection raises."""
        try:
            yield
        except (EOFError, OSError):
            process = self._processes[worker]
            process.join(5)
            code = process.exitcode
            how = f"by signal {-code}" if code is not None and code < 0 else f"with status {code}"
            raise ForkError(
                f"process {worker + 1} of {len(self._processes)} that search ended {how}; if memory ran out, take "
                "smaller batches or fewer threads"
            ) from None

    def close(self) -> None:
        """Ends all processes."""
        self._finalizer()


def _end(processes: list, connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()
    processes.clear()
    connections.clear()


def _serve(connection: Connection, others: list[Connection], work: Callable[[Any], Any]) -> None:
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # and not by what the parent has for itself
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError), torch.no_grad():  # the other end is closed
        while True:
            part = connection.recv()
            try:
                answer = work(part)
            except Exception as error:
                answer = error
            try:
                connection.send(answer)
            except (TypeError, AttributeError, ValueError) as error:  # an exception that cannot travel
                connection.send(RuntimeError(f"{type(answer).__name__}: {answer} ({error})"))
