"""The memory of a reproduction: which steps are done and of what, a lock, and a way to run a step whole.

`save_dir`/reproduce.json holds for each step what it depended on and what came out. It is replaced whole at the end of
a step, so wherever a run is ended, the next one begins with the step that was not done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightconv_plugin.recipes.steps import digest, say, write_text

VERSION = 1


class StepFailed(RuntimeError):
    """A step ended with an error; the text has the end of its messages and names the log."""


class StateError(ValueError):
    """The state on disk cannot be used."""


def identity(path: Path) -> list[int] | None:
    """[size, time of the last change] of a file too large to be read each time; None where there is none."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return [about.st_size, about.st_mtime_ns]


def changes(old: Any, new: Any, name: str = "") -> list[str]:
    """What differs between two JSON values, a line for each place."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = sorted({*old, *new})
        return [line for key in keys for line in changes(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))]
    if old == new:
        return []
    if old is None or new is None:
        return [f"{name} is {'new' if old is None else 'gone'}"]
    # Of a file's checksum or time nobody reads the value.
    return [name if any(_is_opaque(v) for v in (old, new)) else f"{name} {_shown(old)} → {_shown(new)}"]


def _is_opaque(value: Any) -> bool:
    text = str(value)
    return (isinstance(value, str) and len(text) == 64) or (isinstance(value, list) and len(text) > 80)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return str(value)


class State:
    """The steps of one system, in `folder`; the object is a lock on it, held by whatever `run` starts too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / "reproduce.json"
        self._lock = (folder / "reproduce.lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting: another reproduction, or a step that one left running, is working in {folder}")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._known = self._read()

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"version": VERSION, "steps": {}, "files": {}}
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
            if known["version"] == VERSION and isinstance(known["steps"], dict) and isinstance(known["files"], dict):
                return known
        except (ValueError, KeyError, TypeError):
            pass
        raise StateError(
            f"{self.path} is not a state of this version: remove it; finished trainings are recognised without it"
        )

    def _write(self) -> None:
        write_text(self.path, json.dumps(self._known, ensure_ascii=False, indent=1) + "\n")

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> State:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def record(self, step: str, inputs: Mapping[str, Any], result: Any) -> Any:
        """Remember that `step` is done, or begun, with these inputs; returns the result."""
        self._known["steps"][step] = {"inputs": json.loads(json.dumps(inputs)), "result": result}
        self._write()
        return result

    def forget(self, prefix: str) -> None:
        """Forget all steps whose names begin so."""
        steps = self._known["steps"]
        self._known["steps"] = {name: value for name, value in steps.items() if not name.startswith(prefix)}
        self._write()

    def result(self, step: str) -> Any:
        """What came of a step when it was last done, None where it never was."""
        return self._known["steps"].get(step, {}).get("result")

    def is_known(self, step: str) -> bool:
        """Whether a step was begun."""
        return step in self._known["steps"]

    def changed(self, step: str, inputs: Mapping[str, Any]) -> list[str]:
        """How `inputs` differ from those with which a known step was begun or done."""
        return changes(self._known["steps"][step]["inputs"], json.loads(json.dumps(inputs)))

    def digests(self, files: Sequence[Path], root: Path) -> dict[str, str]:
        """{name relative to `root`: SHA-256} of files, read only when their size or time is not the known one."""
        found, new = {}, False
        for path in files:
            about, known = identity(path), self._known["files"].get(str(path))
            if known is None or known[:2] != about:
                known = self._known["files"][str(path)] = [*about, digest(path)]
                new = True
            found[os.path.relpath(path, root)] = known[2]
        if new:
            self._write()
        return found

    def run(
        self,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str],
        on_line: Callable[[str], None] | None = None,
        shown: re.Pattern | None = None,
    ) -> str:
        """Run a command to its end; its messages (standard error) go to `log`, begun anew, and to the terminal.

        shown: begins those lines that go to the terminal (default: all of them).
        Returns its standard output; with `on_line`, each line of it is given there instead. It runs in a session of its
        own, which is ended whole if this process is told to end, and holds the lock if this process is killed.

        Raises:
            StepFailed: the status is not 0.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        output: list[str] = []
        tail: deque[str] = deque(maxlen=12)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [str(part) for part in command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(self._lock.fileno(),),
                start_new_session=True,
            )
            messages = threading.Thread(target=_copy, args=(process.stderr, file, shown), daemon=True)
            messages.start()
            try:
                for raw in process.stdout:
                    line = raw.decode(errors="replace")
                    tail.append(line.rstrip()[:300])
                    (on_line or output.append)(line)
                status = process.wait()
                messages.join()
            except BaseException:
                _end(process, messages)
                raise
        if status != 0:
            said = [*tail, *log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]]
            raise StepFailed("\n".join([*said, f"{log.stem} failed with status {status}: see {log}"]))
        return "".join(output)


def _copy(source: Any, file: Any, shown: re.Pattern | None) -> None:
    """All of `source` to a file, and to the terminal: as it comes, or whole lines that begin with the pattern."""
    rest = ""
    while block := source.read1(1 << 16):
        file.write(block)
        file.flush()
        text = block.decode(errors="replace")
        if shown is not None:
            *lines, rest = re.split(r"(?<=[\r\n])", rest + text)
            text = "".join(line for line in lines if shown.match(line))
        sys.stderr.write(text)
        sys.stderr.flush()


def _end(process: subprocess.Popen, messages: threading.Thread) -> None:
    """End a command and everything it started: politely, and what is still there after twenty seconds not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    threading.Thread(target=process.stdout.read, daemon=True).start()  # nobody shall wait for a reader
    messages.join(20)  # it ends with the last process that could write
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def heed_signals() -> None:
    """SIGTERM, and SIGHUP unless it is ignored (nohup), end this process as Ctrl-C does: with all that it started."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)
