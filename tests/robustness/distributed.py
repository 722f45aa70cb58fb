"""Trainings of two processes, one of which is slowed, killed, frozen or cut off: scripts/dev/torture_distributed.sh.

In each case the training has to end within its time limits, by itself, with status 0 or with a clear error; every
checkpoint that it leaves loads and is finite; and the same command again ends with the state of a training that nothing
has disturbed, bit for bit.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from lightconv_plugin.checkpoints.loading import safe_torch_load
from tests.recipes.training.trainings import (
    NO_DROPOUT,
    Training,
    assert_equal,
    assert_nothing_left,
    commands,
    state,
    write_config,
)
from tests.robustness.machines import Machine, Proxy, free_port, signal_tree

CASES = {}
"""Name -> function of a World and a rank to torment: it returns the trainings that were to end, when they have."""
TIMEOUT = 10
STARTS = 300
"""Seconds that two processes may take for starting and training, on a machine that has other things to do too."""
TORCHRUN = 30
"""Seconds that torchrun waits between SIGTERM and SIGKILL."""


def case(function):
    CASES[function.__name__] = function
    return function


def require(condition, *said):
    """An assertion that python -O keeps."""
    if not condition:
        raise AssertionError(" ".join(map(str, said)))


@dataclass
class World:
    """Where trainings are, and where the next one goes."""

    config: Path
    random: random.Random
    name: str = ""

    def train(self, *arguments):
        """Two processes on one machine."""
        return Training(self.config, self.name, "--processes", "2", *arguments, *NO_DROPOUT)

    def machines(self, *arguments, reached=None):
        """Two machines, a process each; machine 1 reaches the other's port, or the one that `reached` makes of it."""
        port = free_port()
        ports = port, reached(port) if reached else port
        return [Machine(self.config, self.name, rank, ports[rank], *arguments, *NO_DROPOUT) for rank in (0, 1)]

    def wait_for_a_moment(self, training):
        """Until somewhere between two checkpoints in the first half of the training."""
        training.checkpoint(self.random.choice((4, 8, 16, 20)))  # the 12th ends an epoch, and has no file of its own
        time.sleep(self.random.uniform(0, 0.05))

    def undisturbed(self, trainings):
        """The same again, to its end: the training that has the checkpoints."""
        again = self.train() if len(trainings) == 1 else self.machines()
        if isinstance(again, Training):
            again = [again]
        for training in again:
            training.end(STARTS)
            require(training.process.returncode == 0, training.output[-3000:])
        return again[0]


def ended(training, within, *statuses):
    """Wait for its own end, which has to come in time, with one of these statuses, said in one line if it is not 0."""
    training.end(within)
    status = training.process.returncode
    last = training.output.splitlines()[-1] if training.output else "nothing"
    require(status in statuses, f"status {status}, not one of {statuses}:\n{training.output[-3000:]}")
    require(status == 0 or last.startswith("lightconv train: error: "), "the last line is no clear error:", last)


@case
def slowed(world, rank):
    """A process stands still for 5 s, less than --timeout: nothing happens."""
    training = world.train("--timeout", "120", "--max-restarts", "0")
    world.wait_for_a_moment(training)
    pid = training.workers()[rank]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(pid, signal.SIGCONT)
    ended(training, STARTS, 0)
    return [training]


@case
def killed(world, rank):
    """A process is killed: all start again from the last checkpoint."""
    training = world.train("--timeout", "120")
    world.wait_for_a_moment(training)
    os.kill(training.workers()[rank], signal.SIGKILL)
    ended(training, STARTS, 0)
    require("restart 1 of 3, from the last checkpoint" in training.output, "it was not started again")
    return [training]


@case
def frozen(world, rank):
    """A process stands still for good: after --timeout it is killed and all start again from the last checkpoint."""
    training = world.train("--timeout", str(TIMEOUT))
    training.checkpoint(4)
    os.kill(training.workers()[rank], signal.SIGSTOP)
    ended(training, STARTS + TIMEOUT + TORCHRUN, 0)
    said = f"process {1 - rank}: no response from a peer process after {TIMEOUT} s"
    require(said in training.output, training.output[-3000:])
    return [training]


@case
def frozen_no_restarts(world, rank):
    """The same without restarts: an error after --timeout."""
    training = world.train("--timeout", str(TIMEOUT), "--max-restarts", "0")
    training.checkpoint(4)
    os.kill(training.workers()[rank], signal.SIGSTOP)
    ended(training, 2 * TIMEOUT + TORCHRUN, 1)
    return [training]


@case
def machine_slowed(world, rank):
    """All of a machine stands still for 20 s, longer than torchrun's heartbeats allow, less than --timeout."""
    machines = world.machines("--timeout", "120")
    world.wait_for_a_moment(machines[0])
    signal_tree(machines[rank], signal.SIGSTOP)
    time.sleep(20)
    signal_tree(machines[rank], signal.SIGCONT)
    for machine in machines:
        ended(machine, STARTS, 0)
    return machines


@case
def machine_killed(world, rank):
    """A machine is gone for good: the other one ends after --timeout with an error."""
    return _lost_machine(world, rank, signal.SIGKILL)


@case
def machine_frozen(world, rank):
    """A machine cannot be reached any more, and its connections do not say so: the other one ends with an error."""
    return _lost_machine(world, rank, signal.SIGSTOP)


def _lost_machine(world, rank, number):
    machines = world.machines("--timeout", str(TIMEOUT))
    machines[0].checkpoint(4)
    signal_tree(machines[rank], number)
    try:
        # Once for the process that waits, once for each of the agents' two kinds of waiting.
        ended(machines[1 - rank], 4 * TIMEOUT + TORCHRUN + 60, 1)
    finally:
        machines[rank].kill()
    return machines


@case
def connection_cut(world, rank):
    """The connection by which the machines agree is cut for good, that of the gradients is not: both end."""
    proxies = []

    def through_a_proxy(port):
        proxies.append(Proxy(port))
        return proxies[0].port

    machines = world.machines("--timeout", str(TIMEOUT), "optimization.max_update=1000000", reached=through_a_proxy)
    machines[0].checkpoint(4)
    proxies[0].cut()
    for machine in machines:
        ended(machine, 4 * TIMEOUT + TORCHRUN + 60, 1)
    return machines


def check_checkpoints(save_dir):
    """Every checkpoint, also one under a temporary name, is whole and finite. Returns how many there are."""
    found = [path for path in save_dir.iterdir() if path.name.startswith("checkpoint") and path.suffix == ".pt"]
    for path in found:
        for key, value in safe_torch_load(path)["model"].items():
            require(not torch.is_tensor(value) or value.isfinite().all(), f"{path}: {key} is not finite")
    return len(found)


def torment(name, world, expected):
    """One case, its checks, and the same training to its end. Returns what is to be said of it."""
    rank = world.random.randint(0, 1)
    started = time.monotonic()
    trainings = CASES[name](world, rank)
    seconds = time.monotonic() - started
    save_dir = trainings[0].save_dir
    assert_nothing_left(save_dir, seconds=20)
    statuses = " and ".join(str(training.process.returncode) for training in trainings)
    checkpoints = check_checkpoints(save_dir)
    # With more updates asked for than the others, a training has gone on to another state: its files are checked alone.
    if name != "connection_cut":
        assert_equal(state(world.undisturbed(trainings).save_dir / "checkpoint_last.pt"), expected)
    return f"rank {rank}, status {statuses} after {seconds:.0f} s, {checkpoints} checkpoints whole"


def main():
    parser = argparse.ArgumentParser(prog="torture_distributed.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--repeat", type=int, default=1, help="times that each case is tried (default 1)")
    parser.add_argument("--seed", type=int, default=1, help="of ranks and moments (default 1)")
    args = parser.parse_args()
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if args.repeat < 1:
        parser.error(f"--repeat must be a whole number from 1, got: {args.repeat}")
    failures = 0
    with tempfile.TemporaryDirectory(prefix="torture_distributed.") as folder:
        world = World(write_config(Path(folder)), random.Random(args.seed), "undisturbed")
        undisturbed = world.train()
        ended(undisturbed, STARTS, 0)
        expected = state(undisturbed.save_dir / "checkpoint_last.pt")
        for name in args.cases or CASES:
            for number in range(args.repeat):
                world.name = f"{name}{number}"
                try:
                    said = torment(name, world, expected)
                except (AssertionError, OSError) as error:
                    failures += 1
                    said = f"FAILED: {error}"
                finally:
                    for pid, _ in commands(Path(folder, world.name)):
                        os.kill(pid, signal.SIGKILL)
                print(f"{name:20} {said}", flush=True)
    print(f"{failures} failed" if failures else "nothing was lost")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
