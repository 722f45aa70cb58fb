"""Trainings in processes of their own, by stand-ins: progress, failures, signals, and what outlives its parent."""

import os
import signal
import time

import pytest

from lightconv_plugin.recipes.training import child
from lightconv_plugin.recipes.training.child import Child, TrainingFailed, run_together
from lightconv_plugin.records.file import append

RECORD = {"record": "statistics", "part": "train/inner", "epoch": 2, "update": 150}
VALUES = {"loss": 2.5, "nll_loss": 1.0, "wps": 2993.4}


@pytest.fixture
def training(tmp_path, monkeypatch):
    """A training by this name that is a piece of bash instead, in whose $1 the overrides begin."""
    monkeypatch.setattr(child, "module_command", lambda name: ["bash", "-c"])

    def make(name, code):
        (tmp_path / name).mkdir()
        return Child(name, code, ["x=1"], tmp_path / name, 300)

    return make


def test_a_child_trains_by_the_same_function_as_the_command(tmp_path):
    wrong = Child("wrong", tmp_path / "nothing.yaml", [], tmp_path / "wrong", 300)
    with pytest.raises(TrainingFailed, match=r"lightconv train: error: there is no configuration .*nothing\.yaml"):
        run_together([wrong], os.environ)
    assert wrong.status == 2


def test_what_lies_in_the_working_directory_is_not_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("lightconv_plugin", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the working directory')")
    wrong = Child("wrong", tmp_path / "nothing.yaml", [], tmp_path / "wrong", 300)
    with pytest.raises(TrainingFailed, match="there is no configuration"):
        run_together([wrong], os.environ)


def test_the_arguments_are_the_folder_and_the_overrides(training, tmp_path):
    run_together([training("one", f'echo "$@" "$0" >"{tmp_path}/arguments"')], os.environ)
    assert (tmp_path / "arguments").read_text() == f"x=1 checkpoint.save_dir={tmp_path}/one\n"


def test_progress_of_two_trainings(training, capfd):
    run_together([training(name, "true") for name in ("one", "two")], os.environ)
    assert capfd.readouterr().err.endswith("one: done  |  two: done\n")


def test_the_state_is_that_of_the_last_record_of_this_run(training):
    one = training("one", "exit 3")
    append(one.folder, RECORD | {"update": 50, "values": VALUES})
    one.start(os.environ)
    assert one.state == "starting"
    append(one.folder, RECORD | {"values": VALUES})
    append(one.folder, RECORD | {"part": "valid", "update": 160, "values": VALUES})
    assert one.state == "update 150/300 loss 2.50 2,993 tokens/s"
    one.end()


def test_the_messages_of_a_single_training_are_shown_and_kept(training, capfd):
    one = training("one", "echo a message >&2; sleep 0.3; echo another >&2")
    run_together([one], os.environ)
    assert capfd.readouterr().err.startswith("a message\nanother\n")
    assert one.messages.read_text() == "a message\nanother\n"


def test_one_failure_ends_the_others_and_shows_its_output(training):
    start = time.monotonic()
    other, bad = training("other", "sleep 600"), training("bad", "echo the reason >&2; sleep 0.5; exit 3")
    (bad.folder / "train.log").write_text("a line\n" * 20 + "the end of the log\n")
    with pytest.raises(TrainingFailed) as error:
        run_together([other, bad], os.environ)
    lines = str(error.value).splitlines()
    assert lines[-3:] == ["the end of the log", "the reason", f"training failed with status 3: see {bad.messages}"]
    assert len(lines) == 14
    assert other.status == -signal.SIGTERM
    assert time.monotonic() - start < 300


def test_what_ignores_the_signal_is_killed(training, monkeypatch):
    monkeypatch.setattr(child, "_TO_END", 0.5)
    stubborn = training("stubborn", "trap '' TERM; echo ready >&2; sleep 600")
    stubborn.start(os.environ)
    while not stubborn.new_messages():
        time.sleep(0.01)
    stubborn.signal(signal.SIGTERM)
    stubborn.end()
    assert stubborn.status == -signal.SIGKILL
