"""Kills work at random moments, starts it again, and compares what it leaves with an undisturbed run.

`scripts/dev/torture.sh` is the command; `kill_targets.py` has what can be killed. A trial starts in a fresh copy of the
same world, in the same place: it is killed one to three times (SIGKILL), then the same command runs to its end. Three
in four kills hit everything that was started, as at the end of a machine; the fourth hits the command alone, whose
children live on.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

MARK = "LIGHTCONV_TORTURE"  # in the environment of all that a trial starts, by which it is found again
LIMIT = 300  # seconds after which a run is taken to hang


class Process(Protocol):
    """What a work starts: a Popen, or a `Fork`."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class Fork:
    """A function in a child of this process, in a session of its own: for work that is shorter than its imports."""

    def __init__(self, function, *arguments, log: Path, token: str) -> None:
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                os.environ[MARK] = token  # of what it starts
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                for stream in (1, 2):
                    os.dup2(descriptor, stream)
                sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
                if "torch" in sys.modules:
                    # OpenMP's threads are not forked, and work for them would wait for ever.
                    sys.modules["torch"].set_num_threads(1)
                if "tqdm" in sys.modules:
                    # All forks share tqdm's lock: one that is killed while it writes would hold it for ever.
                    sys.modules["tqdm"].tqdm.set_lock(threading.RLock())
                status = function(*arguments) or 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(status)

    def _reap(self, options: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        return self._reap(0)


class Work(ABC):
    """Something that can be killed. `name` is what the command line calls it, `title` what the table does."""

    name = title = ""
    any_name = True  # whether it is to work in folders of any name
    refusal = ""  # with which a start may end while another one is at work, instead of waiting for it

    @abstractmethod
    def build(self, world: Path) -> None:
        """Make the folder from which every trial starts."""

    @abstractmethod
    def start(self, place: Path, log: Path, token: str) -> Process:
        """Begin, or go on, in a copy of that folder; both output streams go to `log`."""

    @abstractmethod
    def outcome(self, place: Path) -> dict[str, str]:
        """What a finished run leaves: every name, and a digest of what has to be equal bit for bit."""

    def progress(self, place: Path) -> int:
        """A number that grows when the work proper of a start begins, after its imports; always 0: not told."""
        return 0


@dataclass
class Result:
    """What came of the trials of one work. `differences`: a line for each name that was not as it should be."""

    title: str
    seconds: float
    kills: int = 0
    alone: int = 0
    trials: int = 0
    refused: int = 0
    failed: int = 0
    differences: list[str] = field(default_factory=list)


def living(process: Process, token: str) -> Iterator[int]:
    """The processes of a start: those of its session, and those whose environment has its mark."""
    marked = f"{MARK}={token}\0".encode()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            session = int(Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2].split()[3])
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2].split()[0]
            found = session == process.pid or marked in Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:  # it has ended, or is of another user
            continue
        if found and state != "Z" and int(entry) != os.getpid():
            yield int(entry)


def kill_everything(process: Process, token: str) -> None:
    """Kill until nothing of a start is left."""
    while found := [*living(process, token)]:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.poll()
        time.sleep(0.002)
    process.wait()


def wait_for_the_rest(process: Process, token: str) -> None:
    """Until what a killed command had started has ended by itself; what does not is killed."""
    deadline = time.monotonic() + LIMIT
    while [*living(process, token)] and time.monotonic() < deadline:
        time.sleep(0.02)
    kill_everything(process, token)


class Torture:
    """Trials of one work in a folder of one's own."""

    def __init__(self, work: Work, folder: Path, seed: int = 1) -> None:
        self.work, self.draw = work, random.Random(f"{seed} {work.name}")
        self.world, self.place, self.log = folder / "world", folder / "place", folder / "log"
        self.token = f"{os.getpid()}.{work.name}.{time.monotonic_ns()}"
        self.process: Process | None = None  # what was started last
        self.world.mkdir(parents=True)
        work.build(self.world)

    def start(self) -> Process:
        self.process = self.work.start(self.place, self.log, self.token)
        return self.process

    def end(self) -> None:
        """Kill whatever is still at work."""
        if self.process is not None:
            kill_everything(self.process, self.token)

    def fresh(self) -> None:
        """A new copy of the world, with the times of its files."""
        if self.place.exists():
            shutil.rmtree(self.place)
        shutil.copytree(self.world, self.place, symlinks=True)

    def finish(self, refused: int = 0) -> int:
        """Run to the end; how often the command refused before it did, because another one was at work.

        Raises:
            RuntimeError: it fails, or hangs.
        """
        process = self.start()
        deadline = time.monotonic() + LIMIT
        while (status := process.poll()) is None:
            if time.monotonic() > deadline:
                kill_everything(process, self.token)
                raise RuntimeError(f"{self.work.name} hangs: {self.said()}")
            time.sleep(0.002)
        if status == 0:
            return refused
        said = self.said()
        if self.work.refusal and self.work.refusal in said and refused < 10:
            time.sleep(1)
            return self.finish(refused + 1)
        raise RuntimeError(f"{self.work.name} ends with status {status}: {said}")

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def undisturbed(self) -> tuple[dict[str, str], float, float]:
        """(what it leaves, its seconds, those of them in which its work proper is done)."""
        self.fresh()
        begin = busy = time.monotonic()
        before = self.work.progress(self.place)
        process = self.start()
        while process.poll() is None:
            if busy == begin and self.work.progress(self.place) > before:
                busy = time.monotonic()
            time.sleep(0.002)
        end = time.monotonic()
        if process.wait() != 0:
            raise RuntimeError(f"{self.work.name} fails undisturbed: {self.said()}")
        return self.work.outcome(self.place), end - begin, end - busy

    def kill_once(self, seconds: float, busy: float) -> tuple[bool, bool]:
        """(whether it was still running and was killed, whether its children were spared)."""
        before = self.work.progress(self.place)
        process = self.start()
        begin = time.monotonic()
        moment = self.draw.uniform(0, seconds)
        # Four of five kills hit the work itself and not the imports before it, where the work can tell.
        waits, alone = self.draw.random() < 0.8, self.draw.random() < 0.25
        if waits and busy < seconds:
            while self.work.progress(self.place) <= before and process.poll() is None and time.monotonic() - begin < 60:
                time.sleep(0.001)
            begin, moment = time.monotonic(), moment / seconds * busy
        while process.poll() is None and time.monotonic() - begin < moment:
            time.sleep(0.001)
        killed = process.poll() is None
        if alone and killed:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        else:
            kill_everything(process, self.token)
        return killed, killed and alone

    def run(self, kills: int, minutes: float = 60) -> Result:
        """Trials until so many kills have hit, or so many minutes are over."""
        deadline = time.monotonic() + 60 * minutes
        wanted, seconds, busy = self.undisturbed()
        result = Result(self.work.title, seconds)
        again, *_ = self.undisturbed()
        if again != wanted:
            names = sorted(name for name in wanted.keys() | again.keys() if wanted.get(name) != again.get(name))
            raise RuntimeError(f"two undisturbed runs of {self.work.name} differ in {', '.join(names)}")
        while result.kills < kills and time.monotonic() < deadline:
            self.fresh()
            result.trials += 1
            for _ in range(self.draw.choice((1, 2, 3))):
                killed, alone = self.kill_once(seconds, busy)
                result.kills += killed
                result.alone += alone
                if result.kills >= kills:
                    break
            self.compare(wanted, result)
        return result

    def run_in_odd_places(self, names: dict[str, str]) -> Result:
        """Undisturbed in folders of such names, which must change nothing of what comes out."""
        wanted, seconds, _ = self.undisturbed()
        result = Result(self.work.title, seconds)
        for kind, name in names.items():
            self.place = self.world.parent / "odd" / name
            self.fresh()
            result.trials += 1
            self.compare(wanted, result, f"in a folder named with {kind}")
            beside = {path.name for path in (self.world.parent / "odd").iterdir()} - {name}
            result.differences += [f"{self.work.name}, {kind}: {path} appeared" for path in sorted(beside)]
            shutil.rmtree(self.world.parent / "odd")
        return result

    def run_on_full_disks(self, parts: Sequence[float] = (0.2, 0.5, 0.8, 0.95)) -> Result:
        """On file systems with room for such parts of what it writes: it fails, is given room, and goes on.

        Raises:
            RuntimeError: this user may not mount file systems.
        """
        wanted, seconds, _ = self.undisturbed()
        result = Result(self.work.title, seconds)
        before, after = (pages(folder) for folder in (self.world, self.place))
        for part in parts:
            with small_disk(self.world.parent / "disk", before + part * (after - before)) as (disk, enlarge):
                self.place = disk / "place"
                self.fresh()
                result.trials += 1
                try:
                    self.finish()
                except RuntimeError as error:
                    result.failed += 1
                    if "space" not in str(error):
                        result.differences.append(f"{self.work.name}, {part} of the room, does not say so: {error}")
                enlarge(4 * after + 1000)
                self.compare(wanted, result, f"with room for {part}")
        return result

    def compare(self, wanted: dict[str, str], result: Result, what: str = "") -> None:
        """Let the trial come to its end; what differs from `wanted` is written down."""
        number = f"{self.work.name}, {what or f'trial {result.trials}'}"
        try:
            result.refused += self.finish()
        except RuntimeError as error:
            result.differences.append(f"{number}: {error}")
            return
        found = self.work.outcome(self.place)
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                how = "is missing" if name not in found else "is left over" if name not in wanted else "differs"
                result.differences.append(f"{number}: {name} {how}")


def pages(folder: Path) -> int:
    """Pages of 4 KiB that a folder's files and folders take in memory."""
    return sum(max(1, -(-path.lstat().st_size // 4096)) for path in folder.rglob("*")) + 1


@contextlib.contextmanager
def small_disk(place: Path, room: float) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """A file system of so many pages, and what enlarges it. RuntimeError where this user may not mount one."""

    def mount(*options: str) -> None:
        done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"a small file system is needed, and cannot be mounted: {done.stderr.strip()}")

    place.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={int(room) * 4}k,nr_inodes=100000", "tmpfs")
    try:
        yield place, lambda larger: mount("-o", f"remount,size={larger * 4}k")
    finally:
        subprocess.run(["umount", str(place)], check=True)


ODD_NAMES = {
    "spaces": " a  b ",
    "quotes": 'it\'s "so" `touch executed`',
    "shell": "$(touch executed);touch executed & * ? [a] {b,c} ~ !",
    "a newline": "a\nb",
    "a dash": "-rf",
    "hydra": "a=b,c:d %e #f @h",
    "Unicode": "ünï 👩‍👩‍👧 \u202eשלום",
    "a backslash": "a\\b\\'c\\",
}


def popen(command: list[str], log: Path, token: str, environment: dict[str, str], cwd: Path) -> subprocess.Popen:
    """A command in a session of its own, with the mark of a trial."""
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment, MARK: token},
            cwd=cwd,
            start_new_session=True,
        )


def table(results: list[Result]) -> str:
    """What was killed, how often, and what was lost, in Markdown."""
    rows = [
        "| what | one run, s | kills | of the command alone | disks full | completed runs | refused meanwhile | lost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        lost = str(len(one.differences)) if one.differences else "nothing"
        rows.append(
            f"| {one.title} | {one.seconds:.1f} | {one.kills} | {one.alone} | {one.failed} | {one.trials} | "
            f"{one.refused} | {lost} |"
        )
    return "\n".join(rows)
