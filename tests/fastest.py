"""How long calls take at best."""

import time
from collections.abc import Callable


def fastest(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """The shortest of several times of each call, in seconds of processor time, in which other processes hardly show.

    The calls take turns, since a busy machine is slower for all of them.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            begin = time.process_time()
            call()
            taken.append(time.process_time() - begin)
    return [min(taken) for taken in times]
