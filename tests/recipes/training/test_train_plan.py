"""The batch divided over processes, how many they are, paths of data, malloc."""

import os
import re

import numpy as np
import pytest
import torch
import yaml

from lightconv_plugin import allocator
from lightconv_plugin.errors import InputError
from lightconv_plugin.ops import instructions
from lightconv_plugin.paths import find_config
from lightconv_plugin.recipes.training import run
from lightconv_plugin.recipes.training.batch import LANGUAGE_MODELLING, Batch
from lightconv_plugin.recipes.training.overrides import given_values
from lightconv_plugin.recipes.training.plan import (
    Plan,
    count_processes,
    make_plan,
    plan,
    read_config,
)
from tests.recipes.conftest import ROOT


@pytest.mark.parametrize(
    "tokens, max_tokens, processes, expected",
    [
        (4096, 4096, 1, (4096, 1)),
        (4096, 4096, 2, (2048, 1)),
        (8 * 16 * 3584, 3584, 8, (3584, 16)),
        (8 * 16 * 3584, 3584, 1, (3584, 128)),
        (4096, 1024, 1, (1024, 4)),
        (4096, 3000, 1, (2048, 2)),
        (4096, 4096, 3, (1365, 1)),
    ],
    ids=["as-it-is", "two-gpus", "paper", "paper-on-one", "small-memory", "uneven", "rounded"],
)
def test_the_tokens_an_update_stay(tokens, max_tokens, processes, expected):
    each, update_freq = Batch(tokens, max_tokens, processes).divided()
    assert (each, update_freq) == expected
    assert each <= max_tokens
    assert 0 <= tokens - processes * each * update_freq < processes * update_freq


@pytest.mark.parametrize("processes", [1, 3, 5, 8, 10, 24])
@pytest.mark.parametrize("given, most", [({}, 1), ({"dataset.max_tokens": "8192"}, 2)])
def test_a_language_model_takes_whole_samples(processes, given, most, capsys):
    config = read_config(find_config("wikitext103/dynamicconv"))
    batch = Batch.of(config, given, processes)
    share = 24 // processes
    max_tokens, update_freq = batch.divided()
    assert max_tokens % 3072 == 0 and max_tokens <= most * 3072
    assert max_tokens // 3072 * update_freq == share
    batch.overrides()
    short = " instead of 73728: each takes whole samples of 3072"
    assert capsys.readouterr().err.endswith(f"= {processes * share * 3072}{short if 24 % processes else ''}\n")


@pytest.mark.parametrize(
    "processes, given, message",
    [
        (25, {}, "73728 tokens per update cannot be divided over 25 processes: each takes at least a sample of "),
        (
            1,
            {"dataset.max_tokens": "3071"},
            r"dataset\.max_tokens must be at least task\.tokens_per_sample, 3072, got: 3071",
        ),
    ],
)
def test_batches_without_a_whole_sample_are_refused(processes, given, message):
    with pytest.raises(ValueError, match=message):
        Batch.of(read_config(find_config("wikitext103/dynamicconv")), given, processes)


@pytest.mark.parametrize("given, most", [({}, 8), ({"dataset.required_batch_size_multiple": "3"}, 9)])
def test_a_batch_has_a_multiple_of_samples(given, most):
    config = {"task": {"tokens_per_sample": 10}, "dataset": {"max_tokens": 100}, "optimization": {"update_freq": [4]}}
    assert Batch.of(config, given, 1).most == most


@pytest.mark.parametrize("name", LANGUAGE_MODELLING)
def test_a_language_model_without_tokens_per_sample_takes_fairseqs(name):
    tasks = pytest.importorskip("fairseq.tasks", reason="fairseq is not installed")
    default = tasks.TASK_DATACLASS_REGISTRY[name]()
    assert str(default.sample_break_mode) == "none"
    config = {"task": {"_name": name}, "dataset": {"max_tokens": 4096}, "optimization": {"update_freq": [4]}}
    assert Batch.of(config, {}, 8).divided() == (2 * default.tokens_per_sample, 1)
    config["task"]["sample_break_mode"] = "eos"
    assert Batch.of(config, {}, 32).divided() == (512, 1)


def test_validation_batches_hold_the_longest_sentence(config, tmp_path):
    _, overrides = plan(config, [], 4, tmp_path / "root", tmp_path)
    assert overrides[2:] == [
        "dataset.max_tokens_valid=4096",
        "dataset.max_tokens=2048",
        "optimization.update_freq=[1]",
    ]


def test_pairs_that_no_batch_of_a_process_holds_are_counted(config, tmp_path, capsys):
    data_utils = pytest.importorskip("fairseq.data.data_utils", reason="fairseq is not installed")
    from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

    # The fourth pair fits, the last one is longer than a batch of the configuration.
    for lang in ("de", "fr"):  # a direction that is not trained on
        text = tmp_path / f"root/data/train.de-fr.{lang}"
        builder = MMapIndexedDatasetBuilder(f"{text}.bin", dtype=np.int32)
        builder.add_item(torch.ones(3000, dtype=torch.int64))
        builder.finalize(f"{text}.idx")
    config["task"] |= {"source_lang": "en", "target_lang": "de"}
    for lang, lengths in (("de", [3, 2049, 5, 2048, 5000]), ("en", [4096, 4, 5, 2048, 4])):
        text = tmp_path / f"root/data/train.de-en.{lang}"
        builder = MMapIndexedDatasetBuilder(f"{text}.bin", dtype=np.int32)
        for length in lengths:
            builder.add_item(torch.ones(length, dtype=torch.int64))
        builder.finalize(f"{text}.idx")
    texts = [data_utils.load_indexed_dataset(str(text.with_suffix(f".{lang}"))) for lang in ("de", "en")]
    sizes = [text.sizes for text in texts]
    for processes, left_out in ((2, 0), (4, 2)):
        _, overrides = plan(config, [], processes, tmp_path / "root", tmp_path)
        max_tokens = int(given_values(overrides)["dataset.max_tokens"])
        _, ignored = data_utils.filter_paired_dataset_indices_by_size(*sizes, np.arange(5), max_tokens)
        assert len(ignored) == left_out + 1
        said = f"2 of 5 training pairs are left out: a side has more than {max_tokens} tokens, the largest batch of a"
        assert (said in capsys.readouterr().err) == bool(left_out)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "root/data").mkdir(parents=True)
    return {
        "task": {"data": "data"},
        "checkpoint": {"save_dir": "runs/x"},
        "dataset": {"max_tokens": 4096},
        "optimization": {"update_freq": [2]},
    }


def test_paths_of_a_configuration_are_below_the_workspace(config, tmp_path):
    save_dir, overrides = plan(config, [], 1, tmp_path / "root", tmp_path)
    assert save_dir == tmp_path / "root/runs/x"
    assert overrides == [
        f"task.data='{tmp_path}/root/data'",
        f"checkpoint.save_dir='{tmp_path}/root/runs/x'",
        "dataset.max_tokens=4096",
        "optimization.update_freq=[2]",
    ]


def test_paths_of_an_override_are_below_the_working_directory(config, tmp_path):
    (tmp_path / "my data").mkdir()
    given = ["task.data=my data", "checkpoint.save_dir='out'", "common.seed=3"]
    save_dir, overrides = plan(config, given, 1, tmp_path / "root", tmp_path)
    assert save_dir == tmp_path / "out"
    assert overrides[:2] == ["common.seed=3", f"task.data='{tmp_path}/my data'"]


@pytest.mark.parametrize(
    "given, batch",
    [
        (["dataset.max_tokens=1024"], ["dataset.max_tokens=1024", "optimization.update_freq=[4]"]),
        (["optimization.update_freq=[5]"], ["optimization.update_freq=[5]"]),
        (["dataset.max_tokens=null", "dataset.batch_size=64"], ["dataset.max_tokens=null", "dataset.batch_size=64"]),
        ([], ["dataset.max_tokens=4096", "optimization.update_freq=[1]"]),
    ],
    ids=["less-memory", "said", "sentences", "derived"],
)
def test_two_gpus(config, tmp_path, given, batch):
    _, overrides = plan(config, given, 2, tmp_path / "root", tmp_path)
    assert [item for item in overrides if item.startswith(("dataset", "optimization"))] == batch


@pytest.mark.parametrize(
    "update_freq, processes, batch",
    [
        ([1, 4], 1, (4096, [1, 4])),
        ([1, 4], 2, (2048, [1, 4])),
        ([2, 8], 2, (4096, [1, 4])),
        ([2, 3], 2, (2048, [2, 3])),
        ([4, 6, 2], 1, (4096, [4, 6, 2])),
    ],
)
def test_the_update_freq_of_each_epoch(config, tmp_path, capsys, update_freq, processes, batch):
    config["optimization"]["update_freq"] = update_freq
    _, overrides = plan(config, [], processes, tmp_path / "root", tmp_path)
    max_tokens, frequencies = batch
    assert overrides[-2:] == [f"dataset.max_tokens={max_tokens}", f"optimization.update_freq={frequencies}"]
    assert [processes * max_tokens * each for each in frequencies] == [4096 * each for each in update_freq]
    said = f"{', '.join(map(str, frequencies))} = {', '.join(str(4096 * each) for each in update_freq)}"
    assert capsys.readouterr().err.endswith(said + "\n")


@pytest.mark.parametrize("value", ["", "''", "null"])
@pytest.mark.parametrize("key", ["task.data", "checkpoint.save_dir"])
def test_an_empty_path_is_none(config, tmp_path, key, value):
    """As of a variable of the shell that is not set: the training would go to the working directory."""
    with pytest.raises(ValueError, match=rf"no {key}: add it, or give {key}=PATH"):
        plan(config, [f"{key}={value}"], 1, tmp_path / "root", tmp_path)


def test_missing_data_and_settings_are_named(config, tmp_path):
    with pytest.raises(ValueError, match=r"no folder .*nowhere with binarised data"):
        plan(config, ["task.data=nowhere"], 1, tmp_path, tmp_path)
    del config["checkpoint"]
    with pytest.raises(ValueError, match=r"no checkpoint\.save_dir: add it"):
        plan(config, [], 1, tmp_path / "root", tmp_path)


@pytest.mark.parametrize(
    "key, value, none",
    [("checkpoint.checkpoint_suffix", "-b", "''"), ("distributed_training.use_sharded_state", "true", "false")],
)
def test_other_names_of_the_last_checkpoint_are_refused(key, value, none, config, tmp_path):
    """Restarts and the repair of a checkpoint know this one."""
    said = re.escape(f"{key} is not supported, got: {value}; a training resumes from checkpoint_last.pt")
    with pytest.raises(ValueError, match=said):
        plan(config, [f"{key}={value}"], 1, tmp_path / "root", tmp_path)
    group, option = key.split(".")
    config.setdefault(group, {})[option] = yaml.safe_load(value)
    with pytest.raises(ValueError, match=re.escape(f"{key} is not supported")):
        plan(config, [], 1, tmp_path / "root", tmp_path)
    plan(config, [f"{key}={none}"], 1, tmp_path / "root", tmp_path)


def test_raw_text_is_trained_on_if_that_is_asked_for(config, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/train.de-en.de").touch()
    overrides = ["task.data=raw"]
    with pytest.raises(InputError, match=r"raw has train as raw text: make binary data without --dataset-impl raw"):
        plan(config, overrides, 1, tmp_path, tmp_path)
    for other in ("dataset.dataset_impl='raw'", "task.dataset_impl='raw'", "dataset.train_subset=valid"):
        plan(config, [*overrides, other], 1, tmp_path, tmp_path)


@pytest.mark.parametrize(
    "config, overrides, asked, gpus, expected, on_cpu",
    [
        ({}, [], 0, 0, 1, True),
        ({}, [], 0, 4, 4, False),
        ({}, [], 3, 4, 3, False),
        ({}, [], 2, 0, 2, True),
        ({}, ["common.cpu=true"], 0, 4, 1, True),
        ({}, ["common.cpu=1"], 0, 4, 1, True),
        ({"common": {"cpu": True}}, [], 8, 4, 8, True),
        ({"common": {"cpu": True}}, ["common.cpu=false"], 0, 4, 4, False),
    ],
    ids=["cpu", "gpus", "some-gpus", "gloo", "cpu-beside-gpus", "cpu-by-1", "gloo-beside-gpus", "gpus-after-all"],
)
def test_processes(config, overrides, asked, gpus, expected, on_cpu):
    assert count_processes(config, overrides, asked, lambda: gpus) == (expected, on_cpu)


@pytest.mark.parametrize(
    "config, overrides, asked, message",
    [
        ({}, [], 5, "`processes` is 5: this machine has 4 GPUs"),
        ({}, ["distributed_training.distributed_world_size=2"], 0, "follows from `processes` and `nodes`"),
        ({"distributed_training": {"distributed_num_procs": 2}}, [], 0, "follows from `processes` and `nodes`"),
    ],
    ids=["more-than-gpus", "fairseqs-own", "fairseqs-own-in-the-configuration"],
)
def test_impossible_processes(config, overrides, asked, message):
    with pytest.raises(ValueError, match=message):
        count_processes(config, overrides, asked, lambda: 4)


@pytest.mark.parametrize(
    "path",
    sorted(path for path in (ROOT / "configs").glob("*/*.yaml") if path.stem != "protocol"),
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_every_configuration_says_its_tokens_and_where_things_go(path, tmp_path):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    for key in ("task", "checkpoint", "dataset", "optimization", "model", "criterion", "optimizer", "lr_scheduler"):
        assert key in config, key
    (tmp_path / config["task"]["data"]).mkdir(parents=True)
    save_dir, _ = plan(config, [], 1, tmp_path, tmp_path)
    assert save_dir.name == path.stem
    said = path.read_text(encoding="utf-8").replace(",", "")
    assert f"{config['dataset']['max_tokens']} × {config['optimization']['update_freq'][0]}" in said


def test_data_that_the_configuration_leaves_open(config, tmp_path):
    del config["task"]["data"]
    _, overrides = plan(config, ["task.data=root/data"], 1, tmp_path / "root", tmp_path)
    assert [item for item in overrides if "task.data" in item] == [f"+task.data='{tmp_path}/root/data'"]


def test_several_folders_of_data(config, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    _, overrides = plan(config, ["task.data=a:b"], 1, tmp_path / "root", tmp_path)
    assert f"task.data='{tmp_path}/a:{tmp_path}/b'" in overrides
    with pytest.raises(ValueError, match=rf"no folder {tmp_path}/c with binarised data"):
        plan(config, ["task.data=a:c"], 1, tmp_path / "root", tmp_path)


@pytest.mark.parametrize(
    "key, value, given, said",
    [
        ("dataset", {"max_tokens": "many"}, [], "dataset.max_tokens must be a whole number from 1, got: many"),
        ("dataset", {"max_tokens": 1.5}, [], "dataset.max_tokens must be a whole number from 1, got: 1.5"),
        ("dataset", {"max_tokens": True}, [], "dataset.max_tokens must be a whole number from 1, got: True"),
        ("dataset", {"max_tokens": 9}, ["dataset.max_tokens=-1"], "dataset.max_tokens must be a whole number from 1"),
        ("optimization", {"update_freq": 2}, [], "optimization.update_freq must be a list such as [2], got: 2"),
        ("optimization", {"update_freq": ["x"]}, [], "optimization.update_freq[0] must be a whole number from 1, got"),
    ],
)
def test_a_batch_that_is_none(key, value, given, said, config, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)):
        plan({**config, key: value}, given, 1, tmp_path / "root", tmp_path)


@pytest.mark.parametrize(
    "override, gpus, level, said",
    [
        ("common.bf16=true", 0, "AVX2", True),
        ("common.bf16=false", 0, "AVX2", False),
        ("common.bf16=true", 1, "AVX2", False),
        ("common.bf16=true", 0, "AVX-512", False),
    ],
)
def test_bf16_is_warned_about_where_it_is_slow(override, gpus, level, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(instructions, "instruction_set", lambda: level)
    monkeypatch.setattr(f"{make_plan.__module__}.count_gpus", lambda: gpus)
    monkeypatch.setattr(f"{make_plan.__module__}.check_data", lambda data: None)
    overrides = [override, f"task.data={tmp_path}", f"checkpoint.save_dir={tmp_path}"]
    make_plan(find_config("demo/dynamicconv"), overrides, 1, 1, 4000, lambda *arguments: 4000)
    assert ("with AVX2 alone, common.bf16 (--bf16) makes" in capsys.readouterr().err) == said


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "gpu"])
def test_only_what_trains_on_a_cpu_gets_another_allocator(on_cpu, tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(allocator, "preload", lambda: {"LD_PRELOAD": "libtcmalloc.so"})
    monkeypatch.setattr(run, "make_plan", lambda *arguments: Plan(tmp_path / "run", 1, on_cpu, ()))
    monkeypatch.setattr(run, "launch", lambda job: started.append(os.environ.get("LD_PRELOAD")) or 0)
    assert run.train("demo/dynamicconv") == 0
    assert started == ["libtcmalloc.so" if on_cpu else None] and "LD_PRELOAD" not in os.environ
    monkeypatch.setattr(allocator, "advice", lambda: "install it")
    assert run.train("demo/dynamicconv") == 0
    assert ("install it" in capsys.readouterr().err) == on_cpu
