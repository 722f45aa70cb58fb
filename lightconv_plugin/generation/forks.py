"""Processes that share the sentences of a batch: forked from this one, so that they hold its models at once.

A step of a search is a hundred small operations. Threads that share each of them wait for each other longer than they
compute, and threads with sentences of their own wait for Python's lock. Processes wait for nothing.
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
    """A process that was forked has ended before its time; the text says how."""


def can_fork() -> bool:
    """Whether this process may have such processes: not outside Linux, and not where it is itself one of the kind."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


class Forks:
    """`number` processes that answer `work(part)`, each with one thread of torch's.

    They have everything as it is at this moment, and end with this process, however it ends.

    Args:
        number: of processes.
        work: its argument and its result travel between processes: no tensors, whose memory would be shared.
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
        """[work(part) for part in parts], of which there are at most as many as processes.

        Whatever `work` raises is raised here. Raises ForkError where a process has ended. All are ended in both cases.
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
        except BaseException:  # what is under way would be taken for the answer to a later part
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
