"""A tiny training by scripts/train.sh in a process of its own, to be watched, signalled and compared.

Every training takes the same 40 updates of some 80 tokens.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml

from lightconv_plugin.checkpoints.loading import safe_torch_load
from tests.fairseq_cli import binarise
from tests.recipes.conftest import ROOT, heed_ctrl_c, script_environment

UPDATES = 40  # not the end of an epoch, where no checkpoint of the update is written
CONFIG = {
    "model": {
        "_name": "dynamicconv",
        "dropout": 0.2,
        "weight_dropout": 0.1,
        "attention_dropout": 0.0,
        "input_dropout": 0.0,
        **{f"{side}_{key}_dim": 16 for side in ("encoder", "decoder") for key in ("embed", "ffn_embed")},
        **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
        **{f"{side}_kernel_size_list": [3] for side in ("encoder", "decoder")},
    },
    "task": {"_name": "translation", "source_lang": "de", "target_lang": "en"},
    "criterion": {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1},
    # An epoch is of 11 batches, the last of which is alone in its update.
    "dataset": {"max_tokens": 40, "required_batch_size_multiple": 1, "num_workers": 1},
    # An epsilon of this size keeps Adam from making whole steps of gradients that are 0 but for rounding.
    "optimizer": {"_name": "adam", "adam_betas": "(0.9,0.98)", "adam_eps": 1e-3},
    "lr_scheduler": {"_name": "inverse_sqrt", "warmup_updates": 4},
    "optimization": {"lr": [0.01], "update_freq": [2], "max_update": UPDATES},
    "checkpoint": {"save_interval_updates": 4, "no_epoch_checkpoints": True, "save_interval": 1000},
    "common": {"seed": 1, "cpu": True, "log_format": "simple", "log_interval": 1},
}
ENDLESS = "optimization.max_update=1000000"
NO_DROPOUT = ("model.dropout=0", "model.weight_dropout=0")


def write_config(folder):
    """The configuration's file, with the data beside it; trainings go to folders beside it too."""
    data = binarise(folder)
    path = folder / "tiny.yaml"
    text = yaml.safe_dump({**CONFIG, "task": {**CONFIG["task"], "data": str(data)}})
    path.write_text(f"# @package _global_\n{text}", encoding="utf-8")
    return path


class Training:
    """scripts/train.sh, or a script that calls it, while it runs."""

    def __init__(
        self,
        config,
        name,
        *arguments,
        script=ROOT / "scripts/train.sh",
        printed="",
        python=sys.executable,
        **environment,
    ):
        self.save_dir = config.parent / name
        self.printed = config.parent / (printed or f"{name}.out")
        self.process = subprocess.Popen(
            [str(script), str(config), f"checkpoint.save_dir={self.save_dir}", *arguments],
            env=script_environment(python, **environment),
            stdout=self.printed.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )

    def checkpoint(self, update):
        """The checkpoint of an update, when it is there, whole, and has been copied to checkpoint_last.pt."""
        end, last = time.monotonic() + 200, self.save_dir / "checkpoint_last.pt"
        while not (
            (found := list(self.save_dir.glob(f"checkpoint_[0-9]*_{update}.pt")))
            and last.exists()
            and last.stat().st_mtime_ns >= found[0].stat().st_mtime_ns
        ):
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"no checkpoint of update {update}:\n{self.end(seconds=0)[-5000:]}")
            time.sleep(0.02)
        return found[0]

    def workers(self):
        """{rank: process number} of those that train, without the ones that load data for them."""
        found = {}
        for pid, arguments in commands(self.save_dir):
            if "training.worker" in arguments and os.getsid(pid) == pid:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found[int(next(item for item in environment if item.startswith(b"RANK="))[5:])] = pid
        return found

    def end(self, seconds=200):
        """What it printed, when it has ended by itself, or after so many seconds has been ended."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:  # it hangs where Python's signal handlers are not run
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        return self.output

    @property
    def output(self):
        return self.printed.read_text(encoding="utf-8")

    def wait_for(self, said, seconds):
        """Until it has printed `said`."""
        end = time.monotonic() + seconds
        while said not in self.output:
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"not said: {said}\n{self.end(seconds=0)[-5000:]}")
            time.sleep(0.05)

    def signalled(self, number):
        """Exit status after a signal to it and to all that a terminal would send it to."""
        os.killpg(self.process.pid, number)
        self.end()
        return self.process.returncode


def commands(save_dir):
    """(process number, command line) of every process that has to do with a training."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{save_dir}" in arguments and int(entry.name) != os.getpid():
            yield int(entry.name), arguments


def assert_nothing_left(save_dir, seconds=0):
    """No process of the training runs on, and its folder is free for the next."""
    end = time.monotonic() + seconds
    while (left := list(commands(save_dir))) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left
    with (save_dir / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def state(checkpoint):
    """All that the next update depends on: parameters, optimiser, schedule, number of updates, place in the data."""
    stored = safe_torch_load(checkpoint)
    history = stored["optimizer_history"][-1]
    assert history["num_updates"] == UPDATES
    place = stored["extra_state"]["train_iterator"]
    return {
        **{key: value for key, value in stored["model"].items() if torch.is_tensor(value)},
        **{
            f"{number} {key}": value
            for number, values in stored["last_optimizer_state"]["state"].items()
            for key, value in values.items()
        },
        "updates": history["num_updates"],
        "schedule": history["lr_scheduler_state"],
        "place": {key: place[key] for key in ("epoch", "iterations_in_epoch", "shuffle")},
    }


def assert_equal(mine, other, **tolerance):
    assert mine.keys() == other.keys()
    for key, value in mine.items():
        if torch.is_tensor(value) and tolerance:
            torch.testing.assert_close(value, other[key], **tolerance, msg=lambda text, key=key: f"{key}: {text}")
        elif torch.is_tensor(value):
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key
