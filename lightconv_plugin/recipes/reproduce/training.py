"""Training of one seed: runs it, and checks whether it is done, whether an existing one matches, and what it took.

A training is finished if its checkpoint_last.pt has the requested number of updates, or if its log shows that fairseq
stopped it (max_epoch, patience, stop_min_lr). A training started by hand is taken over if the settings stored in its
checkpoint match the configuration and its log shows data of the same size; otherwise it is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightconv_plugin.checkpoints.loading import is_cut_short, safe_torch_load
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.data.data_bin import count_sentences
from lightconv_plugin.recipes.data.text_pool import count_lines
from lightconv_plugin.recipes.demo.results import read_log
from lightconv_plugin.recipes.reproduce.protocol import canonical, flatten, is_machine
from lightconv_plugin.recipes.steps import say
from lightconv_plugin.report.logs import parse_log

NUMBERED = re.compile(r"checkpoint(\d+|_\d+_\d+)\.pt")
START = "[fairseq_cli.train][INFO] - {"  # the line with all settings, once per run
_END = re.compile(r"\[INFO\] - done training in [\d.]+ seconds")
_LOADED = re.compile(r"loaded ([\d,]+) examples from: .*?([^/\n]+)$", re.MULTILINE)
_TYPES = re.compile(r"\[INFO\] - (?:\[(\w+)\] )?dictionary: ([\d,]+) types")
_GPU = re.compile(r"rank +(\d+): capabilities.*name = (.+?) *$", re.MULTILINE)
_THREADS = re.compile(r"^checkpoints and log: .* \((\d+) × (\d+) threads\)$", re.MULTILINE)
_PROGRESS = re.compile(r" loss=([\d.]+).*?wps=([\d.]+).*?num_updates=(\d+)")
SIZE = ("dataset.max_tokens", "optimization.update_freq")


# Training runs in a separate process: torchrun and the processes that it starts.
COMMAND = (sys.executable, "-m", "lightconv_plugin", "train")


class TrainingFailed(RuntimeError):
    """A training failed or ended too early; the message has the end of its output and names the log."""


def identity(path: Path) -> list[int] | None:
    """[size, modification time] of a file that is too large to hash each time; None if it does not exist."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return [about.st_size, about.st_mtime_ns]


def numbered(folder: Path) -> dict[str, list[int] | None]:
    """{name: [size, modification time]} of the numbered checkpoints."""
    return {
        path.name: identity(path) for path in sorted(folder.glob("checkpoint*.pt")) if NUMBERED.fullmatch(path.name)
    }


def last_run(folder: Path) -> str:
    """The part of train.log since fairseq's last start; empty if there is no log."""
    log = folder / "train.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    begin = text.rfind(START)
    return text[max(begin, 0) :]


def head(checkpoint: Path) -> tuple[dict[str, Any], int]:
    """(settings by full key, updates) of a checkpoint of fairseq-hydra-train."""
    state = safe_torch_load(checkpoint)
    history = state.get("optimizer_history") or [{}]
    cfg = {key: vars(value) if hasattr(value, "__dict__") else value for key, value in (state.get("cfg") or {}).items()}
    return flatten(cfg), int(history[-1].get("num_updates", 0))


def progress(folder: Path, settings: Mapping[str, str]) -> tuple[bool, int, dict[str, Any]]:
    """(whether the training is finished, its updates, its settings), read from its last checkpoint."""
    last = folder / "checkpoint_last.pt"
    if not last.is_file() or is_cut_short(last):
        return False, 0, {}
    stored, updates = head(last)
    limit = float(settings.get("optimization.max_update", 0))
    finished = updates >= limit > 0 or _END.search(last_run(folder)) is not None
    return finished, updates, stored


def differences(settings: Mapping[str, str], stored: Mapping[str, Any]) -> list[str]:
    """Settings of a configuration that differ in a checkpoint, one line each; those it does not store are skipped."""
    found = []
    for key, wanted in settings.items():
        if key in stored and key not in SIZE and not is_machine(key) and canonical(stored[key]) != wanted:
            found.append(f"{key} {canonical(stored[key])} instead of {wanted}")
    if all(key in settings and key in stored for key in SIZE):
        processes = int(stored.get("distributed_training.distributed_world_size") or 1)
        frequency = float(canonical(stored[SIZE[1]]).split(",")[0])
        tokens = float(settings[SIZE[0]]) * float(settings[SIZE[1]].split(",")[0])
        used = float(stored[SIZE[0]]) * frequency * processes
        # The tokens are divided over the processes and rounded down.
        if not tokens - frequency * processes < used <= tokens:
            found.append(f"tokens per update {used:.0f} instead of {tokens:.0f}")
    return found


def data_differences(log: str, data: Path) -> list[str]:
    """How the data in a training's log differ from `data`: sizes of dictionaries and numbers of sentences."""
    found = []
    for lang, types in _TYPES.findall(log):
        path = data / (f"dict.{lang}.txt" if lang else "dict.txt")
        # fairseq adds four special symbols to those of the file.
        here = count_lines(path) + 4 if path.is_file() else None
        if here != int(types.replace(",", "")):
            found.append(f"a dictionary of {types} entries instead of {path.name}'s {here}")
    for number, name in _LOADED.findall(log):
        here = count_sentences(data / f"{name}.idx")
        if here is not None and here != int(number.replace(",", "")):
            found.append(f"{name} with {number} sentences instead of {here}")
    return sorted(set(found))


def check_same(folder: Path, settings: Mapping[str, str], seed: int, stored: Mapping[str, Any], data: Path) -> None:
    """Check that a training not started by `reproduce` is the one asked for. InputError lists the differences."""
    found = differences(settings, stored)
    if stored.get("common.seed", seed) != seed:
        found.append(f"common.seed {stored['common.seed']} instead of {seed}")
    found += data_differences(last_run(folder), data)
    if found:
        raise InputError(
            f"{folder} has another training, with {'; '.join(found)}: move it away, or set `runs` to another folder"
        )


def move_aside(folder: Path) -> Path:
    """Rename a folder to the first free name FOLDER.old1, FOLDER.old2 …: a training takes too long to delete."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def wait_for_training(folder: Path) -> None:
    """Wait for a training that writes to this folder: one started by hand, or left over from a killed run."""
    if not (folder / "lock").is_file():
        return
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting: a training is writing to {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)


def validation_curve(folder: Path) -> list[list[float]]:
    """[[update, validation loss in bits per token, without label smoothing], …] from the log of a training."""
    try:
        trainings = parse_log((folder / "train.log").read_text(encoding="utf-8", errors="replace")).trainings
    except OSError:
        return []
    records = trainings[-1].valid("valid") if trainings else []
    values = ((record.update, record.values.get("nll_loss", record.values.get("loss"))) for record in records)
    return [[update, value] for update, value in values if value is not None]


def facts(folder: Path, updates: int, messages: Path) -> dict[str, Any]:
    """Facts about a finished training from its log and its output, such as time and speed; None where unknown."""
    speed = seconds = None
    with contextlib.suppress(OSError, ValueError):
        known = read_log(folder / "train.log")
        speed, seconds = round(known.tokens_per_second, 1), round(known.seconds, 1)
    gpus = [name for _, name in sorted(set(_GPU.findall(last_run(folder))))]
    said = _THREADS.search(messages.read_text(encoding="utf-8", errors="replace")) if messages.is_file() else None
    threads = int(said[1]) * int(said[2]) if said else None
    return {
        "updates": updates,
        "tokens_per_second": speed,
        "train_seconds": seconds,
        "gpus": gpus,
        "threads": threads,
        "curve": validation_curve(folder),
    }


class ProgressLine:
    """Shows a training's progress now and then, from the lines of its log."""

    def __init__(self, name: str, updates: str) -> None:
        self.name, self.updates = name, updates
        self._often = 1 if sys.stderr.isatty() else 60
        self._shown = time.monotonic()

    def __call__(self, line: str) -> None:
        match = _PROGRESS.search(line)
        if match and time.monotonic() - self._shown >= self._often:
            self._shown = time.monotonic()
            loss, speed, done = match.groups()
            say(f"  {self.name}: update {done}/{self.updates}, loss {float(loss):.2f}, {float(speed):,.0f} tokens/s")


def run_training(
    config: Path,
    overrides: Sequence[str],
    *,
    log: Path,
    lock: int,
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
) -> None:
    """Train to the end, in a separate process.

    Its stderr goes to `log` and the terminal, each line of its stdout to `on_line`. It runs in its own session; all of
    that session is ended when this process is told to end. If this process is killed, training continues and holds the
    file descriptor `lock` until it ends.

    Raises:
        TrainingFailed: the exit status is not 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    tail: deque[str] = deque(maxlen=12)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*COMMAND, str(config), *overrides],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(lock,),
            start_new_session=True,
        )
        messages = threading.Thread(target=_copy, args=(process.stderr, file), daemon=True)
        messages.start()
        try:
            for raw in process.stdout or ():
                line = raw.decode(errors="replace")
                tail.append(line.rstrip()[:300])
                on_line(line)
            status = process.wait()
            messages.join()
        except BaseException:
            _end(process, messages)
            raise
    if status != 0:
        said = [*tail, *log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]]
        raise TrainingFailed("\n".join([*said, f"training failed with status {status}: see {log}"]))


def _copy(source: Any, file: Any) -> None:
    """Copy `source` to a file and to the terminal as data arrives."""
    while block := source.read1(1 << 16):
        file.write(block)
        file.flush()
        sys.stderr.write(block.decode(errors="replace"))
        sys.stderr.flush()


def _end(process: subprocess.Popen, messages: threading.Thread) -> None:
    """Terminate a command and everything it started; whatever remains after twenty seconds is killed."""
    assert process.stdout is not None  # a pipe
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    threading.Thread(target=process.stdout.read, daemon=True).start()  # so that no writer blocks on a full pipe
    messages.join(20)  # the thread ends with the last process that holds the pipe
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
