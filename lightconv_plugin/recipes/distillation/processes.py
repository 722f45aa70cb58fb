"""Work that needs a large object in each process, such as a model, which a process opens once."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.data.text_pool import begin_process

_TO_END = 20  # seconds that a process has to end
Factory = Callable[..., Callable[[Any], Any]]


def _serve(connection: Connection, factory: Factory, arguments: tuple) -> None:
    begin_process()
    try:
        work = factory(*arguments)
        connection.send(None)
        while True:
            connection.send(work(connection.recv()))
    except (EOFError, BrokenPipeError):  # no work is left
        pass
    except Exception as error:
        connection.send(error)


def map_unordered(factory: Factory, arguments: Sequence[tuple], items: Iterable[Any]) -> Iterator[Any]:
    """The results for all items, each as soon as it is found, from one process for each of the `arguments`.

    Args:
        factory: an importable function. Each process calls `factory(*its_arguments)` once; what that returns maps an
            item to its result
        items: read one at a time, when a process has nothing to do

    The processes end with the iteration, also if it is not finished, and with this process. An exception in one of them
    is raised here. InputError if one was killed.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit the threads' locks, but not torch's threads
    rest = iter(items)
    with contextlib.ExitStack() as stack:
        waiting: list[Connection] = []
        for own in arguments:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, factory, own), daemon=True)
            stack.push(partial(_end, process, here))
            process.start()
            there.close()
            waiting.append(here)
        ready = set(waiting)  # of these, the next message says that the process has begun, and is no result
        while waiting:
            for connection in wait(waiting):
                assert isinstance(connection, Connection)
                with _alive():
                    result = connection.recv()
                if isinstance(result, Exception):
                    raise result
                if connection in ready:
                    ready.remove(connection)
                else:
                    yield result
                for item in islice(rest, 1):
                    with _alive():
                        connection.send(item)
                    break
                else:
                    waiting.remove(connection)


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """Raise InputError for a process that does not exist any more."""
    try:
        yield
    except (EOFError, ConnectionError):
        raise InputError("a process was killed, perhaps for lack of memory: try fewer `workers`") from None


def _end(process: BaseProcess, connection: Connection, kind: type[BaseException] | None, *_: object) -> None:
    """Let a process end that has nothing left to do; kill it if its results are not wanted any more."""
    connection.close()
    if process.pid is not None:
        process.join(_TO_END if kind is None else 0)
        process.kill()
        process.join()
