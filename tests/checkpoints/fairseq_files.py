"""Checkpoints in the shape in which fairseq's trainer writes them, and the `average` command on them."""

from collections import OrderedDict
from pathlib import Path

import torch

from lightconv_plugin.cli import main

EPOCHS = ["checkpoint1.pt", "checkpoint2.pt", "checkpoint3.pt", "checkpoint10.pt"]
OTHERS = ["checkpoint_last.pt", "checkpoint_best.pt", "checkpoint.pt", "checkpoint4.pt.tmp", "xcheckpoint9.pt", "notes"]

CFG = {"model": {"_name": "dynamicconv"}, "checkpoint": {"best_checkpoint_metric": "loss"}}


def state(model, updates=1, **extra):
    """A checkpoint in the shape in which fairseq's trainer writes it."""
    return {
        "args": None,
        "cfg": CFG,
        "model": OrderedDict(model),
        "criterion": None,
        "optimizer_history": [{"criterion_name": "C", "optimizer_name": "O", "num_updates": updates}],
        "task_state": {},
        "extra_state": {"epoch": updates, "val_loss": 4.5},
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.ones(1000)}}},
        **extra,
    }


def save(path: Path, model, updates=1, **extra) -> Path:
    torch.save(state(model, updates, **extra), path)
    return path


def make(folder: Path, *names: str) -> None:
    """Checkpoints of these names; each parameter is its position, so that a mean tells which ones were taken."""
    for i, name in enumerate(names):
        save(folder / name, {"w": torch.full((2,), float(10**i))}, updates=i + 1)


def lightconv(*arguments) -> int:
    return main.main(["average", *map(str, arguments)])


def refused(capsys, *arguments) -> str:
    """The one line with which the command refuses."""
    assert lightconv(*arguments) == 2
    err = capsys.readouterr().err
    return next(line for line in err.splitlines() if line.startswith("lightconv average: error: "))
