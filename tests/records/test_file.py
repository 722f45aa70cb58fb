"""The file of records: appended line by line, with and without half a line of a killed writer; a folder's records."""

import json
import os

import pytest

from lightconv_plugin.records.file import FILE, append, last_statistics, read_folder, size
from lightconv_plugin.records.trainings import trainings
from tests.records.test_fairseq_log import Writer

START = {"record": "start", "update": 0}


def statistics(update, part="train/inner", **values):
    return {"record": "statistics", "part": part, "epoch": 1, "update": update, "values": values}


def test_records_are_read_as_they_were_written(tmp_path):
    settings = {"task": "ü", "data": os.fsdecode(b"not UTF-8: \xfc")}
    written = [START | {"settings": settings}, statistics(20, loss=9.5), statistics(50, "valid", loss=8.25)]
    for record in written:
        append(tmp_path, record)
    assert read_folder(tmp_path).records == written
    assert [json.loads(line) for line in (tmp_path / FILE).read_text("utf-8").splitlines()] == written


@pytest.mark.parametrize("missing", [1, 2, 30])
def test_half_a_line_of_a_killed_writer_costs_that_line_only(tmp_path, missing):
    for update in (20, 40):
        append(tmp_path, START if update == 20 else statistics(update, loss=9.5))
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-missing])
    append(tmp_path, statistics(60, loss=8.5))
    found = read_folder(tmp_path)
    whole = missing == 1  # the line feed alone is missing
    assert found.broken == (not whole)
    assert [record.update for record in trainings(found.records)[0].train] == ([40, 60] if whole else [60])


@pytest.mark.parametrize("line", ["[]", "1", "{}", '{"record": 1}', "\ufffd"])
def test_what_is_no_record_is_counted(tmp_path, line):
    append(tmp_path, START)
    with (tmp_path / FILE).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    assert read_folder(tmp_path).records == [START] and read_folder(tmp_path).broken == 1


def test_the_last_statistics_within_an_epoch(tmp_path):
    assert last_statistics(tmp_path) is None and size(tmp_path) == 0
    append(tmp_path, START | {"settings": "x" * 100_000})
    assert last_statistics(tmp_path) is None
    append(tmp_path, statistics(20, loss=9))
    append(tmp_path, statistics(30, "valid", loss=8))
    assert last_statistics(tmp_path)["update"] == 20
    assert last_statistics(tmp_path, since=size(tmp_path)) is None


def test_records_come_before_logs_and_train_log_before_others(tmp_path):
    (tmp_path / "a.log").write_text("\n".join(Writer().head().inner(10, 9).lines) + "\n")
    assert read_folder(tmp_path).file == "a.log"
    (tmp_path / "train.log").write_text("\n".join(Writer().head().inner(20, 9).lines) + "\n")
    assert read_folder(tmp_path).file == "train.log"
    append(tmp_path, START)
    assert read_folder(tmp_path).file == "train.log", "records without statistics say nothing"
    append(tmp_path, statistics(30, loss=9))
    assert read_folder(tmp_path).file == FILE


def test_a_training_that_an_earlier_version_began_is_read_from_its_log(tmp_path):
    append(tmp_path, {"record": "start", "update": 40})
    append(tmp_path, statistics(60, loss=9))
    assert read_folder(tmp_path).file == FILE
    (tmp_path / "train.log").write_text("\n".join(Writer().head().inner(40, 9).inner(60, 9).lines) + "\n")
    assert read_folder(tmp_path).file == "train.log"


def test_a_folder_without_any(tmp_path):
    assert read_folder(tmp_path).records == [] and read_folder(tmp_path).searched == ()
    (tmp_path / "train.log").touch()
    assert read_folder(tmp_path).searched == ("train.log",)


def test_each_start_at_zero_is_a_training_and_a_resumed_one_drops_what_was_lost():
    records = [
        START,
        statistics(20, loss=9),
        START | {"parameters": 7, "threads": 1},
        statistics(20, loss=8),
        statistics(40, loss=7),
    ]
    records += [
        {"record": "start", "update": 20, "threads": 2},
        {"record": "operators", "backend": "cpu"},
        statistics(30, loss=6),
    ]
    first, second = trainings(records)
    assert [record.values["loss"] for record in first.train] == [9]
    assert [record.values["loss"] for record in second.train] == [8, 6]
    assert (second.parameters, second.known("threads"), second.known("backend")) == (7, 2, "cpu")
    assert second.updates == 30
