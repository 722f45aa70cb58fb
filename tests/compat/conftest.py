"""A corpus, and checkpoints of fairseq's own tiny Transformer on it."""

import sys
from collections import OrderedDict
from types import ModuleType

import numpy as np
import pytest
import torch

from lightconv_plugin.checkpoints.loading import safe_torch_load
from tests.compat.fairseq_runs import BLEU, LANGUAGE_MODEL, NO_GPU, PLUGIN, RECIPE, train
from tests.fairseq_cli import run


@pytest.fixture(scope="package")
def data(toy_data):
    return toy_data


@pytest.fixture(scope="package")
def checkpoint(data, tmp_path_factory):
    """A checkpoint of four updates that holds all a fairseq checkpoint can: a Namespace, and numpy's BLEU counts."""
    folder = tmp_path_factory.mktemp("run")
    train(data, folder, *BLEU, "--max-update", 4)
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="package")
def language_model(data, tmp_path_factory):
    """A checkpoint of a language model of one sentence per sample, after two updates."""
    folder = tmp_path_factory.mktemp("language-model")
    options = [*LANGUAGE_MODEL, *RECIPE, "--max-update", 2, "--save-dir", folder]
    run("train", data.parent / "english", *PLUGIN, *options, **NO_GPU)
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="package")
def old_checkpoint(checkpoint, tmp_path_factory):
    """`checkpoint` as fairseq 0.6 to 0.9 under numpy 1 wrote it: torch's old format, `args`, pickled meters."""
    state = safe_torch_load(checkpoint)
    state["args"] = state.pop("cfg")["model"]
    state["last_optimizer_state"] = None
    meters = ModuleType("fairseq.meters")
    for name in "AverageMeter", "TimeMeter", "StopwatchMeter":
        setattr(meters, name, type(name, (), {"__module__": "fairseq.meters"}))
    train_loss = meters.AverageMeter()
    train_loss.val = train_loss.avg = np.float64(5.0)
    saved = OrderedDict(train_loss=train_loss, wps=meters.TimeMeter(), train_wall=meters.StopwatchMeter())
    state["extra_state"] = {"train_meters": saved, "val_loss": np.float64(5.0), "epoch": 1}
    path = tmp_path_factory.mktemp("old") / "checkpoint_old.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fairseq.meters", meters)
        torch.save(state, path, _use_new_zipfile_serialization=False)
    written = path.read_bytes()
    assert b"fairseq.meters\nAverageMeter" in written
    path.write_bytes(written.replace(b"numpy._core.multiarray\n", b"numpy.core.multiarray\n"))
    return path
