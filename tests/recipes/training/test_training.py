"""train.sh → average.sh → evaluate.sh on a miniature."""

import fcntl
import json
import re

import pytest

from lightconv_plugin.records.fairseq_log import records_of_log
from lightconv_plugin.records.file import read_folder
from lightconv_plugin.records.trainings import is_finished, last_start, trainings
from tests.recipes.conftest import ROOT

TINY = (
    "model.encoder_embed_dim=16",
    "model.decoder_embed_dim=16",
    "model.encoder_ffn_embed_dim=16",
    "model.decoder_ffn_embed_dim=16",
    "model.encoder_layers=3",
    "dataset.max_tokens=750",
    "common.log_interval=2",
    "checkpoint.no_epoch_checkpoints=false",
)


@pytest.fixture(scope="module")
def trained(prepared, run_script, tmp_path_factory):
    """One epoch, then the same command with two: (save_dir, the first run, the second run)."""
    folder = tmp_path_factory.mktemp("a training")
    save_dir = folder / "it's here"
    arguments = (
        *(ROOT / "configs/demo/dynamicconv.yaml", f"task.data={prepared[1] / 'data-bin'}"),
        *(f"checkpoint.save_dir={save_dir}", *TINY),
    )
    runs = []
    for epochs in (1, 2):
        runs.append(run_script("train.sh", *arguments, f"optimization.max_epoch={epochs}", cwd=folder))
    return save_dir, *runs


def test_training_writes_to_its_save_dir_only(trained):
    save_dir, first, _ = trained
    assert [path.name for path in save_dir.parent.iterdir()] == ["it's here"]
    assert {"checkpoint1.pt", "checkpoint_last.pt", "train.log", "hydra"} <= {path.name for path in save_dir.iterdir()}
    log = (save_dir / "train.log").read_text()
    assert f"checkpoints and log: {save_dir} (1 × 1 threads)" in first.stderr.splitlines()
    assert log.startswith(first.stdout)
    assert re.search(r"\[lightconv_plugin\]\[DEBUG\] - operators on cpu tensors: backend \w+", log)


def test_its_records_tell_what_its_log_tells(trained):
    """Both starts in one file, each with its end; of the values, the log of an earlier version would give the same."""
    save_dir = trained[0]
    found = read_folder(save_dir)
    assert found.file == "records.jsonl" and found.broken == 0
    kinds = [record["record"] for record in found.records if record["record"] in ("start", "end")]
    assert kinds == ["start", "end", "start", "end"] and is_finished(found.records)
    start, (training,) = last_start(found.records), trainings(found.records)
    assert start["update"] > 0 and [stretch.start for stretch in training.stretches] == [0, start["update"]]
    assert start["settings"]["optimization"]["update_freq"] == [2]
    log, broken = records_of_log((save_dir / "train.log").read_text())
    assert broken == 0
    (logged,) = trainings(log)
    assert [stretch.records for stretch in training.stretches] == [stretch.records for stretch in logged.stretches]
    assert (training.parameters, training.sentences) == (logged.parameters, logged.sentences)
    facts = ("parameters", "dictionaries", "texts", "processes")
    assert {name: start[name] for name in facts} == {name: last_start(log)[name] for name in facts}
    backend = logged.known("backend")
    assert training.devices == [f"1 process on a CPU, 1 thread; operators: {backend} backend"]


def test_the_batch_is_divided_as_said(trained):
    """1500 tokens an update in the configuration, 750 fit: two batches make an update."""
    _, first, _ = trained
    assert "tokens per update: 1 process × 750 × update_freq 2 = 1500" in first.stderr
    assert "max tokens per device = 750" in first.stdout
    assert "'update_freq': [2]" in first.stdout


def test_the_second_run_resumes(trained):
    save_dir, first, second = trained
    assert "No existing checkpoint found" in first.stdout
    assert "Loaded checkpoint" in second.stdout
    assert "begin training epoch 1" in first.stdout and "begin training epoch 1" not in second.stdout
    assert "begin training epoch 2" in second.stdout
    assert (save_dir / "checkpoint2.pt").exists()


def test_average_and_score(trained, prepared, run_script, tmp_path):
    save_dir, data = trained[0], prepared[1] / "data-bin"
    run_script("average.sh", save_dir, "2")
    done = run_script("evaluate.sh", data, save_dir / "average2.pt", "--json", "--max-len-b", "5", cwd=tmp_path)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((save_dir / "average2.test.score").read_text())
    assert (report["n"], report["lang"], report["lowercase"]) == (20, "de", True)
    assert "case:lc" in report["signature"]
    log = (save_dir / "average2.test.gen").read_text()
    assert "beam=5" in log
    # Against the raw references, whose capitals and umlauts the tokenised text has lost or kept
    reference = (prepared[1] / "tok/test.de").read_text().splitlines()
    assert {line.split("\t")[1] for line in log.splitlines() if line.startswith("T-")} == set(reference)
    assert list(tmp_path.iterdir()) == []


def test_a_second_training_in_the_same_place_is_refused(trained, prepared, run_script):
    save_dir = trained[0]
    with (save_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run_script(
            "train.sh",
            *(ROOT / "configs/demo/dynamicconv.yaml", f"task.data={prepared[1] / 'data-bin'}"),
            f"checkpoint.save_dir={save_dir}",
            status=2,
        )
    assert done.stderr.splitlines()[-1] == f"lightconv train: error: another training is writing to {save_dir}"


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        ([], 2, "scripts/average.sh SAVE_DIR"),
        (["/nowhere"], 1, "no folder /nowhere"),
        (["/tmp", "-3"], 1, "N must be a positive number, got: -3"),
        ([ROOT / "configs", "2"], 2, "need 2 checkpoints named checkpoint_EPOCH_UPDATE.pt, found 0"),
    ],
)
def test_wrong_arguments_of_average(run_script, arguments, status, message):
    assert message in run_script("average.sh", *arguments, status=status).stderr
