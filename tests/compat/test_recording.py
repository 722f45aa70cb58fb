"""The patch `training_records`: what a training writes to records.jsonl, and that its log stays the same."""

import json

import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed")

from lightconv_plugin.compat.recording import Recorder
from lightconv_plugin.records.fairseq_log import records_of_log
from lightconv_plugin.records.file import FILE, read_folder
from lightconv_plugin.records.trainings import is_finished, last_start, trainings
from tests import fairseq_cli


def train(data, folder, *options, **more):
    options = [*fairseq_cli.SIZE, *fairseq_cli.RECIPE, "--max-update=2", "--save-dir", folder, *options]
    return fairseq_cli.run("train", data, "--user-dir", fairseq_cli.USER_DIR, "--arch=dynamicconv", *options, **more)


def statistics(log):
    """The lines of statistics, without times and speeds."""
    lines = [line[line.index("{") :] for line in log.splitlines() if '{"epoch"' in line]
    timed = ("wps", "ups", "wall")
    return [{k: v for k, v in json.loads(line).items() if not k.endswith(timed)} for line in lines]


def test_fairseq_train_records_what_it_logs_and_its_log_is_the_same(data, tmp_path):
    log = train(data, tmp_path / "recorded")
    found, logged = read_folder(tmp_path / "recorded"), records_of_log(log)[0]
    assert found.file == FILE and is_finished(found.records)
    (training,), (other,) = trainings(found.records), trainings(logged)
    assert training.stretches[0].records == other.stretches[0].records and training.subsets == ["valid"]
    facts = ("parameters", "dictionaries", "texts", "processes")
    start = last_start(found.records)
    assert {name: start[name] for name in facts} == {name: last_start(logged)[name] for name in facts}
    assert start["settings"]["model"]["_name"] == "dynamicconv"
    plain = train(data, tmp_path / "plain", LIGHTCONV_SKIP_PATCHES="training_records")
    assert not (tmp_path / "plain" / FILE).exists()
    assert statistics(plain) == statistics(log) != []


def test_a_training_that_saves_nothing_records_nothing(data, tmp_path):
    train(data, tmp_path / "run", "--no-save")
    assert not (tmp_path / "run" / FILE).exists()


def test_a_failure_is_the_end_of_the_records(data, tmp_path):
    folder = tmp_path / "run"
    train(data, folder, "--best-checkpoint-metric=nothing", fails=True)
    end = read_folder(folder).records[-1]
    assert end["record"] == "end" and end["error"] == "KeyError: 'nothing'"


def test_a_record_that_cannot_be_written_is_logged_and_the_training_continues(tmp_path, caplog):
    recorder = Recorder.__new__(Recorder)
    recorder._folder, recorder._device, recorder._backend = tmp_path / "gone", "cpu", None
    recorder.statistics("valid", 1, 20, {"loss": 9.0, "num_updates": 20})
    assert "the training continues, but a record of it could not be written" in caplog.text
