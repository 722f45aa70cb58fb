"""Runs trainings at the same time and shows their progress."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PROGRESS = re.compile(r" loss=([\d.]+).*?wps=([\d.]+).*?num_updates=(\d+)")


class TrainingFailed(RuntimeError):
    """A training ended with an error; the message has the end of its output."""


@dataclass
class Training:
    """A training command, and the latest state from its output."""

    name: str
    command: list[str]
    updates: int
    folder: Path
    key: str
    process: subprocess.Popen | None = None
    state: str = "starting"
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=15))

    def start(self, environment: Mapping[str, str]) -> None:
        # In its own session, so that Ctrl-C reaches it only through stop(), which ends all of its processes.
        self.process = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, output: Iterable[str]) -> None:
        for line in output:
            self.tail.append(line.rstrip())
            if match := _PROGRESS.search(line):
                loss, speed, done = match.groups()
                self.state = f"update {done}/{self.updates} loss {float(loss):.2f} {float(speed):,.0f} tokens/s"

    def status(self) -> int | None:
        """The exit status; None until it has ended."""
        return None if self.process is None else self.process.poll()

    def stop(self) -> None:
        """End the training and everything it started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait()


def run_together(trainings: Sequence[Training], environment: Mapping[str, str]) -> None:
    """Start all, show their states until the last has ended; any failure or Ctrl-C ends all of them."""
    start = time.monotonic()
    interval = 1 if sys.stderr.isatty() else 15
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for training in trainings:
            training.start(environment)
        shown = start
        while any(training.status() is None for training in trainings):
            time.sleep(0.2)
            for training in trainings:
                if training.status():
                    raise TrainingFailed(_failure(training))
            if time.monotonic() - shown >= interval:
                shown = time.monotonic()
                _show(trainings, shown - start)
        for training in trainings:
            if training.status():
                raise TrainingFailed(_failure(training))
            training.state = "done"
        _show(trainings, time.monotonic() - start, last=True)
    except BaseException:
        for training in trainings:
            training.stop()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _failure(training: Training) -> str:
    status, lines = training.status(), "\n".join(training.tail)
    return f"{training.name} ended with status {status}:\n{lines}\n(all of it: {training.folder / 'train.log'})"


def _show(trainings: Sequence[Training], seconds: float, last: bool = False) -> None:
    minutes = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
    line = f"  {minutes}  " + "  |  ".join(f"{t.name}: {'done' if t.status() == 0 else t.state}" for t in trainings)
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r{line[:width]:<{width}}" + ("\n" if last else ""))
    else:
        sys.stderr.write(line + "\n")
    sys.stderr.flush()
