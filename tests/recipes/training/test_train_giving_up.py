"""A wrong configuration or a full disk ends a training at once, with one line, and no part of a checkpoint is left."""

import errno
import os
import shutil
import subprocess
import sys
import time

import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed")

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from hydra.errors import HydraException
from omegaconf.errors import ValidationError

from lightconv_plugin.errors import VariableError
from lightconv_plugin.recipes.training.errors import ConfigError
from lightconv_plugin.recipes.training.launch import why_it_ended
from lightconv_plugin.recipes.training.worker import fairseqs_training, gives_up, may_start, newest_state, train


def save_as_fairseq(path):
    checkpoint_utils.torch_persistent_save({"model": torch.zeros(10_000)}, str(path))


def write_with_a_quota(path):
    try:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    except OSError:
        raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904  (as torch's writer raises it)


def copy_to_another_disk(path):
    raise OSError(errno.ENOSPC, "No space left on device", "a.pt", None, "/mnt/b.pt")


def look_for_a_file(path):
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", "dict.en.txt")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Do some work as a training process does, after an earlier checkpoint; what it said."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # as fairseq does before it tries again
    monkeypatch.setattr(PathManager, "open", lambda path, mode: open("/dev/full", mode))  # noqa: SIM115
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    starts, save_dir = tmp_path / "starts", tmp_path / "run"
    save_dir.mkdir()
    starts.write_text(newest_state(save_dir))
    for name in ("checkpoint_last.pt", "checkpoint2.pt.tmp", "notes.tmp"):
        (save_dir / name).write_text("a part")

    def work(failure):
        with pytest.raises(SystemExit) as ended:
            train(lambda: gives_up(lambda: failure(save_dir / "checkpoint2.pt"), save_dir, starts), 9)
        assert ended.value.code == 1
        return capsys.readouterr().err

    return work, save_dir, starts


@pytest.mark.parametrize(
    "failure, place, why",
    [
        (save_as_fairseq, "{save_dir}", "No space left on device"),
        (write_with_a_quota, "{save_dir}", "Disk quota exceeded"),
        (copy_to_another_disk, "/mnt/b.pt", "No space left on device"),
    ],
)
def test_a_full_disk_ends_the_training(run, failure, place, why):
    work, save_dir, starts = run
    said = f"no space left for {place.format(save_dir=save_dir)} ({why}): free some and rerun the same command to"
    assert f"lightconv train: error: process 0: {said}" in work(failure)
    assert sorted(os.listdir(save_dir)) == ["checkpoint_last.pt", "notes.tmp"]
    assert not may_start(save_dir, starts), "although there is a checkpoint since the last start"
    assert why_it_ended(0, 1, starts, 3) == "a process died (see above); not restarted, since no space was left"


def of_the_configuration(path):
    raise ConfigError("optimizer._name is missing")


def of_a_part_that_hydra_builds(path):
    raise HydraException("Error merging override") from ValidationError("Value 'abc' could not be converted to Float")


def of_its_data(path):
    raise ValueError("Could not infer language pair, please provide it explicitly")


def of_the_environment(path):
    raise VariableError("LIGHTCONV_BACKEND must be one of auto, cpu")


@pytest.mark.parametrize(
    "failure", [of_the_configuration, of_a_part_that_hydra_builds, of_its_data, of_the_environment]
)
def test_so_does_an_error_that_every_start_meets(run, failure):
    work, save_dir, starts = run
    assert "lightconv train: error: process 0: " in work(failure)
    assert (save_dir / "checkpoint2.pt.tmp").exists() and not may_start(save_dir, starts)
    why = "a process died (see above); not restarted, since another start would fail in the same way"
    assert why_it_ended(0, 1, starts, 3) == why


def test_another_error_does_not(run):
    work, save_dir, starts = run
    assert "dict.en.txt" in work(look_for_a_file)
    assert (save_dir / "checkpoint2.pt.tmp").exists() and may_start(save_dir, starts)
    assert "the number of restarts is 3" in why_it_ended(0, 1, starts, 3)


def test_what_fails_before_fairseq_begins_is_one_line_too(tmp_path):
    """Here the patches, which are chosen when the plugin is imported."""
    ranks = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    environment = {name: str(value) for value, names in enumerate(ranks) for name in names}
    starts = tmp_path / "starts"
    command = [sys.executable, "-m", "lightconv_plugin.recipes.training.worker", str(tmp_path), str(starts), "9"]
    done = subprocess.run(
        command,
        env={**os.environ, **environment, "HYDRA_FULL_ERROR": "0", "LIGHTCONV_SKIP_PATCHES": "surprise"},
        capture_output=True,
        text=True,
    )
    said = done.stderr.splitlines()[-1]
    assert said.startswith("lightconv train: error: process 0: LIGHTCONV_SKIP_PATCHES: there is no patch surprise")
    assert done.returncode == 1 and "Traceback" not in done.stderr and not may_start(tmp_path, starts)


def test_so_is_a_last_checkpoint_that_there_is_no_room_to_repair(run, monkeypatch):
    work, save_dir, starts = run
    (save_dir / "checkpoint_last.pt").write_bytes(b"PK cut")
    torch.save({"model": torch.zeros(9)}, save_dir / "checkpoint1.pt")

    def half(source, target):
        target.write_bytes(b"PK")
        raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))

    monkeypatch.setattr(shutil, "copyfile", half)
    said = work(lambda path: fairseqs_training(save_dir, starts, 9, []))
    assert "process 0: no space left for " in said and "checkpoint_last.pt.tmp (No space left on device)" in said
    assert sorted(os.listdir(save_dir)) == ["checkpoint1.pt", "checkpoint_last.pt", "notes.tmp"]
