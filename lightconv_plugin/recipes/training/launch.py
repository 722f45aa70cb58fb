"""Runs torchrun for train.sh: starts this machine's processes (train_worker.py), and all of them again when one dies.

torchrun notices a death, ends the other processes, meets the other machines and starts all anew; fairseq goes on from
the last checkpoint. Here: the log, the settings of torchrun, and an end in one line instead of a traceback.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from lightconv_plugin.recipes.training.worker import GAVE_UP, log_to

WORKER = Path(__file__).with_name("worker.py")
ANSWER = 10  # seconds after --timeout that the processes have to say themselves what they waited for


def torchrun_arguments(args: argparse.Namespace, starts: Path) -> list[str]:
    """The command line of torchrun."""
    settings = [f"--nproc-per-node={args.processes}", f"--max-restarts={args.max_restarts}"]
    host = args.rendezvous.rpartition(":")[0]
    if args.nodes == 1:
        settings.append("--standalone")
    else:
        # read_timeout: seconds for which the machines wait for the one that hosts the rendezvous, 0; join_timeout: for
        # one another.
        waits = f"read_timeout={args.timeout},join_timeout={args.timeout}"
        settings += [
            *(f"--nnodes={args.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={args.rendezvous}"),
            *("--rdzv-id=train.sh", f"--rdzv-conf=is_host={int(args.node_rank == 0)},{waits}"),
        ]
    if host in ("", "localhost", "127.0.0.1"):
        settings.append("--local-addr=localhost")  # nobody elsewhere need know the name of this machine
    return [*settings, str(WORKER), str(args.save_dir), str(starts), str(args.timeout), *args.hydra]


def watch(rendezvous: str, seconds: float, give_up: Callable[[], None]) -> None:
    """Call give_up() once the machine that hosts the rendezvous, which did answer, has not for so many seconds.

    torchrun itself may wait for ever where that machine stands still, or its network is gone without a word: torch's
    client gives up on a request in time, says so to the other side, and waits for its answer, without a limit. Calls
    of this thread's own client end up there too, hence a second thread. An error is not the matter here: then torchrun
    has one as well.
    """
    from torch.distributed import TCPStore

    host, _, port = rendezvous.rpartition(":")
    answered, over = float("inf"), False

    def ask() -> None:
        nonlocal answered, over
        try:
            store = TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timedelta(seconds=seconds))
            while True:
                store.check(["train.sh"])
                answered = time.monotonic()
                time.sleep(min(1, seconds / 10))
        except Exception:
            over = True

    threading.Thread(target=ask, daemon=True).start()
    while not over:
        time.sleep(min(1, seconds / 10))
        if time.monotonic() - answered > seconds:
            return give_up()


def why_it_ended(rank: int, status: int, starts: Path, max_restarts: int) -> str:
    """Which process ended how, and why torchrun did not start all of them once more."""
    if starts.exists() and starts.read_text(encoding="utf-8") == GAVE_UP:
        return "a process has died (see above); not started again, as no checkpoint was written since the last start"
    ended = f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
    if status == -signal.SIGKILL:
        ended += " (so does the kernel when memory runs out: dmesg tells)"
    return f"process {rank} {ended}; not started again, as --max-restarts is {max_restarts}"


def launch(args: argparse.Namespace, starts: Path) -> tuple[int, str]:
    """Exit status, and what to say of it."""
    # Else the processes of a restart would find, and call, the addresses of those that have died.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(torchrun_arguments(args, starts)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return 1, "error: " + why_it_ended(rank, failure.exitcode, starts, args.max_restarts)
    except SignalException as error:
        return 128 + error.sigval, f"ended by {error.sigval.name}; the same command goes on from the last checkpoint"
    except RendezvousError as error:
        return 1, f"error: the {args.nodes} machines do not meet at {args.rendezvous}: {error}"
    return 0, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--processes", "--nodes", "--node-rank", "--max-restarts", "--timeout"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--rendezvous", required=True, help="HOST:PORT; empty for one machine")
    parser.add_argument("--save-dir", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("hydra", nargs="*", help="arguments of fairseq-hydra-train")
    args = parser.parse_args()
    streams = os.dup(1), os.dup(2)
    tee = log_to(args.log)
    folder = tempfile.TemporaryDirectory(prefix="train.")

    def give_up() -> None:
        for stream, before in zip((1, 2), streams, strict=True):
            os.dup2(before, stream)
        print(
            f"train.sh: error: the machine at {args.rendezvous} has not answered for {args.timeout + ANSWER} s "
            f"(--timeout {args.timeout}): it hangs, or cannot be reached; when it can, the same command goes on from "
            "the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        folder.cleanup()
        os._exit(1)  # the main thread cannot; processes that train die with this one

    if args.node_rank > 0:
        arguments = args.rendezvous, args.timeout + ANSWER, give_up
        threading.Thread(target=watch, args=arguments, daemon=True).start()
    try:
        with folder:
            status, message = launch(args, Path(folder.name, "starts"))
    except KeyboardInterrupt:
        status, message = 130, "ended by SIGINT before it began"
    finally:
        for stream, before in zip((1, 2), streams, strict=True):
            os.dup2(before, stream)
        tee.wait()
    if message:
        print(f"train.sh: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
