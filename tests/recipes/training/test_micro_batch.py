"""The largest batch that fits into memory: which sizes there are, how one is found, and a training that uses it."""

import json
import shutil
import sys
from dataclasses import asdict, replace
from types import MappingProxyType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from omegaconf import OmegaConf

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.dataclass.configs import FairseqConfig

from lightconv_plugin.cli.main import main
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.training import micro_batch
from lightconv_plugin.recipes.training.batch import Batch
from lightconv_plugin.recipes.training.micro_batch import MOST, fitting, largest, sizes_of
from lightconv_plugin.recipes.training.plan import largest_batch, make_plan, plan
from lightconv_plugin.recipes.training.trial import Updates, digest
from tests import fairseq_cli
from tests.compat.fairseq_runs import losses
from tests.memory import reset_peak
from tests.recipes.training.trainings import write_config
from tests.warm_python import warm_python

WMT = Batch(tokens=458_752, max_tokens=3_584, processes=1)


@pytest.mark.parametrize(
    "batch", [WMT, Batch(458_752, 3_584, 8), Batch(4_096, 4_096, 2), Batch(98_304, 5_000, 3), Batch(100_000, 60_000, 1)]
)
def test_every_size_takes_the_tokens_of_the_recipe(batch):
    sizes = sizes_of(batch)
    share = batch.tokens // batch.processes
    assert sizes == sorted(set(sizes)) and sizes[0] == min(batch.max_tokens, share)
    for size in sizes:
        assert size == sizes[0] or batch.max_tokens < size <= MOST
        each, update_freq = replace(batch, max_tokens=size).divided()
        assert (size == sizes[0] or each in (size, size - 1)) and 0 <= share - each * update_freq < update_freq
    assert 30_000 < sizes_of(WMT)[-1] <= 32_768 and len(sizes_of(WMT)) > 15


@pytest.mark.parametrize("processes, share", [(1, 24), (5, 4), (7, 3)])
@pytest.mark.parametrize("sample", [3_072, 512])
def test_every_size_of_a_language_model_takes_the_samples_of_the_recipe(sample, processes, share):
    """As fairseq batches them: fewer than eight samples, or a multiple of eight."""
    from fairseq.data.data_utils import batch_by_size

    batch = Batch(24 * sample, sample, processes, sample=sample, multiple=8)
    lengths = np.full(10 * share, sample)
    for size in sizes_of(batch):
        assert size <= MOST
        max_tokens, update_freq = replace(batch, max_tokens=size).divided()
        batches = batch_by_size(
            np.arange(len(lengths)), None, lengths, max_tokens=max_tokens, required_batch_size_multiple=8
        )
        assert max_tokens == size and [sum(map(len, batches[:update_freq]))] == [share]


@pytest.mark.parametrize("batch", [WMT, Batch(9, 9, 1), Batch(20, 10, 1)])
def test_the_largest_that_fits_is_found_in_few_trials(batch):
    sizes = sizes_of(batch)
    for expected in sizes:
        tried = []

        def fits(size, most=expected, tried=tried):
            tried.append(size)
            return size <= most

        assert largest(sizes, fits) == expected
        assert len(tried) <= 5 and sizes[0] not in tried


def test_what_is_asked_for(tmp_path):
    def fitting(batch, save_dir, overrides):
        return 7

    def find(asked, given=(), nodes=1, on_cpu=False, config=MappingProxyType({})):
        chosen = largest_batch(asked, config, dict(given), nodes, on_cpu, fitting)
        return chosen and chosen(WMT, tmp_path, [])

    assert (find(None), find("auto"), find(900)) == (7, 7, 900)
    assert find("auto", on_cpu=True) == 7 and find(None, on_cpu=True) is None and find(None, nodes=2) is None
    assert find(None, {"dataset.max_tokens": "100"}) is None
    assert find(900, nodes=2) == 900
    for fixed in ({"dataset.max_tokens": "100"}, {"optimization.update_freq": "[3]"}):
        with pytest.raises(ValueError, match=r"`micro_batch` 900 is not valid with \w+\.\w+="):
            find(900, fixed)
    with pytest.raises(ValueError, match="for 2, give a number of tokens"):
        find("auto", nodes=2)
    # fairseq's batches end at whichever of the two is reached first: larger ones would have no more sentences.
    sentences = {"dataset": {"batch_size": 32}}
    assert find(None, config=sentences) is None
    assert find(None, {"dataset.batch_size": "null"}, config=sentences) == 7
    for asked in (900, "auto"):
        with pytest.raises(ValueError, match=rf"`micro_batch` {asked} is not valid with dataset\.batch_size=32: give"):
            find(asked, config=sentences)


def test_a_configuration_without_tokens(tmp_path):
    path = tmp_path / "sentences.yaml"
    path.write_text("# @package _global_\ndataset: {batch_size: 8}\n")
    with pytest.raises(InputError, match=r"`micro_batch` 900 needs a configuration with dataset\.max_tokens"):
        make_plan(path, ["common.cpu=true"], 1, 1, 900, fitting=None)


def test_validation_keeps_its_batches(tmp_path):
    """A search in them would need the memory that the larger batches of the training take."""
    (tmp_path / "data").mkdir()
    config = {
        "task": {"data": "data"},
        "checkpoint": {"save_dir": "run"},
        "dataset": {"max_tokens": 3_584},
        "optimization": {"update_freq": [128]},
    }
    _, overrides = plan(config, [], 1, tmp_path, tmp_path, lambda batch, save_dir, given: 16_384)
    batch = ["dataset.max_tokens=16384", "optimization.update_freq=[28]"]
    assert overrides[2:] == ["dataset.max_tokens_valid=3584", *batch]
    given = ["dataset.max_tokens_valid=2000"]
    found = plan(config, given, 1, tmp_path, tmp_path, lambda *_: 16_384)[1]
    assert found[:1] + found[3:] == given + batch
    config["dataset"]["max_tokens_valid"] = 2_000
    assert plan(config, [], 1, tmp_path, tmp_path, lambda *_: 16_384)[1][2:] == batch


def test_a_training_finds_its_batch_once(tmp_path, capfd, monkeypatch):
    """On the memory of this machine; the training goes on with it, and a resumed one does not try again.

    The processes of both import what this one does, and nothing of the working directory.
    """
    if not reset_peak():
        pytest.skip("this kernel does not let a process reset its largest use of memory")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", warm_python())  # by which trials and trainings are started
    (tmp_path / "lightconv_plugin.py").write_text("raise SystemExit('of the working directory')")
    for name, text in {"extension/mine/__init__.py": "import only_here", "modules/only_here.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    config, folder = write_config(tmp_path), tmp_path / "run"
    command = ["train", str(config), f"checkpoint.save_dir={folder}", "--micro-batch", "auto"]
    command.append("common.user_dir=extension/mine")
    assert main([*command, "optimization.max_update=4"]) == 0
    said = capfd.readouterr().err
    assert "batches of 80 tokens fit into the" in said
    assert "1 process × 80 × update_freq 1 = 80" in said
    [start] = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()[:1]]
    settings = start["settings"]
    assert (settings["dataset"]["max_tokens"], settings["dataset"]["max_tokens_valid"]) == (80, 40)

    kept = json.loads((folder / "micro_batch.json").read_text())
    assert kept["trial"].pop("max_tokens") == 80
    (folder / "micro_batch.json").write_text(json.dumps(kept | {"trial": kept["trial"] | {"max_tokens": 53}}))
    batch = Batch(80, 40, 1)
    assert fitting(config, batch, folder, ["common.seed=2"]) == 53
    for other in ("criterion.label_smoothing=0.2", "model.dropout=0.5"):
        shutil.copytree(folder, tmp_path / other)
        assert fitting(config, batch, tmp_path / other, [other]) == 80, "another training needs other memory"
    with pytest.raises(
        InputError, match=r"the trial of batches failed; with `micro_batch` N there is none:\n(.*\n)*.*encoder_layers"
    ):
        fitting(config, batch, tmp_path / "other", ["model.encoder_layers=[]"])
    assert not (tmp_path / "other").exists()
    several = ["distributed_training.distributed_world_size=2"]  # fairseq's default where there are two GPUs
    assert fitting(config, batch, tmp_path / "another", several) == 80


@pytest.mark.parametrize(
    "option",
    ["ema.store_ema=true", "distributed_training.ddp_backend=fully_sharded", "distributed_training.zero_sharding=os"],
)
def test_what_takes_memory_is_another_training(option):
    usual = OmegaConf.create(asdict(FairseqConfig()))
    other = OmegaConf.merge(usual, OmegaConf.from_dotlist(["common.seed=7"]))
    assert digest(other) == digest(usual) != digest(OmegaConf.merge(usual, OmegaConf.from_dotlist([option])))


@pytest.mark.parametrize("name, value", [("LIGHTCONV_GRAPHS", "1"), ("LIGHTCONV_BACKEND", "reference")])
def test_what_the_environment_makes_take_memory_is_another_training(name, value, monkeypatch):
    config = OmegaConf.create(asdict(FairseqConfig()))
    monkeypatch.delenv(name, raising=False)
    usual = digest(config)
    monkeypatch.setenv(name, value)
    assert digest(config) != usual


def test_a_trial_begins_without_the_recordings_of_another():
    """They take memory, or were given up because batches were too large."""
    updates = Updates.__new__(Updates)
    updates.memory, updates._exchanged = mock.Mock(most=lambda: 5), 0
    updates.trainer, updates.demanding = mock.Mock(), lambda max_tokens: []
    updates.trainer.criterion = SimpleNamespace(step_graphs=object())
    assert updates.needed(100) == 5 and not vars(updates.trainer.criterion)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"batch": {}, "trial": {}}', '{"batch": {}, "trial": {"max_tokens": 5}}']
)
def test_what_is_not_a_result_of_trials_is_not_used(text, tmp_path):
    (tmp_path / "micro_batch.json").write_text(text)
    assert micro_batch._earlier(tmp_path / "micro_batch.json", {}) is None


def test_the_curve_of_one_batch_is_that_of_its_parts(toy_data, tmp_path):
    """100 updates with 16 sentences at once and with four times four: without dropout, the same up to rounding."""
    kinds = ("dropout", "weight-dropout", "input-dropout", "attention-dropout", "relu-dropout")
    none = [argument for kind in kinds for argument in (f"--{kind}", 0)]
    curves = []
    for sentences, update_freq in ((16, 1), (4, 4)):
        log = fairseq_cli.run(
            *("train", toy_data, "--user-dir", fairseq_cli.USER_DIR, "--arch", "dynamicconv_iwslt_de_en", *none),
            *(*fairseq_cli.SIZE, *fairseq_cli.RECIPE, "--lr", 0.002, "--share-decoder-input-output-embed", "--no-save"),
            # Sentences in the order of their lengths, so that four small batches are a large one.
            *("--curriculum", 10**6, "--max-tokens", 10**5, "--batch-size", sentences, "--update-freq", update_freq),
            *("--required-batch-size-multiple", 1, "--max-update", 100, "--disable-validation"),
            *("--save-dir", tmp_path / str(sentences)),
        )
        curves.append(losses(log))
    one, parts = curves
    assert len(one) == 100 and one.keys() == parts.keys() and one[100] < 0.8 * one[1]
    # fairseq logs three decimals.
    assert max(abs(one[update] - parts[update]) for update in one) <= 0.002
