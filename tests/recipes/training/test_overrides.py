"""Overrides: named changes of a recipe, one precision, hydra's +; what fairseq gets, what wins, and what is refused."""

import json
from typing import Any

import pytest
import yaml

from lightconv_plugin.errors import InputError
from lightconv_plugin.paths import find_config
from lightconv_plugin.recipes.training.overrides import CHANGES, OPEN, expanded, given_values
from lightconv_plugin.recipes.training.plan import make_plan
from tests.fairseq_cli import run
from tests.recipes.training.trainings import write_config

RECIPE = {"criterion": {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1}}
SIMCUT = "criterion._name=label_smoothed_cross_entropy_with_simcut"


def no_trial(*args):
    raise AssertionError("a batch is tried")


@pytest.mark.parametrize(
    "given, expected",
    [
        (["+criterion/simcut"], [SIMCUT, "+criterion.simcut_alpha=3.0", "+criterion.simcut_p=0.05"]),
        (
            ["+criterion/rdrop"],
            ["criterion._name=label_smoothed_cross_entropy_with_rdrop", "+criterion.rdrop_alpha=5.0"],
        ),
        (
            ["criterion.simcut_alpha=1", "common.seed=2", "+criterion/simcut", "+criterion.simcut_p=0.1"],
            ["common.seed=2", SIMCUT, "+criterion.simcut_alpha=1", "+criterion.simcut_p=0.1"],
        ),
        (["common.seed=2", "+task.data=a+b/c"], ["common.seed=2", "+task.data=a+b/c"]),
    ],
    ids=["simcut", "rdrop", "others-win", "none"],
)
def test_a_change_stands_for_its_settings(given, expected):
    assert expanded(RECIPE, given) == expected


def test_a_setting_that_the_configuration_has():
    config = {"criterion": {**RECIPE["criterion"], "simcut_p": 0.2}}
    assert expanded(config, ["+criterion/simcut"]) == [SIMCUT, "+criterion.simcut_alpha=3.0", "criterion.simcut_p=0.05"]


@pytest.mark.parametrize(
    "config, given, message",
    [
        (RECIPE, ["+criterion/x"], "there is no change +criterion/x; there are +criterion/rdrop, +criterion/simcut"),
        (RECIPE, ["+criterion/rdrop=5"], "there is no change +criterion/rdrop=5; there are +criterion/rdrop, "),
        (RECIPE, ["++criterion/rdrop=5"], "there is no change ++criterion/rdrop=5; "),
        (RECIPE, ["criterion/rdrop"], "there is no change criterion/rdrop; there are +criterion/rdrop, "),
        (
            RECIPE,
            ["+criterion/rdrop", "+criterion/simcut"],
            "+criterion/rdrop and +criterion/simcut change the same settings: give one of them",
        ),
        (
            {"criterion": {"_name": "adaptive_loss"}},
            ["+criterion/rdrop"],
            "changes label_smoothed_cross_entropy; the criterion of this configuration is adaptive_loss",
        ),
        ({}, ["+criterion/rdrop"], "the criterion of this configuration is None"),
    ],
    ids=["unknown", "with-a-value", "forced", "without-a-plus", "two", "another-criterion", "no-criterion"],
)
def test_a_change_that_cannot_be_made(config, given, message):
    with pytest.raises(InputError) as error:
        expanded(config, given)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "config, given, expected",
    [
        ({"model": {"dropout": 0.1}}, ["model.encoder_layers=6"], ["+model.encoder_layers=6"]),
        ({"model": {"dropout": 0.1}}, ["model.dropout=0.2"], ["model.dropout=0.2"]),
        ({"model": {"dropout": None}}, ["model.dropout=0.2"], ["+model.dropout=0.2"]),
        ({}, ["optimizer._name=adam"], ["+optimizer._name=adam"]),
        ({}, ["model.x=1", "model.x=2"], ["+model.x=1", "model.x=2"]),
        ({}, ["+model.x=1", "model.x=2"], ["+model.x=1", "model.x=2"]),
        ({}, ["++model.x=1", "~task.y", "common.seed=2"], ["++model.x=1", "~task.y", "common.seed=2"]),
    ],
    ids=["missing", "present", "null", "group", "twice", "with-a-plus", "others"],
)
def test_an_option_that_the_configuration_leaves_to_fairseq_needs_no_plus(config, given, expected):
    assert expanded(config, given) == expected == expanded(config, expected)


@pytest.mark.parametrize("release, expected", [("1.0.7", "model.x=1"), ("1.3.2", "++model.x=1")])
def test_an_option_that_the_files_of_defaults_may_have(release, expected, monkeypatch):
    monkeypatch.setattr(f"{expanded.__module__}.version", lambda name: release)
    assert expanded({"defaults": ["base"]}, ["model.x=1"]) == [expected]


def test_the_groups_that_hydra_knows_only_by_the_configuration():
    configs = pytest.importorskip("fairseq.dataclass.configs", reason="fairseq is not installed")
    fields = configs.FairseqConfig.__dataclass_fields__.values()
    assert sorted(OPEN) == sorted(field.name for field in fields if field.type is Any)


@pytest.mark.parametrize(
    "config, given, more",
    [
        ({"fp16": True}, ["common.bf16=true"], ["common.fp16=false"]),
        ({"bf16": True}, ["common.fp16=True"], ["common.bf16=false"]),
        ({"fp16": True, "bf16": True}, ["common.bf16=true"], ["common.fp16=false"]),
        ({"fp16": True}, ["common.bf16=1"], ["common.fp16=false"]),
        ({"bf16": 1}, ["common.fp16='yes'"], ["common.bf16=false"]),
        ({"fp16": True}, ["common.bf16=false"], []),
        ({"fp16": True}, ["common.bf16=0"], []),
        ({"fp16": True}, ["common.bf16=true", "common.fp16=false"], []),
        ({"bf16": True}, [], []),
    ],
)
def test_a_precision_replaces_that_of_the_configuration(config, given, more, capsys):
    assert expanded({"common": config}, given) == [*given, *more]
    assert ("replaces" in capsys.readouterr().err) == bool(more)


@pytest.mark.parametrize(
    "config, given", [({}, ["common.fp16=true", "common.bf16=true"]), ({"fp16": True, "bf16": True}, ["common.seed=2"])]
)
def test_two_precisions_are_refused(config, given):
    with pytest.raises(InputError, match=r"^common.fp16 and common.bf16 are both true: set one of them$"):
        expanded({"common": config}, given)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_recipe_keeps_its_tokens_per_update(tmp_path, monkeypatch, change, processes):
    monkeypatch.setenv("LIGHTCONV_HOME", str(tmp_path))
    (tmp_path / "data/multi30k_en_de/data-bin").mkdir(parents=True)
    config = find_config("multi30k_en_de/dynamicconv")
    plain, changed = (
        given_values(make_plan(config, ["common.cpu=true", *more], processes, 1, None, no_trial).overrides)
        for more in ([], [f"+{change}"])
    )
    assert changed == {**plain, **CHANGES[change]}
    assert changed["dataset.max_tokens"] == str(4096 // processes) and changed["optimization.update_freq"] == "[1]"


def trained(config, *given):
    """The settings and the records of two updates."""
    pytest.importorskip("fairseq", reason="fairseq is not installed")
    folder = config.parent
    given = [*given, f"checkpoint.save_dir={folder / 'run'}", "optimization.max_update=2"]
    plan = make_plan(config, given, 1, 1, None, no_trial)
    run("hydra-train", "--config-dir", folder, "--config-name", "tiny", *plan.overrides)
    records = [json.loads(line) for line in (folder / "run/records.jsonl").read_text(encoding="utf-8").splitlines()]
    [start] = [record for record in records if record["record"] == "start"]
    return start["settings"], records


def test_fairseq_gets_one_precision_and_what_the_configuration_leaves_to_it(tmp_path):
    config = write_config(tmp_path)
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("common:\n", "common:\n  fp16: true\n"), encoding="utf-8")
    settings, _ = trained(config, "common.bf16=true", "model.encoder_conv_type=lightweight", "optimizer.adam_eps=0.1")
    assert (settings["common"]["fp16"], settings["common"]["bf16"]) == (False, True)
    assert settings["model"]["encoder_conv_type"] == "lightweight" and settings["optimizer"]["adam_eps"] == 0.1


@pytest.mark.parametrize("change", CHANGES)
def test_fairseq_gets_the_settings(tmp_path, change):
    settings, records = trained(write_config(tmp_path), f"+{change}")
    settings = settings["criterion"]
    expected = {key.removeprefix("criterion."): yaml.safe_load(value) for key, value in CHANGES[change].items()}
    assert {key: settings[key] for key in expected} == expected and settings["label_smoothing"] == 0.1
    updates = [record["values"] for record in records if record.get("part") == "train/inner"]
    assert updates and all(update[f"{change.partition('/')[2]}_kl_loss"] > 0 for update in updates)
