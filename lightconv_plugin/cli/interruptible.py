"""Runs a recipe that trains, whatever ends it."""

import signal
import sys
from collections.abc import Callable


def interruptible(command: str, work: Callable[[], None]) -> int:
    """The exit status of `work()`: 1 if a training fails, 130 after Ctrl-C, SIGTERM or, unless ignored (nohup), SIGHUP.

    These signals end this process and its trainings.
    """
    from lightconv_plugin.recipes.training.child import TrainingFailed

    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        work()
    except TrainingFailed as error:
        print(f"lightconv {command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nlightconv {command}: interrupted; rerun the same command to resume", file=sys.stderr)
        return 130
    return 0


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
