"""A training that is there: finished, gone on with, or another one and left alone; and what it took, for its row."""

import fcntl
import os
import shutil
import threading

import pytest

from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.reproduce import training as reproduce_training
from lightconv_plugin.recipes.reproduce.protocol import settings_of
from lightconv_plugin.recipes.training.batch import Batch
from lightconv_plugin.recipes.training.child import TrainingFailed
from lightconv_plugin.records.file import append
from tests.recipes.reproduce.reproduction_world import edit


def trained_by_hand(world, template="100", log=""):
    folder = world.runs / "seed1"
    folder.mkdir(parents=True)
    for name in ("checkpoint_last.pt", "checkpoint_1_100.pt"):
        shutil.copy(f"{os.environ['TEMPLATES']}/{template}.pt", folder / name)
    (folder / "train.log").write_text(log)
    return folder


def test_a_finished_training_of_the_same_settings_is_taken_over(world, capfd):
    trained_by_hand(world, log="[x][INFO] - [de] dictionary: 5 types\n")
    row = world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare", "tune", "score"]
    assert "taking over the training in" in capfd.readouterr().err
    assert row["runs"][0]["threads"] is None and row["runs"][0]["updates"] == 100
    world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare"]


def test_a_begun_training_of_the_same_settings_goes_on(world):
    trained_by_hand(world, "50")
    world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare", "train", "tune", "score"]


@pytest.mark.parametrize(
    "template, seed, log, message",
    [
        ("other", 1, "", "model.dropout 0.2 instead of 0.3"),
        ("seed1", 2, "", "common.seed 1 instead of 2"),
        (
            "100",
            1,
            "[x][INFO] - [de] dictionary: 4,056 types\n",
            "a dictionary of 4,056 entries instead of dict.de.txt's 5",
        ),
        (
            "100",
            1,
            "[x][INFO] - [en] dictionary: 12 types\n",
            "a dictionary of 12 entries instead of dict.en.txt's None",
        ),
    ],
)
def test_a_training_of_something_else_is_left_alone(world, template, seed, log, message):
    folder = trained_by_hand(world, template, log)
    folder = folder.rename(folder.with_name(f"seed{seed}"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError) as error:
        world.row(seeds=(seed,))
    assert message in str(error.value) and "has another training" in str(error.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert world.calls()[0] == ["prepare"]


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("common.bf16", True, "common.bf16 true instead of false"),
        ("optimization.sentence_avg", True, "optimization.sentence_avg true instead of false"),
        ("checkpoint.finetune_from_model", "x.pt", "checkpoint.finetune_from_model x.pt instead of null"),
        ("criterion.label_smoothing", 0.2, "criterion.label_smoothing 0.2 instead of 0.0"),
        ("model.encoder_layerdrop", 0.2, "model.encoder_layerdrop 0.2 instead of 0.0"),
        ("model.weight_dropout", 0.2, "model.weight_dropout 0.2 instead of null"),
        ("task.truncate_source", True, "task.truncate_source true instead of false"),
        ("task.source_lang", "en", ""),
        ("task.eval_bleu", True, ""),
        ("model.checkpoint_activations", True, ""),
        ("common.log_interval", 7, ""),
        ("optimization.of_another_version", True, ""),
    ],
)
def test_what_a_configuration_leaves_to_fairseq_is_its_default(key, value, message):
    names = {"criterion": "label_smoothed_cross_entropy", "model": "dynamicconv", "task": "translation"}
    settings = settings_of({group: {"_name": name} for group, name in names.items()}, [])
    assert reproduce_training.differences(settings, settings) == []
    assert reproduce_training.differences(settings, {key: value}) == [message] * bool(message)


def test_what_a_configuration_leaves_to_fairseqs_transformer_is_its_default():
    options = {"_name": "transformer", "encoder_embed_dim": 64, "share_all_embeddings": True}
    settings = settings_of({"model": options}, [])
    stored = {"model.decoder_embed_dim": 64, "model.share_decoder_input_output_embed": True}
    assert reproduce_training.differences(settings, stored | {"model.decoder_layers_to_keep": None}) == []
    found = reproduce_training.differences(settings, stored | {"model.encoder_normalize_before": True})
    assert found == ["model.encoder_normalize_before true instead of false"]


@pytest.mark.parametrize("key", ["checkpoint.restore_file", "model.encoder_embed_path"])
def test_a_file_is_the_same_by_its_relative_path(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = settings_of({}, [f"{key}=runs/a.pt"])
    assert reproduce_training.differences(settings, {key: f"{tmp_path}/runs/a.pt"}) == []
    other = f"{tmp_path}/a.pt"
    assert reproduce_training.differences(settings, {key: other}) == [f"{key} {other} instead of runs/a.pt"]


def test_a_known_seed_whose_training_was_replaced_is_left_alone(world):
    world.row(seeds=(1,))
    last, templates = world.runs / "seed1/checkpoint_last.pt", os.environ["TEMPLATES"]
    world.calls()
    shutil.copy(f"{templates}/other.pt", last)
    with pytest.raises(InputError, match=r"has another training, with model\.dropout 0\.2 instead of 0\.3"):
        world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare"]
    shutil.copy(f"{templates}/100.pt", last)
    world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare"], "the same training, copied"


def test_an_interrupted_training_is_its_own_whatever_it_stored(world, monkeypatch):
    """Such as the absolute path of a file that the command has relative."""
    monkeypatch.setenv("UPDATES", "50")
    with pytest.raises(TrainingFailed):
        world.row(seeds=(1,))
    monkeypatch.delenv("UPDATES")
    shutil.copy(f"{os.environ['TEMPLATES']}/other.pt", world.runs / "seed1/checkpoint_last.pt")
    world.row(seeds=(1,))


def test_what_the_division_of_a_batch_loses_is_less_than_a_token_of_each_batch():
    size, processes = ("dataset.max_tokens", "optimization.update_freq"), "distributed_training.distributed_world_size"
    settings = dict(zip(size, ("4096", "1"), strict=True))
    for max_tokens, update_freq, same in ((4096, [1], True), (455, [3], True), (454, [3], False), (1353, [1], False)):
        stored = dict(zip(size, (max_tokens, update_freq), strict=True)) | {processes: 1 if max_tokens > 4000 else 3}
        assert (reproduce_training.differences(settings, stored) == []) == same, max_tokens


@pytest.mark.parametrize("processes", [1, 5, 7])
def test_what_the_division_of_whole_samples_loses_is_less_than_a_sample_of_each_batch(processes):
    config = {
        "dataset": {"max_tokens": 3072},
        "optimization": {"update_freq": [4]},
        "task": {"tokens_per_sample": 512},
    }
    max_tokens, update_freq = Batch.of(config, {}, processes).divided()
    for size, same in ((max_tokens, True), (max_tokens - 512, False), (max_tokens + 512, False)):
        stored = {"dataset.max_tokens": size, "optimization.update_freq": [update_freq]}
        stored["distributed_training.distributed_world_size"] = processes
        assert (reproduce_training.differences(settings_of(config, []), stored) == []) == same


def test_a_batch_in_sentences_is_none_in_tokens():
    settings = {"dataset.max_tokens": "null", "dataset.batch_size": "64.0", "optimization.update_freq": "2.0"}
    stored = {"dataset.max_tokens": None, "dataset.batch_size": 64, "optimization.update_freq": [2]}
    assert reproduce_training.differences(settings, stored) == []
    tokens = stored | {"dataset.max_tokens": 4096}
    assert reproduce_training.differences(settings, tokens) == ["dataset.max_tokens 4096.0 instead of null"]


def test_other_tokens_an_update_are_another_training(world):
    trained_by_hand(world)
    edit(world.config, dataset__max_tokens=5000)
    with pytest.raises(InputError, match="tokens per update 8000 instead of 10000"):
        world.row(seeds=(1,))


def test_a_checkpoint_that_was_cut_short_is_not_a_finished_training(world):
    folder = trained_by_hand(world)
    whole = (folder / "checkpoint_last.pt").read_bytes()
    (folder / "checkpoint_last.pt").write_bytes(whole[: len(whole) // 2])
    world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare", "train", "tune", "score"]


def test_a_training_in_progress_is_waited_for(world, capfd):
    folder = trained_by_hand(world, "50")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish():
            shutil.copy(f"{os.environ['TEMPLATES']}/100.pt", folder / "checkpoint_last.pt")
            fcntl.flock(lock, fcntl.LOCK_UN)

        threading.Timer(0.5, finish).start()
        world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare", "tune", "score"]
    assert "waiting: a training is writing to" in capfd.readouterr().err


@pytest.mark.parametrize("end, finished", [("", False), ("done training in 3.0 seconds\n", True)])
def test_a_training_that_has_only_a_log_is_finished_if_the_log_says_so(world, end, finished):
    trained_by_hand(world, "50", f"[x][fairseq_cli.train][INFO] - {{\n[x][fairseq_cli.train][INFO] - {end}")
    assert reproduce_training.progress(world.runs / "seed1", {"optimization.max_update": "100.0"})[:2] == (finished, 50)


def statistics(part, update, **values):
    return {"record": "statistics", "part": part, "epoch": 1, "update": update, "values": values}


def test_what_a_training_took(tmp_path):
    start = {"record": "start", "update": 0, "processes": 2, "threads": 8, "parameters": 2493440}
    append(tmp_path, start | {"gpus": ["NVIDIA A100"]})
    append(tmp_path, statistics("valid", 60, loss=5.1, nll_loss=3.25))
    append(tmp_path, start | {"update": 60, "gpus": ["NVIDIA H100"] * 2})
    append(tmp_path, statistics("train/epoch", 100, loss=9.1, wps=3000.04, train_wall=50))
    append(tmp_path, statistics("valid", 100, loss=5.1, nll_loss=3.0))
    assert reproduce_training.facts(tmp_path, 100) == {
        "updates": 100,
        "tokens_per_second": 3000.0,
        "train_seconds": 50,
        "gpus": ["NVIDIA H100", "NVIDIA H100"],
        "threads": 16,
        "curve": [[60, 3.25], [100, 3.0]],
    }
    nothing = reproduce_training.facts(tmp_path / "nowhere", 1)
    unknown = {"tokens_per_second": None, "train_seconds": None, "gpus": [], "threads": None, "curve": []}
    assert nothing == {"updates": 1} | unknown


def test_the_curve_of_a_training_that_logs_one_loss_only(tmp_path):
    """Language models have no label smoothing: fairseq prints their loss alone."""
    append(tmp_path, statistics("valid", 500, loss=7.5, ppl=181.02))
    assert reproduce_training.facts(tmp_path, 500)["curve"] == [[500, 7.5]]
