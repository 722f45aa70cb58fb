"""Work for other processes, some of which goes wrong; what imports this is not slow."""

import atexit
import os
import signal
import threading
import time
from pathlib import Path

BLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # when the process imported this


class Unusual(Exception):
    """Cannot be unpickled: pickle calls it with a single argument."""

    def __init__(self, line: int, column: int):
        super().__init__(f"line {line}, column {column}")


def double(offset: int):
    return lambda number: 2 * number + offset


def fails(number: int):
    if number == 1:
        raise ValueError("the model is gone")
    return double(0)


def fails_unusually(number: int):
    return lambda item: raise_unusual()


def dies(number: int):
    return lambda item: kill_this_process()


def returns_what_cannot_be_sent(number: int):
    return lambda item: lambda: None


def says_goodbye(file: Path):
    atexit.register(file.touch)
    return double(0)


def blocked_at_first():
    return BLOCKED.__contains__


def add(number: int, other: int) -> int:
    return number + other


def pid() -> int:
    return os.getpid()


def fail(kind: type[Exception], text: str):
    raise kind(text)


def raise_unusual():
    raise Unusual(3, 4)


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


def end_this_process():
    os._exit(3)


def is_killed_while_it_answers() -> bytes:
    threading.Timer(0.3, kill_this_process).start()
    return bytes(10_000_000)  # more than a pipe holds


def write_pid_and_wait(path: Path):
    path.write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(60)
