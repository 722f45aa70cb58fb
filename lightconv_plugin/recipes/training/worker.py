"""One training process, started by torchrun (see launch.py).

    lightconv_plugin.recipes.training.worker SAVE_DIR STARTS TIMEOUT [arguments of fairseq-hydra-train …]

STARTS is a file on this machine that records which checkpoint the last start resumed from, or why there is to be no
other. TIMEOUT is how many seconds
a process waits for the others.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.training.errors import (
    check_added,
    check_model,
    check_parts,
    explain,
    full_disk,
    is_certain,
)
from lightconv_plugin.recipes.training.plan import repair_last_checkpoint

GAVE_UP = "gave up: "  # and why
PR_SET_PDEATHSIG = 1  # prctl(2)


def say(message: str) -> None:
    """Print one line for the user, unbuffered."""
    print(f"lightconv train: {message}", file=sys.stderr, flush=True)


def log_to(path: Path) -> subprocess.Popen:
    """Send stdout and stderr, also of processes started later, to stdout and the end of a file. Returns the tee."""
    # In its own session, so that Ctrl-C does not end it before the last line is written. Without restore_signals, it
    # ignores SIGPIPE as Python does: the file goes on when whoever reads stdout, such as `grep -m1`, has left.
    tee = subprocess.Popen(
        ["tee", "-a", str(path)], stdin=subprocess.PIPE, start_new_session=True, restore_signals=False
    )
    assert tee.stdin is not None  # a pipe
    for stream in (1, 2):
        os.dup2(tee.stdin.fileno(), stream)
    tee.stdin.close()
    return tee


def die_with_parent() -> None:
    """End together with torchrun, even if that is killed: otherwise this process would run on without the lock."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def newest_state(save_dir: Path) -> str:
    """A string that changes whenever a checkpoint is written: inode, size and time of the last checkpoint's file."""
    try:
        # Open the file: network file systems refresh a file's attributes on open.
        with (save_dir / "checkpoint_last.pt").open("rb") as file:
            stat = os.fstat(file.fileno())
    except FileNotFoundError:
        return "none"
    return f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"


def may_start(save_dir: Path, starts: Path) -> bool:
    """Whether this is the first start, or a checkpoint was written since the last start."""
    if not starts.exists():
        return True
    last = starts.read_text(encoding="utf-8")
    if last.startswith(GAVE_UP):  # with several machines, torchrun keeps trying until its restarts are used up
        return False
    if last == newest_state(save_dir):
        why = "no checkpoint was written since the last start"
        say(f"{why}: not restarting")
        starts.write_text(GAVE_UP + why, encoding="utf-8")
        return False
    restart, most = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
    say(f"a process died: restart {restart} of {most}, from the last checkpoint")
    return True


def check_same_number() -> None:
    """Check that all machines run equally many processes: plan.py divided the tokens per update on that assumption."""
    world, machines, here = (int(os.environ[f"{of}WORLD_SIZE"]) for of in ("", "GROUP_", "LOCAL_"))
    if world != machines * here:
        say(f"error: {machines} machines have {world} processes, this one {here}: all need the same number")
        raise SystemExit(1)


def limit_waiting(timeout: int) -> None:
    """Make every process group time out when a process does not respond for this many seconds.

    fairseq sets no timeout, and torch's default is half an hour with gloo.
    """
    import torch.distributed as dist

    for name in ("init_process_group", "new_group"):
        setattr(dist, name, partial(getattr(dist, name), timeout=timedelta(seconds=timeout)))


def resume_own(checkpoint: Any) -> Any:
    """What fairseq is to load a checkpoint by, so that a training that has written one resumes from it, and does not
    start again from another restore_file.

    checkpoint: fairseq's CheckpointConfig. It stays as it is, for the checkpoints to tell where the training began. Its
    reset_… options are for the other checkpoint.
    """
    own = Path(checkpoint.save_dir, "checkpoint_last.pt")
    if checkpoint.restore_file == own.name or not own.is_file():
        return checkpoint
    if os.environ.get("RANK", "0") == "0":
        say(f"resuming from {own}, not from checkpoint.restore_file={checkpoint.restore_file}")
    changed = copy.deepcopy(checkpoint)  # a shallow copy of OmegaConf's shares the values
    changed.restore_file = own.name
    for name in ("optimizer", "lr_scheduler", "meters", "dataloader"):
        setattr(changed, f"reset_{name}", False)
    return changed


def resume_own_first() -> None:
    """Apply `resume_own` when fairseq loads a checkpoint: by then, process 0 has repaired the last one."""
    from fairseq import checkpoint_utils

    original = checkpoint_utils.load_checkpoint

    def load_checkpoint(cfg: Any, *args: Any, **kwargs: Any) -> Any:
        return original(resume_own(cfg), *args, **kwargs)

    checkpoint_utils.load_checkpoint = load_checkpoint


def check_before_work() -> None:
    """Check the options whose errors fairseq shows late and as a traceback, before it sets up its process group."""
    from fairseq.distributed import utils
    from fairseq.utils import import_user_module
    from hydra.core.hydra_config import HydraConfig

    original = utils.call_main

    def call_main(cfg: Any, main: Any, **kwargs: Any) -> None:
        import_user_module(cfg.common)  # which may register the parts
        check_parts(cfg)
        check_added(cfg, HydraConfig.get().overrides.task)
        check_model(cfg.model)
        original(cfg, main, **kwargs)

    utils.call_main = call_main


def train(cli_main: Callable[[], None], timeout: int) -> None:
    """Run fairseq's training. Known errors are reported in one line; HYDRA_FULL_ERROR=1 shows the traceback instead."""
    if os.environ.get("HYDRA_FULL_ERROR", "0") != "0":
        return cli_main()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra re-raises exceptions
    try:
        return cli_main()
    except Exception as error:
        if not (why := explain(error, timeout)):
            raise
        say(f"error: process {os.environ['RANK']}: {why}")
        raise SystemExit(1) from None


def gives_up(work: Callable[[], None], save_dir: Path, starts: Path) -> None:
    """Do the work; have no process started again where the configuration is wrong, or where a disk is full.

    With a full disk, it would train up to the same checkpoint, and find no space for it. Unfinished checkpoints are
    removed.

    Raises:
        InputError: a disk is full; it names the file or the folder.
    """
    try:
        work()
    except Exception as error:
        if is_certain(error):
            starts.write_text(f"{GAVE_UP}another start would fail in the same way", encoding="utf-8")
        if (full := full_disk(error)) is None:
            raise
        for unfinished in save_dir.glob("checkpoint*.pt.tmp"):  # fairseq renames it when it is whole
            unfinished.unlink(missing_ok=True)
        starts.write_text(f"{GAVE_UP}no space was left", encoding="utf-8")
        place = full.filename2 or full.filename or save_dir  # the first is where a copy was to go
        raise InputError(
            f"no space left for {place} ({full.strerror}): free some and rerun the same command to resume "
            "from the last checkpoint"
        ) from error


def fairseqs_training(save_dir: Path, starts: Path, timeout: int, arguments: list[str]) -> None:
    """Resume the training in `save_dir`, or begin it, by fairseq-hydra-train with these arguments."""
    first = os.environ["RANK"] == "0"
    if first:
        repair_last_checkpoint(save_dir)
    if os.environ["LOCAL_RANK"] == "0":
        starts.write_text(newest_state(save_dir), encoding="utf-8")
    logging.getLogger("lightconv_plugin").setLevel(logging.DEBUG)  # logs the operators' backend
    import_module("lightconv_plugin")  # before fairseq counts the processes: the patch processes_without_gpu
    # hydra's warnings about how fairseq uses it.
    warnings.filterwarnings("ignore", category=UserWarning, module="fairseq_cli.hydra_train")
    from fairseq_cli import hydra_train

    if int(os.environ["WORLD_SIZE"]) > 1:
        limit_waiting(timeout)
    sys.argv[:] = [hydra_train.__file__, *arguments]
    # torchrun numbers the machines by their names, so the process that writes the log may be on any of them.
    if first and int(os.environ["GROUP_WORLD_SIZE"]) > 1:
        log_to(save_dir / "train.log")
    check_before_work()
    resume_own_first()
    hydra_train.cli_main()


def main() -> None:
    save_dir, starts, timeout = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    if os.environ["LOCAL_RANK"] == "0" and not may_start(save_dir, starts):
        raise SystemExit(1)
    check_same_number()
    work = partial(fairseqs_training, save_dir, starts, timeout, sys.argv[4:])
    train(partial(gives_up, work, save_dir, starts), timeout)


def leave() -> NoReturn:
    """Exit without Python's normal shutdown; all work must be done.

    A daemon thread that is inside torch during shutdown would abort the process ("terminate called without an active
    exception"), and torchrun would report a failed training. fairseq has such a thread: it prefetches batches.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    leave()
