"""Wider loading of checkpoints is not wider for code. (That it is needed: test_commands.py, test_cpu_training.py.)"""

import argparse
import os

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

import lightconv_plugin.models  # noqa: F401 (the patches)
from lightconv_plugin.checkpoints.loading import safe_torch_load
from lightconv_plugin.checkpoints.opening import read_any_checkpoint
from lightconv_plugin.errors import TranslationError


def test_a_checkpoint_that_runs_a_command_is_refused(tmp_path):
    """safe_checkpoint_loading allows neither a system call nor Python's own eval."""
    from fairseq import checkpoint_utils

    class Payload:
        def __init__(self, function, argument):
            self.call = (function, (argument,))

        def __reduce__(self):
            return self.call

    trace = tmp_path / "ran"
    for payload in (
        Payload(os.system, f"touch '{trace}'"),
        Payload(eval, f"open({str(trace)!r}, 'w')"),
        argparse.Namespace(arch=Payload(os.system, f"touch '{trace}'")),
    ):
        path = tmp_path / "checkpoint.pt"
        torch.save({"args": payload, "model": {}}, path)
        with pytest.raises(Exception, match="Weights only load failed"):
            checkpoint_utils.load_checkpoint_to_cpu(str(path))
        assert not trace.exists()


@pytest.mark.parametrize("old", [False, True], ids=["cfg", "args"])
def test_own_architectures_that_are_not_imported_are_named(old, checkpoint, old_checkpoint, tmp_path):
    """Here one of fairseq's Transformer. Without the patch, the old one is a KeyError."""
    state = safe_torch_load(old_checkpoint if old else checkpoint)
    settings = state["args"] if old else state["cfg"]["model"]
    settings.arch = settings._name = "somebodys_own"
    state["extra_state"].pop("train_meters", None)  # of classes that torch.save takes from the fairseq of today
    torch.save(state, tmp_path / "own.pt")
    with pytest.raises(TranslationError, match=r"own\.pt: its architecture somebodys_own is not registered: the code"):
        read_any_checkpoint(tmp_path / "own.pt")


def test_released_models_of_every_name_come_from_our_cache(monkeypatch):
    """The patch released_models: what from_pretrained(NAME) asks for is got by `lightconv released`."""
    from fairseq import file_utils
    from fairseq.models.lightconv import LightConvModel

    from lightconv_plugin.released import fetch
    from lightconv_plugin.released.models import MODELS

    seen = []
    monkeypatch.setattr(fetch, "get", lambda model: seen.append(model.archive) or "the folder")
    known = {name: about["path"] for name, about in LightConvModel.hub_models().items()}
    assert known == {name: model.archive for name, model in MODELS.items() if model.archive}
    assert {file_utils.load_archive_file(address) for address in known.values()} == {"the folder"}
    assert seen == list(known.values())
    assert file_utils.load_archive_file("/nowhere") is None
