"""How long a call takes at best."""

import time
from collections.abc import Callable


def fastest(call: Callable[[], object], rounds: int) -> float:
    """The shortest of several times, in seconds of processor time, in which other processes hardly show."""
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)
