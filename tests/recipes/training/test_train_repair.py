"""The last checkpoint of a training that was killed while it was written."""

import errno
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from lightconv_plugin.recipes.training.plan import repair_last_checkpoint


def test_a_checkpoint_cut_short_is_replaced_by_the_newest_whole_one(tmp_path, capsys):
    for name in ("checkpoint1.pt", "checkpoint2.pt", "checkpoint_last.pt"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("data", name * 50)
    whole = (tmp_path / "checkpoint_last.pt").read_bytes()
    repair_last_checkpoint(tmp_path)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == whole

    (tmp_path / "checkpoint_last.pt").write_bytes(whole[:100])
    repair_last_checkpoint(tmp_path)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == (tmp_path / "checkpoint2.pt").read_bytes()
    assert "was cut short: resuming from checkpoint2.pt" in capsys.readouterr().err

    for path in tmp_path.glob("checkpoint*.pt"):
        path.write_bytes(b"PK cut")
    repair_last_checkpoint(tmp_path)
    assert not (tmp_path / "checkpoint_last.pt").exists()


def test_a_checkpoint_of_torch_before_1_6_is_no_cut_one(tmp_path, capsys):
    """Its format is no archive; a training that began long ago is resumed from it."""

    last = tmp_path / "checkpoint_last.pt"
    torch.save({"model": torch.ones(3)}, last, _use_new_zipfile_serialization=False)
    torch.save({"model": torch.ones(2)}, tmp_path / "checkpoint_best.pt", _use_new_zipfile_serialization=False)
    content = last.read_bytes()
    repair_last_checkpoint(tmp_path)
    assert last.read_bytes() == content
    for cut in (b"", bytes(1000), b"PK cut"):
        last.write_bytes(cut)
        repair_last_checkpoint(tmp_path)
        assert last.read_bytes() == (tmp_path / "checkpoint_best.pt").read_bytes()
        assert "resuming from checkpoint_best.pt" in capsys.readouterr().err


def test_a_repair_that_is_killed_or_finds_no_room_loses_nothing(tmp_path, monkeypatch):
    """Else the training would begin anew, as if there were no checkpoint."""
    with zipfile.ZipFile(tmp_path / "checkpoint1.pt", "w") as archive:
        archive.writestr("data", "one" * 50)
    last = tmp_path / "checkpoint_last.pt"
    last.write_bytes(b"PK cut")

    def half(source, target):
        Path(target).write_bytes(Path(source).read_bytes()[:20])
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(shutil, "copyfile", half)
        repair_last_checkpoint(tmp_path)
    repair_last_checkpoint(tmp_path)
    assert last.read_bytes() == (tmp_path / "checkpoint1.pt").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint1.pt", "checkpoint_last.pt"]


def test_the_checkpoints_between_epochs_are_taken_too(tmp_path):
    """With no_epoch_checkpoints the only others are those of updates (checkpoint_1_100.pt) and the best one."""
    for age, name in enumerate(("checkpoint_3_20.pt", "checkpoint_2_10.pt", "checkpoint_best.pt", "average3.pt")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("data", name * 50)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    os.utime(tmp_path / "average3.pt", (2000, 2000))
    for newest in ("checkpoint_3_20.pt", "checkpoint_2_10.pt", "checkpoint_best.pt"):
        (tmp_path / "checkpoint_last.pt").write_bytes(b"PK cut")
        repair_last_checkpoint(tmp_path)
        assert (tmp_path / "checkpoint_last.pt").read_bytes() == (tmp_path / newest).read_bytes()
        (tmp_path / newest).write_bytes(b"PK cut")
