"""Work in other processes: they end with the one that started them, and what goes wrong in them is raised there.

Each has a pipe of its own. The workers of a `multiprocessing.Pool` share one with a lock, and the pool waits for ever
if it ends a worker that holds it, or if one was killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lightconv_plugin.errors import InputError

_ENDING = (signal.SIGINT, signal.SIGTERM)
_TO_END = 20  # seconds that a process with nothing left to do has to end
Factory = Callable[..., Callable[[Any], Any]]


def module_command(name: str) -> list[str]:
    """The command that runs a module as `python -u -m` does, but imports what this process does.

    -m looks in the working directory first, whatever lies there: another random.py, or another copy of this package.
    """
    path = [entry or os.getcwd() for entry in sys.path]
    run = f"import sys; sys.path[:] = {path!r}; import runpy; runpy.run_module({name!r}, None, '__main__', True)"
    return [sys.executable, "-u", "-c", run]


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Keep Ctrl-C and SIGTERM until a process has been forked.

    What they raise in a hook of the fork, such as logging's, Python prints and forgets.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which signals do not reach
        yield
        return
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for signal_number in came:
            signal.raise_signal(signal_number)


@contextlib.contextmanager
def _spawning() -> Iterator[None]:
    """Block Ctrl-C for a process that is spawned, until `begin_process`: it would print what it was importing."""
    resource_tracker.ensure_running()  # which, as the process needs it, would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_process() -> None:
    """In a process that works for another: Ctrl-C is for the other one, with which this one ends.

    Forked processes share the lock of tqdm's bars: one that another thread held at the fork would be held for ever, and
    so would that of all others by a process that is killed. Each gets its own.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """For a thread: exit when the parent is gone, even if it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # the thread runs in a child
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def called(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], advice: str = ""
) -> Iterator[list[Callable[[], Any]]]:
    """Call a function in one process for each of the `calls`, its arguments.

    Yields a function for each, which waits for the process and returns what it returned, or raises what it raised.
    That is an InputError if the process ended before, with the `advice` if it was killed. The processes end with the
    block.
    """
    with contextlib.ExitStack() as stack:
        results: list[Callable[[], Any]] = []
        for arguments in calls:
            here, there = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.Process(target=_call, args=(there, function, arguments), daemon=True)
            stack.callback(_kill, process, here)
            with forking():
                process.start()
            there.close()
            results.append(partial(_received, process, here, advice))
        yield results


def _call(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    begin_process()
    try:
        connection.send((function(*arguments), None, ""))
    except Exception as error:
        connection.send(_failure(error))


def _failure(error: Exception) -> tuple[None, Exception, str]:
    """What is sent in place of a result: the exception that is being handled, and its traceback."""
    said = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # one of somebody's own, say, with another number of arguments
        return None, RuntimeError(f"in another process: {error!r}"), said
    return None, error, said


def _received(process: BaseProcess, connection: Connection, advice: str) -> Any:
    try:
        result, error, said = connection.recv()
    except (EOFError, OSError):  # the latter within a message, too
        process.join()
        killed = process.exitcode == -signal.SIGKILL
        why = f", perhaps for lack of memory{advice}" if killed else ""
        raise InputError(f"a process ended with status {process.exitcode} before its work was done{why}") from None
    if error is not None:
        raise error from RuntimeError(f"in another process:\n{said}")
    return result


def _kill(process: BaseProcess, connection: Connection) -> None:
    """End a process: it has done its work, or nobody wants that any more."""
    if process.pid is not None:
        process.kill()
        process.join()
    connection.close()


def map_unordered(factory: Factory, arguments: Sequence[tuple], items: Iterable[Any]) -> Iterator[Any]:
    """The results for all items, each as soon as it is found, from one process for each of the `arguments`.

    It is for work that needs a large object in each process, such as a model, which a process opens once.

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
        working: dict[Connection, BaseProcess] = {}
        for own in arguments:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, factory, own), daemon=True)
            stack.push(partial(_end, process, here))
            with _spawning():
                process.start()
            there.close()
            working[here] = process
        begun: set[Connection] = set()  # the first message of a process says that it has begun, and is no result
        while working:
            for connection in wait(list(working)):
                assert isinstance(connection, Connection)
                result = _received(working[connection], connection, ": try fewer `workers`")
                if connection in begun:
                    yield result
                begun.add(connection)
                for item in islice(rest, 1):
                    with contextlib.suppress(ConnectionError):  # the process was killed, as is found in its turn
                        connection.send(item)
                    break
                else:
                    del working[connection]


def _serve(connection: Connection, factory: Factory, arguments: tuple) -> None:
    begin_process()
    try:
        work = factory(*arguments)
        connection.send((None, None, ""))
        while True:
            connection.send((work(connection.recv()), None, ""))
    except (EOFError, BrokenPipeError):  # no work is left
        pass
    except Exception as error:
        connection.send(_failure(error))


def _end(process: BaseProcess, connection: Connection, kind: type[BaseException] | None, *_: object) -> None:
    """Let a process end that has nothing left to do; kill it if its results are not wanted any more."""
    connection.close()
    if kind is None and process.pid is not None:
        process.join(_TO_END)
    _kill(process, connection)
