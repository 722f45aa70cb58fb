"""Work for processes, some of which goes wrong; what imports this is not slow."""

import atexit
import os
import signal
from pathlib import Path


def double(offset: int):
    return lambda number: 2 * number + offset


def fails(number: int):
    if number == 1:
        raise ValueError("the model is gone")
    return double(0)


def dies(number: int):
    return lambda item: os.kill(os.getpid(), signal.SIGKILL)


def says_goodbye(file: Path):
    atexit.register(file.touch)
    return double(0)
