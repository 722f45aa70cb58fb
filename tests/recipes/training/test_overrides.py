"""Named changes of a recipe: the settings that fairseq gets, their precedence, and what is refused."""

import json

import pytest
import yaml

from lightconv_plugin.errors import InputError
from lightconv_plugin.paths import find_config
from lightconv_plugin.recipes.training.overrides import CHANGES, expanded, given_values
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


@pytest.mark.parametrize("change", CHANGES)
def test_fairseq_gets_the_settings(tmp_path, change):
    pytest.importorskip("fairseq", reason="fairseq is not installed")
    config = write_config(tmp_path)
    given = [f"+{change}", f"checkpoint.save_dir={tmp_path / 'run'}", "optimization.max_update=2"]
    plan = make_plan(config, given, 1, 1, None, no_trial)
    run("hydra-train", "--config-dir", tmp_path, "--config-name", "tiny", *plan.overrides)
    records = [json.loads(line) for line in (tmp_path / "run/records.jsonl").read_text(encoding="utf-8").splitlines()]
    [start] = [record for record in records if record["record"] == "start"]
    settings = start["settings"]["criterion"]
    expected = {key.removeprefix("criterion."): yaml.safe_load(value) for key, value in CHANGES[change].items()}
    assert {key: settings[key] for key in expected} == expected and settings["label_smoothing"] == 0.1
    updates = [record["values"] for record in records if record.get("part") == "train/inner"]
    assert updates and all(update[f"{change.partition('/')[2]}_kl_loss"] > 0 for update in updates)
