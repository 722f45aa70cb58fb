"""What a row is asked for: settings and overrides in one form, folders, and what cannot be done."""

from pathlib import Path

import pytest

from lightconv_plugin.cli.reproduce import overrides_last
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.reproduce.job import plan, plan_smoke
from lightconv_plugin.recipes.reproduce.protocol import canonical, changing, settings_of
from tests import ROOT
from tests.recipes.reproduce.reproduction_world import CONFIG, task


def test_settings_in_one_form():
    assert canonical("5e-4") == canonical(0.0005) == canonical("0.0005")
    assert canonical([2000, 10000]) == canonical("2000,10000") == "2000.0,10000.0"
    assert canonical("(0.9,0.98)") == canonical("(0.9, 0.98)") == "0.9,0.98"
    assert canonical(True) == canonical("True") == "true" and canonical(None) == "null"
    assert canonical(True) != canonical(1)
    assert canonical("talk") == "talk" and canonical("''") == ""


def test_overrides_change_settings_unless_they_are_of_the_machine():
    plain = settings_of(CONFIG, [])
    assert plain["optimization.lr"] == "0.0005" and "checkpoint.save_dir" not in plain and "task.data" not in plain
    machine = ["dataset.num_workers=4", "dataset.max_tokens=1000", "common.log_interval=5", "+task.data=/x"]
    assert settings_of(CONFIG, machine) == plain, "train.sh keeps the tokens of an update"
    both = settings_of(CONFIG, ["dataset.max_tokens=1000", "optimization.update_freq=[8]"])
    assert both["dataset.max_tokens"] == "1000.0"
    sentences = settings_of(CONFIG, ["dataset.max_tokens=null", "dataset.batch_size=64"])
    assert (sentences["dataset.max_tokens"], sentences["dataset.batch_size"]) == ("null", "64.0")
    assert settings_of(CONFIG, ["++model.dropout=0.1", "~optimization.lr"]).get("model.dropout") == "0.1"
    assert "optimization.lr" not in settings_of(CONFIG, ["~optimization.lr"])


def test_a_setting_that_refers_to_another_has_its_value():
    refers = CONFIG | {"lr_scheduler": {"total_num_update": "${optimization.max_update}"}}
    assert settings_of(refers, []) == settings_of(CONFIG | {"lr_scheduler": {"total_num_update": 100}}, [])
    assert settings_of(refers, ["optimization.max_update=7"])["lr_scheduler.total_num_update"] == "7.0"
    given = settings_of(
        CONFIG, ["optimization.max_update=${dataset.max_tokens}", "+model.kernels=[3,'${model.dropout}']"]
    )
    assert given["optimization.max_update"] == "4000.0" and given["model.kernels"] == "3.0,0.3"
    assert "common.log_file" not in settings_of(CONFIG, ["+common.log_file=${nowhere}"])
    with pytest.raises(InputError, match=r"model\.dropout is \$\{model\.rate\}, which the configuration does not have"):
        settings_of(CONFIG, ["model.dropout=${model.rate}"])


def test_overrides_that_change_a_training_are_those_that_change_its_settings():
    assert (
        changing(CONFIG, ["model.dropout=3e-1", "dataset.max_tokens=1", "common.log_interval=5", "task.data=x"]) == []
    )
    assert changing(CONFIG, ["model.dropout=0.1", "++model.dropout=1e-1"]) == ["++model.dropout=1e-1"]
    together = ["dataset.max_tokens=1000", "optimization.update_freq=[8]"]
    assert changing(CONFIG, together) == together
    assert changing(CONFIG, ["+a.b=1", "+a.c=${a.b}"]) == ["+a.b=1", "+a.c=${a.b}"]


def job(folder, *overrides, **options):
    return plan(folder / "dynamicconv.yaml", (1, 2), overrides=overrides, **options)


def test_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, runs = task(tmp_path / "task", prepare="iwslt14_de_en --bpe 100"), Path("here")
    plain = plan("multi30k_en_de/dynamicconv", (1, 2))
    assert plain.folder == tmp_path / "runs/multi30k_en_de/dynamicconv" and plain.seeds == (1, 2)
    assert plain.data == tmp_path / "data/multi30k_en_de/data-bin" and plain.languages == ("en", "de")
    assert plain.prepare == ("multi30k_en_de",)
    assert plain.results == tmp_path / "results/reproduction" and plain.table == tmp_path / "RESULTS.md"
    other = job(folder, "checkpoint.keep_last_epochs=5", runs=runs, prepare_options="--data 'a b'")
    assert other.folder == tmp_path / "here/task/dynamicconv" and other.results == tmp_path / "here/results"
    assert other.prepare == ("iwslt14_de_en", "--bpe", "100", "--data", "a b") and other.changing == ()
    changed = job(folder, "model.dropout=0.1", "task.data='d/data-bin'", runs=runs)
    assert changed.results == tmp_path / "here/results" and changed.table == tmp_path / "here/results/RESULTS.md"
    assert changed.data == tmp_path / "d/data-bin" and changed.prepare[3:] == ("--out", str(tmp_path / "d"))
    assert changed.overrides == ("model.dropout=0.1", f"task.data={tmp_path}/d/data-bin")
    assert changed.changing == ("model.dropout=0.1", f"task.data={tmp_path}/d/data-bin")
    other = job(folder, "task.data=data/x/data-bin", runs=runs, prepare_options="--bpe=9 --mirror m --workers 2")
    assert (other.changing, other.prepare_options) == ((), "--bpe=9"), "the usual folder, by its name"
    assert job(folder, "checkpoint.keep_last_epochs=-1", runs=runs, prepare=False).prepare is None
    given = ("+criterion/simcut", "criterion.simcut_p=0.1")
    criterion = plan("multi30k_en_de/dynamicconv", (1,), overrides=given, runs=runs)
    assert (
        criterion.changing
        == criterion.overrides
        == (
            "criterion._name=label_smoothed_cross_entropy_with_simcut",
            *("+criterion.simcut_alpha=3.0", "+criterion.simcut_p=0.1"),
        )
    )
    assert criterion.settings["criterion.simcut_p"] == "0.1"
    smoke = plan_smoke()
    assert smoke.folder == tmp_path / "runs/smoke/smoke/dynamicconv"
    assert smoke.data == tmp_path / "runs/smoke/data/data-bin"


def test_the_direction_is_that_of_the_training(tmp_path):
    folder, runs = task(tmp_path / "task"), tmp_path / "runs"
    assert job(folder, "task.source_lang=de", "task.target_lang=no", runs=runs).languages == ("de", "no")
    # fairseq then takes both from the names of the files.
    assert job(folder, "~task.source_lang", runs=runs).languages == (None, None)


def test_the_folder_that_a_protocol_prepares_is_the_workspaces(tmp_path, monkeypatch):
    """Wherever the command is typed: a relative --out would be of the current folder, where no training looks."""
    monkeypatch.setenv("LIGHTCONV_HOME", str(tmp_path / "home"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = plan("multi30k_en_de/ablation/dynamic", (1,))
    assert found.data == tmp_path / "home/data/multi30k_en_de_bpe10k/data-bin"
    assert found.prepare[-2:] == ("--out", str(found.data.parent))


def test_a_job_of_a_checkout(monkeypatch):
    monkeypatch.setenv("LIGHTCONV_HOME", str(ROOT))
    found = plan(ROOT / "configs/multi30k_en_de/dynamicconv.yaml", (1,))
    assert found.folder == ROOT / "runs/multi30k_en_de/dynamicconv"
    assert found.results == ROOT / "benchmarks/results/reproduction" and found.table == ROOT / "RESULTS.md"


@pytest.mark.parametrize(
    "overrides, options, message",
    [
        (["model.dropout=0.1"], {}, "model.dropout=0.1 changes what is computed: `runs` must name a folder"),
        ([], {}, "is not a published configuration: `runs` must name a folder for its trainings and its row"),
        (
            ["checkpoint.keep_last_epochs=4"],
            {"runs": Path("x")},
            "checkpoint.keep_last_epochs=4 keeps too few checkpoints: ",
        ),
        (
            ["checkpoint.no_epoch_checkpoints=true", "checkpoint.keep_interval_updates=4"],
            {"runs": Path("x")},
            "checkpoint.keep_interval_updates=4 keeps too few checkpoints: ",
        ),
        (
            ["checkpoint.no_epoch_checkpoints=true"],
            {"runs": Path("x")},
            "checkpoint.no_epoch_checkpoints needs checkpoint.save_interval_updates: nothing to average",
        ),
        (["checkpoint.no_save=true"], {}, "checkpoint.no_save is true: whether a training is finished is read from"),
        (["+checkpoint.no_last_checkpoints=true"], {}, "checkpoint.no_last_checkpoints is true: whether a training"),
        (["task.data="], {"runs": Path("x")}, "task.data must name a folder, got: nothing"),
        (["task.data=/x/data-bin"], {}, "task.data=/x/data-bin changes what is computed: `runs` must name a folder"),
        ([], {"prepare_options": "--data x --bpe 9"}, "`prepare_options` '--bpe 9' changes what is computed: `runs`"),
        (["common.seed=3"], {}, "common.seed cannot be overridden here: use `seeds`"),
        (["checkpoint.save_dir=x"], {}, "checkpoint.save_dir cannot be overridden here: use `runs`"),
        (
            ["task.data=/x/y"],
            {"runs": Path("x")},
            "task.data=/x/y is not named data-bin, as prepared data is: set `no_prepare`",
        ),
        ([], {"runs": Path("x"), "prepare_options": "--out 'x"}, "`prepare_options`: No closing quotation"),
        ([], {"runs": Path("x"), "prepare_options": "--bpe x"}, "`prepare_options`: argument --bpe: must be a whole"),
        (
            [],
            {"runs": Path("x"), "prepare": False, "prepare_options": "--bpe 9"},
            "`prepare_options` '--bpe 9' is not valid with `no_prepare`",
        ),
        (
            [],
            {"runs": Path("x"), "results": Path("x")},  # whose .json files were then all read as rows
            "`results` x has the trainings in it, in ",
        ),
    ],
)
def test_a_job_that_cannot_be_done(tmp_path, overrides, options, message):
    with pytest.raises(InputError) as error:
        job(task(tmp_path / "task", prepare="iwslt14_de_en"), *overrides, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("override", ["optimization.update_freq=[3]", "dataset.batch_size=64"])
def test_a_batch_of_each_process_needs_one_process(override, tmp_path, monkeypatch):
    """Or else the row of another number of GPUs, with other updates, would have the same settings."""
    folder = task(tmp_path / "task")
    for gpus, *others in ((0,), (1,), (2, "common.cpu=true")):
        monkeypatch.setattr("lightconv_plugin.recipes.reproduce.job.count_gpus", lambda gpus=gpus: gpus)
        assert job(folder, override, *others, runs=Path("x")).changing
    assert job(folder, "dataset.max_tokens=2000", runs=Path("x")).changing == ()
    key, _, value = override.partition("=")
    with pytest.raises(InputError) as error:
        job(folder, override, runs=Path("x"))
    assert str(error.value).startswith(f"{key}={value} would be that of each of 2 GPUs")


@pytest.mark.parametrize(
    "config, options, made, given",
    [
        ("wmt17_zh_en/dynamicconv", "--without-cwmt", "data/wmt17_zh_en_without_cwmt", "data/wmt17_zh_en"),
        ("wmt14_en_de/dynamicconv", "--icml17", "data/wmt14_en_de_icml17", "data/wmt14_en_de"),
        ("tatoeba_de_en/dynamicconv", "--data . --name other", "data/other", "data/tatoeba_de_en"),
        ("multi30k_en_de/dynamicconv", "--out a", "a", "data/multi30k_en_de"),
        ("multi30k_en_de/dynamicconv", "--out=a", "a", "data/multi30k_en_de"),
        ("multi30k_en_de/dynamicconv", "--out=a", "a", "elsewhere"),
    ],
)
def test_what_is_prepared_is_what_is_trained_on(config, options, made, given, tmp_path, monkeypatch):
    """Or else hours of preparation would end without training text, or other text would be trained on."""
    monkeypatch.chdir(tmp_path)
    overrides = [f"task.data={given}/data-bin"] if given == "elsewhere" else []
    with pytest.raises(InputError) as error:
        plan(config, (1,), overrides=overrides, prepare_options=options, runs=Path("r"))
    assert str(error.value) == (
        f"`prepare_options` {options!r} fills {made}, but the training reads {given}/data-bin: "
        f"override task.data={made}/data-bin"
    )
    remedy = plan(config, (1,), overrides=[f"task.data={made}/data-bin"], prepare_options=options, runs=Path("r"))
    assert remedy.data == tmp_path / made / "data-bin"


@pytest.mark.parametrize("option", ["--runs", "--results", "--prepare-options"])
def test_an_options_value_is_no_override(option):
    given = ["multi30k_en_de/dynamicconv", "lr=[1]", option, "x/lr=1", "--seeds", "1", "seed=2"]
    expected = ["multi30k_en_de/dynamicconv", option, "x/lr=1", "--seeds", "1", "--", "lr=[1]", "seed=2"]
    assert overrides_last(given) == expected


def test_the_table_of_a_folder_of_trainings(tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    for option, missing in (("--runs", "mine/results"), ("--results", "mine")):
        assert f"--table: there is no folder {missing}" in refusal("reproduce", "--table", option, "mine")
    assert not Path("mine").exists()
    Path("mine/results").mkdir(parents=True)
    assert "--table: mine/results has no rows" in refusal("reproduce", "--table", "--runs", "mine")
    assert not list(Path("mine/results").iterdir()), "no empty table, which might replace one with rows"


def test_a_configuration_without_a_protocol_or_out_of_it(tmp_path):
    folder = task(tmp_path / "task")
    (folder / "other.yaml").write_text("a: 1\n")
    with pytest.raises(InputError, match="systems has no other; there are: dynamicconv"):
        plan(folder / "other.yaml", (1,))
    (folder / "dynamicconv.yaml").write_text("")
    with pytest.raises(InputError, match=r"dynamicconv\.yaml must hold groups of options, .* got: NoneType"):
        job(folder)
    (folder / "protocol.yaml").unlink()
    with pytest.raises(InputError, match=r"cannot read .*protocol\.yaml"):
        job(folder)
