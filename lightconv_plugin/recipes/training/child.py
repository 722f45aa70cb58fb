"""Trainings in processes of their own, for recipes: runs them, shows their progress and ends them.

    lightconv_plugin.recipes.training.child CONFIG [overrides …]

is one of them. What it prints before it trains goes to a file, all else to the training's own log; its progress is read
from its records. So it does not depend on the process that started it, and continues if that is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightconv_plugin.errors import InputError
from lightconv_plugin.processes import module_command
from lightconv_plugin.records.file import last_statistics, size

_TO_END = 20  # seconds that a training has to end after SIGTERM


class TrainingFailed(RuntimeError):
    """A training failed or ended too early; the message has the end of its output and names the log."""


@dataclass
class Child:
    """A training; `updates`: its length, to be shown. Messages are kept in logs/NAME.train.log next to the folder."""

    name: str
    config: Path
    overrides: Sequence[str]
    folder: Path
    updates: int | str

    def __post_init__(self) -> None:
        self.messages = self.folder.parent / "logs" / f"{self.folder.name}.train.log"
        self._process: subprocess.Popen | None = None
        self._earlier = 0  # bytes of records of earlier runs
        self._shown = 0  # bytes of messages that have been shown

    def start(self, environment: Mapping[str, str], lock: int | None = None) -> None:
        """Start it in a session of its own, which Ctrl-C does not reach; it also holds the file descriptor `lock`."""
        self.messages.parent.mkdir(parents=True, exist_ok=True)
        self._earlier, self._shown = size(self.folder), 0
        command = module_command("lightconv_plugin.recipes.training.child")
        with self.messages.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, str(self.config), f"checkpoint.save_dir={self.folder}", *self.overrides],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                pass_fds=() if lock is None else (lock,),
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        """The exit status; None until it has ended."""
        return None if self._process is None else self._process.poll()

    @property
    def state(self) -> str:
        """The last update that it recorded, with its loss and speed."""
        if self.status == 0:
            return "done"
        if (last := last_statistics(self.folder, self._earlier)) is None:
            return "starting"
        loss, speed = (last["values"].get(name, float("nan")) for name in ("loss", "wps"))
        return f"update {last['update']}/{self.updates} loss {loss:.2f} {speed:,.0f} tokens/s"

    def check(self) -> None:
        """Raise TrainingFailed if it has failed."""
        if self.status:
            lines = [*_tail(self.folder / "train.log", 12), *_tail(self.messages, 8)]
            raise TrainingFailed("\n".join([*lines, f"training failed with status {self.status}: see {self.messages}"]))

    def new_messages(self) -> str:
        """What it has written to its messages since the last call."""
        with self.messages.open("rb") as file:
            file.seek(self._shown)
            new = file.read()
        self._shown += len(new)
        return new.decode(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to it and to everything that it started, if any of them still runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def end(self) -> None:
        """Wait for a training that was told to end; whatever remains after twenty seconds is killed."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TO_END)
            self.signal(signal.SIGKILL)
            self._process.wait()


def _tail(path: Path, lines: int) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [line[:300] for line in text.splitlines()[-lines:]]


def run_together(
    children: Sequence[Child], environment: Mapping[str, str], *, lock: int | None = None, interval: float = 15
) -> None:
    """Run trainings at the same time until all have ended; any failure or exception, such as Ctrl-C, ends all of them.

    Shows their states every `interval` seconds, on a terminal every second, and the messages of a single one.
    """
    begin = shown = time.monotonic()
    interval = 1 if sys.stderr.isatty() else interval
    try:
        for child in children:
            child.start(environment, lock)
        running = True
        while running:
            running = any(child.status is None for child in children)
            if len(children) == 1:
                sys.stderr.write(children[0].new_messages())
            for child in children:
                child.check()
            if time.monotonic() - shown >= interval or not running:
                shown = time.monotonic()
                _show(children, shown - begin, last=not running)
            time.sleep(0.1 if running else 0)
    except BaseException:
        for child in children:
            child.signal(signal.SIGTERM)
        for child in children:
            child.end()
        raise


def _show(children: Sequence[Child], seconds: float, last: bool) -> None:
    minutes = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
    line = f"  {minutes}  " + "  |  ".join(f"{child.name}: {child.state}" for child in children)
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r{line[:width]:<{width}}" + ("\n" if last else ""))
    else:
        sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main() -> int:
    """Train; a wrong configuration is an error in one line."""
    from lightconv_plugin.recipes.training.run import train
    from lightconv_plugin.recipes.training.worker import say

    try:
        return train(sys.argv[1], sys.argv[2:])
    except InputError as error:
        say(f"error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
