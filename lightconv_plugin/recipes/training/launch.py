"""Runs torchrun in this process: it starts the training processes (worker.py), and restarts all of them when one dies.

When a process dies, torchrun ends the others, meets the other machines again and restarts everything; fairseq resumes
from the last checkpoint. This module adds the log, torchrun's settings, and one-line errors instead of tracebacks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from lightconv_plugin.files import locked
from lightconv_plugin.processes import module_command
from lightconv_plugin.recipes.training.plan import Plan
from lightconv_plugin.recipes.training.worker import GAVE_UP, log_to, say
from lightconv_plugin.records.file import append

ANSWER = 10  # extra seconds after the timeout, so that the processes can report what they waited for
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # torchrun handles these during training


@dataclass(frozen=True)
class LaunchJob:
    """A training on this machine, number `node_rank` of `nodes`; rendezvous: HOST:PORT, empty for one machine."""

    config: Path
    plan: Plan
    log: Path
    nodes: int
    node_rank: int
    rendezvous: str
    max_restarts: int
    timeout: int


def hydra_config(config: Path, folder: Path) -> Path:
    """The configuration under a name that hydra finds: links in `folder` to a config.yaml and the files next to it.

    hydra looks first in fairseq's own folder, which has a config.yaml.
    """
    if config.stem != "config":
        return config
    linked = folder / "config"
    linked.mkdir()
    for path in config.parent.iterdir():
        (linked / path.name).symlink_to(path)
    name = "config_yaml"  # hydra's messages show it
    while (linked / f"{name}.yaml").is_symlink():
        name += "_"
    (linked / f"{name}.yaml").symlink_to(config)
    return linked / f"{name}.yaml"


def torchrun_arguments(job: LaunchJob, starts: Path) -> list[str]:
    """The command line of torchrun; for `starts`, in a temporary folder, see worker.py."""
    settings = [f"--nproc-per-node={job.plan.processes}", f"--max-restarts={job.max_restarts}"]
    settings.append(f"--log-dir={starts.parent}")  # otherwise torchrun makes a temporary folder, which stays
    host = job.rendezvous.rpartition(":")[0]
    if job.nodes == 1:
        settings.append("--standalone")
    else:
        # read_timeout: seconds that a machine waits for the rendezvous host, machine 0; join_timeout: for the others.
        waits = f"read_timeout={job.timeout},join_timeout={job.timeout}"
        settings += [
            *(f"--nnodes={job.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={job.rendezvous}"),
            *("--rdzv-id=lightconv", f"--rdzv-conf=is_host={int(job.node_rank == 0)},{waits}"),
        ]
    if host in ("", "localhost", "127.0.0.1"):
        settings.append("--local-addr=localhost")  # no other machine needs this machine's name
    worker = ["--no-python", *module_command("lightconv_plugin.recipes.training.worker")]
    worker += [str(job.plan.save_dir), str(starts), str(job.timeout)]
    linked = hydra_config(job.config, starts.parent)
    config = ["--config-dir", str(linked.parent), "--config-name", linked.stem]
    return [*settings, *worker, *config, *job.plan.overrides]


def watch(rendezvous: str, seconds: float, give_up: Callable[[], None], over: threading.Event) -> None:
    """Call give_up() when the rendezvous host has answered once and then does not answer for this many seconds.

    Returns after that, soon after `over` is set, or when the connection to the host fails.

    torchrun itself may wait forever if that machine hangs or silently loses its network: torch's client does time out
    on a request, but then notifies the other side and waits for its answer without a limit. The client used here may
    hang in the same way, hence the second thread. Errors are left to torchrun, which gets them too.
    """
    from torch.distributed import TCPStore

    host, _, port = rendezvous.rpartition(":")
    answered, pause = float("inf"), min(1, seconds / 10)

    def ask() -> None:
        nonlocal answered
        try:
            store = TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timedelta(seconds=seconds))
            while not over.is_set():
                store.check(["lightconv"])  # type: ignore[attr-defined, unused-ignore]  # torch < 2.7 has no stub
                answered = time.monotonic()
                over.wait(pause)
        except Exception:
            over.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    while not over.wait(pause):
        if time.monotonic() - answered > seconds:
            return give_up()
    asking.join(pause)  # Python would abort if it exited while this thread is inside torch


class GaveUpError(Exception):
    """The processes are not to be started again; the message says why."""


def why_given_up(starts: Path) -> str:
    """Why the processes are not to be started again, as one of them has written (worker.py); empty if none has."""
    last = starts.read_text(encoding="utf-8") if starts.exists() else ""
    if not last.startswith(GAVE_UP):
        return ""
    return f"a process died (see above); not restarted, since {last.removeprefix(GAVE_UP)}"


@contextlib.contextmanager
def no_useless_restarts(starts: Path) -> Iterator[None]:
    """Within the block, torchrun ends with GaveUpError where it would start processes again that gave up.

    It has no setting for it, and its restarts take some two seconds each and bury the error in messages of their own.
    """
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    restart = SimpleElasticAgent._restart_workers

    def _restart_workers(agent: SimpleElasticAgent, group: object) -> None:
        if why := why_given_up(starts):
            raise GaveUpError(why)
        restart(agent, group)

    SimpleElasticAgent._restart_workers = _restart_workers  # type: ignore[method-assign]
    try:
        yield
    finally:
        SimpleElasticAgent._restart_workers = restart  # type: ignore[method-assign]


def why_it_ended(rank: int, status: int, starts: Path, max_restarts: int) -> str:
    """Which process ended and how, and why torchrun did not restart."""
    if why := why_given_up(starts):
        return why
    ended = f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
    if status == -signal.SIGKILL:
        ended += " (the kernel does that when memory runs out: see dmesg)"
    return f"process {rank} {ended}; not restarted, the number of restarts is {max_restarts}"


@contextlib.contextmanager
def hangup_as_before() -> Iterator[None]:
    """Within the block, torchrun does not end for a SIGHUP that this process ignores, as under nohup.

    The processes that it starts are in sessions of their own, so the end of a terminal does not reach them.
    """
    from torch.distributed.elastic.multiprocessing import api

    handle = api._terminate_process_handler
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        api._terminate_process_handler = lambda signum, frame: (
            None if signum == signal.SIGHUP else handle(signum, frame)
        )
    try:
        yield
    finally:
        api._terminate_process_handler = handle


def run_torchrun(job: LaunchJob, starts: Path) -> tuple[int, str]:
    """Run torchrun; the exit status and a message about it."""
    # Otherwise restarted processes would read, and connect to, the addresses of processes that have died.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    # Another machine would take the end of torchrun for a lost connection.
    at_once = no_useless_restarts(starts) if job.nodes == 1 else contextlib.nullcontext()
    try:
        with hangup_as_before(), at_once:
            run(parse_args(torchrun_arguments(job, starts)))
    except GaveUpError as error:
        return 1, f"error: {error}"
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return 1, "error: " + why_it_ended(rank, failure.exitcode, starts, job.max_restarts)
    except SignalException as error:
        status, name = 128 + error.sigval, error.sigval.name
        return status, f"ended by {name}; rerun the same command to resume from the last checkpoint"
    except RendezvousError as error:
        return 1, f"error: the {job.nodes} machines could not connect at {job.rendezvous}: {error}"
    except KeyboardInterrupt:
        return 130, "ended by SIGINT before it started"
    return 0, ""


def launch(job: LaunchJob) -> int:
    """Run torchrun until it ends; its exit status. Until then stdout and stderr also go to the log."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    # torchrun handles SIGTERM once the processes run. Before that, it may block in a call that runs no Python handlers.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    streams = os.dup(1), os.dup(2)
    tee = log_to(job.log)
    folder, over = tempfile.TemporaryDirectory(prefix="train."), threading.Event()

    def to_terminal() -> None:
        for stream, before in zip((1, 2), streams, strict=True):
            os.dup2(before, stream)

    def give_up() -> None:
        if over.is_set():
            return
        to_terminal()
        try:
            say(
                f"error: the machine at {job.rendezvous} has not responded for {job.timeout + ANSWER} s: it hangs or "
                "cannot be reached; rerun the same command to resume from the last checkpoint"
            )
        finally:  # also if nobody reads it
            folder.cleanup()
            os._exit(1)  # the main thread may hang; the training processes die with this one

    if job.node_rank > 0:
        arguments = job.rendezvous, job.timeout + ANSWER, give_up, over
        watching = threading.Thread(target=watch, args=arguments, daemon=True)
        watching.start()
    try:
        # systemd-tmpfiles removes what nobody has read for ten days, but not from a folder that is locked.
        with folder, locked(Path(folder.name)):
            status, message = run_torchrun(job, Path(folder.name, "starts"))
    finally:
        over.set()
        if job.node_rank > 0:
            watching.join(2)
        sys.stdout.flush()
        to_terminal()
        copied = tee.wait()
        for stream in streams:
            os.close(stream)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if message and job.node_rank == 0:
        with contextlib.suppress(OSError):  # it is said below
            append(job.plan.save_dir, {"record": "end", "error": message})
    if copied != 0:
        with contextlib.suppress(OSError):  # the terminal may be gone
            say(f"warning: standard output or the log {job.log} lacks lines, see above: tee ended with status {copied}")
    if message:
        say(message)
    return status
