"""What a reproduction repeats and what not, with stand-ins for everything that computes.

The real ones are in test_reproduce.py.
"""

import os
import re
import shutil
import threading
import time

import pytest

from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes import evaluation
from lightconv_plugin.recipes.data import tasks
from lightconv_plugin.recipes.reproduce.job import plan
from lightconv_plugin.recipes.reproduce.rows import write_row
from lightconv_plugin.recipes.steps import Steps, changes
from lightconv_plugin.recipes.training.child import TrainingFailed
from lightconv_plugin.records.file import append
from tests.recipes.reproduce import reproduction_world
from tests.recipes.reproduce.reproduction_world import edit


def test_a_row_from_nothing_and_again(world, capfd):
    row = world.row()
    names, text = world.calls()
    assert names == ["prepare", "train", "tune", "score", "train", "tune", "score"]
    seed = world.runs / "seed2"
    data = world.path / "data/data-bin"
    assert f"prepare x --bpe 100 --out {data.parent}" in text
    assert f"train {world.config} checkpoint.save_dir={seed} common.seed=2 task.data={data}" in text
    assert f"tune {data} {seed} {{'average': [1, 5], 'lenpen': [0.6, 1.0], 'by': 'bleu_tok', 'grid': False, " in text
    search = "'--beam', '5', '--source-lang', 'en', '--target-lang', 'de'"
    assert f"'options': [{search}], 'context_window': 0, 'skip_missing': True" in text
    assert f"score {data} {seed}/average5.pt [{search}, '--lenpen', '0.6'] Measuring(metric='bleu'," in text
    assert "compound_split=True" in text
    assert row["summary"]["test"]["bleu_tok"] == {"mean": 30.5, "sd": 0.0}
    assert [run["updates"] for run in row["runs"]] == [100, 100]
    assert row["signatures"] == ["s", "c"] and row["runs"][0]["parameters"] == 7
    assert row["runs"][0]["search"] == "the plugin's own search"
    path = write_row(world.path / "results", row)
    before = path.read_bytes()
    capfd.readouterr()
    assert write_row(world.path / "results", world.row()).read_bytes() == before
    assert world.calls()[0] == ["prepare"]
    said = capfd.readouterr().err
    assert said.count("trained before, 100 updates") == 2 and said.count("done before") == 4


def test_an_option_that_the_preparation_needs_is_one_of_lightconv_prepare(world, monkeypatch):
    monkeypatch.setattr(reproduction_world.reproduce, "prepare", lambda *_: tasks.prepare("parallel"))
    with pytest.raises(
        InputError, match=r"--data is missing: .* \(options of lightconv prepare: in `prepare_options`\)$"
    ):
        world.row()


def test_a_language_that_cannot_be_scored_is_refused_before_any_training(world, monkeypatch):
    def without_mecab(**options):
        raise RuntimeError("please install sacrebleu[ja]")

    monkeypatch.setattr("sacrebleu.metrics.BLEU", without_mecab)
    with pytest.raises(InputError, match="cannot score language 'de': please install"):
        world.row()
    assert world.calls()[0] == ["prepare"]


def test_a_wrong_option_of_the_search_is_refused_before_any_training(world, monkeypatch):
    pytest.importorskip("fairseq")
    monkeypatch.setattr(reproduction_world.reproduce, "check_search", evaluation.check_search)
    edit(world.folder / "protocol.yaml", generate=["--beem", 5])
    with pytest.raises(InputError, match=r"protocol.yaml: generate: .* unrecognized arguments: --beem 5"):
        world.row()
    edit(world.folder / "protocol.yaml", generate=["--lenpen", 2])
    with pytest.raises(InputError, match=r"protocol.yaml: generate: .*--lenpen"):
        world.row()
    monkeypatch.setattr(reproduction_world.reproduce, "check_eval_lm", evaluation.check_eval_lm)
    edit(world.folder / "protocol.yaml", metric="perplexity", paper=None, score={}, generate=["--context-windw", 64])
    edit(world.folder / "protocol.yaml", tune={"average": [1], "lenpen": [], "by": "perplexity"})
    with pytest.raises(InputError, match=r"protocol.yaml: generate: .* unrecognized arguments: --context-windw 64"):
        world.row()
    assert set(world.calls()[0]) == {"prepare"}


def test_files_of_the_opposite_direction_are_searched_as_they_were_trained(world):
    world.row("task.source_lang=de", "task.target_lang=en")
    searches = [call for call in world.calls()[1].splitlines() if "--beam" in call]
    assert searches and all("'--source-lang', 'de', '--target-lang', 'en'" in call for call in searches)


def test_more_seeds_need_only_theirs(world):
    world.row(seeds=(1,))
    world.calls()
    row = world.row(seeds=(1, 2))
    assert world.calls()[0] == ["prepare", "train", "tune", "score"]
    assert [run["seed"] for run in row["runs"]] == [1, 2]
    assert world.row(prepare=False, seeds=(2,))["summary"]["best_seed"] == 2
    assert world.calls()[0] == []


def test_tasks_with_the_same_runs_share_a_table(world):
    folder = reproduction_world.task(world.path / "elsewhere/other", title="Another task")
    data = f"task.data={world.path}/data/data-bin"
    second = plan(folder / "dynamicconv.yaml", (1,), overrides=[data], runs=world.path / "runs")
    for job, title in ((world.job(seeds=(1,)), "A task"), (second, "Another task")):
        done = reproduction_world.reproduce.reproduce(job)
        assert done.section.startswith(f"## {title}\n")
    text = done.table.read_text(encoding="utf-8")
    assert done.table == world.path / "runs/results/RESULTS.md"
    assert "## A task\n" in text and done.section in text and "DynamicConv*" not in text


def test_a_damaged_row_is_named_before_any_work(world):
    job = world.job()
    path = job.results / "task/dynamicconv.json"
    path.parent.mkdir(parents=True)
    path.write_text("<<<<<<< HEAD\n")
    with pytest.raises(InputError, match=f"{path} is not a row of lightconv reproduce"):
        reproduction_world.reproduce.reproduce(job)
    assert world.calls()[0] == [] and path.read_text() == "<<<<<<< HEAD\n"


def test_a_users_own_file_in_the_place_of_the_table_is_left_alone(world):
    """Outside a checkout, the table goes to RESULTS.md in the working directory."""
    job = world.job()
    job.table.parent.mkdir(parents=True)
    job.table.write_text("# Results\n\nOf my own.\n")
    with pytest.raises(InputError, match=f"{job.table} is not a table of lightconv reproduce, which would replace it"):
        reproduction_world.reproduce.reproduce(job)
    assert world.calls()[0] == [] and job.table.read_text() == "# Results\n\nOf my own.\n"
    job.table.write_text("")
    reproduction_world.reproduce.reproduce(job)
    made = job.table.read_text()
    job.table.write_text(made.replace("`lightconv reproduce --table`", "`scripts/reproduce.sh --table`"))  # an old one
    reproduction_world.reproduce.reproduce(job)
    assert job.table.read_text() == made


@pytest.mark.parametrize(
    "name, change, again, said",
    [
        ("dynamicconv.yaml", {"model__dropout": 0.1}, ["train", "tune", "score"], "model.dropout 0.3 → 0.1"),
        ("dynamicconv.yaml", {"common": {"log_interval": 7}}, [], "done before"),
        ("protocol.yaml", {"tune__average": [5, 1, 2]}, ["tune"], "average 1 5 → 5 1 2"),
        ("protocol.yaml", {"generate": ["--beam", 4]}, ["tune", "score"], "generate --beam 5 → --beam 4"),
        ("protocol.yaml", {"score": {}}, ["score"], "score.compound_split is gone"),
        ("protocol.yaml", {"note": "another"}, [], "done before"),
        ("train.en-de.de.bin", None, ["train", "tune", "score"], "changed: data.train.en-de.de.bin"),
        ("valid.en-de.de.bin", None, ["train", "tune", "score"], "changed: data.valid.en-de.de.bin"),
        ("test.en-de.de.bin", None, ["score"], "changed: data.test.en-de.de.bin"),
        ("preprocess.log", None, [], "done before"),
    ],
)
def test_only_what_depends_on_a_change_is_done_again(world, capfd, name, change, again, said):
    world.row(seeds=(1,))
    world.calls()
    capfd.readouterr()
    if change is None:
        (world.path / "data/data-bin" / name).write_text("another text")
    else:
        edit(world.folder / name, **change)
    world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare", *again]
    assert said in capfd.readouterr().err


def test_a_former_training_is_kept(world):
    world.row(seeds=(1,))
    (world.runs / "seed1/mine").touch()
    for dropout, kept in ((0.1, "seed1.old1"), (0.2, "seed1.old2")):
        edit(world.config, model__dropout=dropout)
        world.row(seeds=(1,))
        assert (world.runs / kept / "checkpoint_last.pt").is_file()
    assert (world.runs / "seed1.old1/mine").exists() and not (world.runs / "seed1/mine").exists()


def test_the_same_data_written_anew_change_nothing(world):
    world.row(seeds=(1,))
    world.calls()
    for path in (world.path / "data/data-bin").iterdir():
        path.write_bytes(path.read_bytes())
        os.utime(path, (1, 1))
    world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare"]


def test_changed_checkpoints_are_tuned_and_scored_anew(world, capfd):
    world.row(seeds=(1,))
    world.calls()
    (world.runs / "seed1/average5.pt").unlink()
    world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare", "tune", "score"]
    assert "tuning on valid again: what it left is gone or has changed" in capfd.readouterr().err
    (world.runs / "seed1/checkpoint_1_100.pt").touch()
    world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare", "tune"], "the mean is the same file"
    assert "checkpoints.checkpoint_1_100.pt" in capfd.readouterr().err


def test_an_interrupted_training_goes_on(world, monkeypatch, capfd):
    monkeypatch.setenv("UPDATES", "50")
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(TrainingFailed) as error:
        world.row(seeds=(1,))
    log = world.runs / "logs/seed1.train.log"
    assert str(error.value).endswith(f"the reason\ntraining failed with status 3: see {log}")
    monkeypatch.delenv("UPDATES")
    monkeypatch.delenv("FAIL")
    world.row(seeds=(1,))
    assert "resuming from update 50" in capfd.readouterr().err
    assert world.calls()[0] == ["prepare", "train", "prepare", "train", "tune", "score"]


def test_a_row_names_the_data_by_their_content(world):
    once, again = (world.row(seeds=(1,))["runs"][0]["data"] for _ in range(2))
    path = world.path / "data/data-bin/train.en-de.de.bin"
    path.write_text("prepared with other options\n")
    assert once == again != (run := world.row(seeds=(1,))["runs"][0])["data"]
    path = world.path / "data/raw/test.de"
    path.parent.mkdir()
    path.write_text("other references\n")
    found = world.row(seeds=(1,))["runs"][0]
    assert found["data"] == run["data"] and found["references"] != run["references"]


def test_what_lies_beside_a_link_to_the_data_counts(world):
    world.row(seeds=(1,))
    data = world.path / "data/data-bin"
    data.rename(world.path / "store")
    data.symlink_to(world.path / "store")
    world.calls()
    (data.parent / "corpus.json").write_text('{"lowercase": true}')
    world.row(seeds=(1,), prepare=False)
    assert world.calls()[0] == ["tune", "score"]


def test_a_training_that_ends_too_early_is_an_error(world, monkeypatch):
    monkeypatch.setenv("UPDATES", "50")
    with pytest.raises(TrainingFailed, match=r"ended after 50 updates, too early: see .*seed1/train\.log"):
        world.row(seeds=(1,))
    append(world.runs / "seed1", {"record": "end", "error": "the reason"})
    with pytest.raises(TrainingFailed, match="too early"):
        world.row(seeds=(1,))
    append(world.runs / "seed1", {"record": "end"})
    assert world.row(seeds=(1,))["runs"][0]["updates"] == 50, "patience or max_epoch ended it"


def test_after_a_step_that_fails_the_others_stay_done(world, monkeypatch):
    monkeypatch.setenv("FAIL_SCORE", "1")
    with pytest.raises(InputError, match="the reason"):
        world.row(seeds=(1,))
    world.calls()
    monkeypatch.delenv("FAIL_SCORE")
    world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare", "score"]


def test_two_runs_of_a_system_do_not_collide(world, capfd):
    job = world.job(seeds=(1,))
    steps = Steps(job.folder)
    threading.Timer(0.5, steps.close).start()
    start = time.monotonic()
    world.row(seeds=(1,))
    assert time.monotonic() - start > 0.4
    assert "waiting: another process is working in" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_broken_state_repeats_steps_but_no_training(world, capfd, text):
    wanted = world.row(seeds=(1,))
    world.calls()
    for stamp in (world.runs / ".steps").glob("seed1.*.json"):
        stamp.write_text(text)
    assert world.row(seeds=(1,)) == wanted
    assert world.calls()[0] == ["prepare", "tune", "score"]
    assert "seed 1: taking over the training in" in capfd.readouterr().err


def test_without_binarised_data_it_ends_before_training(world):
    with pytest.raises((InputError, OSError)) as error:
        world.row(prepare=False)
    assert "data-bin" in str(error.value)
    assert world.calls()[0] == []


def test_checkpoint_last_may_be_removed_but_not_all(world):
    world.row(seeds=(1,))
    (world.runs / "seed1/checkpoint_last.pt").unlink()
    world.calls()
    world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare"]
    shutil.rmtree(world.runs / "seed1")
    world.row(seeds=(1,))
    assert world.calls()[0] == ["prepare", "train", "tune", "score"]


def test_a_language_model(world):
    edit(world.folder / "protocol.yaml", metric="perplexity", paper=None, score={}, generate=["--context-window", 64])
    edit(world.folder / "protocol.yaml", tune={"average": [1, 5], "lenpen": []})
    row = world.row(seeds=(1,))
    names, text = world.calls()
    assert names == ["prepare", "train", "tune", "perplexity"]
    assert "'by': 'perplexity'" in text and "'lenpen': []" in text and "'options': [], 'context_window': 64" in text
    assert "average5.pt test 64 []" in text
    assert row["summary"]["test"] == {"perplexity": {"mean": 25.5, "sd": None}} and row["signatures"] == []


def test_summaries(world, monkeypatch):
    edit(world.folder / "protocol.yaml", metric="rouge", paper="CNN-DailyMail", score={"stem": False})
    edit(world.folder / "protocol.yaml", tune={"average": [5], "lenpen": [1.2345678], "by": "rougeL", "grid": True})
    scores = {"rouge1": 39.0, "rouge2": 16.0, "rougeL": 35.0, "rougeLsum": 36.0, "signature": "r", "parameters": 7}
    monkeypatch.setattr(reproduction_world, "SCORES", scores)
    row = world.row(seeds=(1,))
    text = world.calls()[1]
    assert "'lenpen': [1.2345678], 'by': 'rougeL', 'grid': True" in text and "'--lenpen', '1.2345678']" in text
    assert "Measuring(metric='rouge'" in text and "stem=False" in text
    assert list(row["summary"]["test"]) == ["rouge1", "rouge2", "rougeLsum"]
    assert row["signatures"] == ["r"]


def test_changes_are_told_by_their_place():
    old = {"a": {"b": 1, "c": [1, 2]}, "d": "x" * 64, "e": None, "f": 1}
    new = {"a": {"b": 2, "c": []}, "d": "y" * 64, "e": 5, "f": None}
    assert changes(old, new) == ["a.b 1 → 2", "a.c 1 2 → none", "d", "e is new", "f is gone"]
    assert changes(old, old) == []


def test_missing_data_are_named_and_how_they_are_made(world, monkeypatch):
    """A student's text is not made by the preparation that its protocol names."""
    monkeypatch.setattr(reproduction_world.reproduce, "prepare", lambda name, options: None)
    with pytest.raises(InputError, match=r"no binarised training text .* run lightconv prepare first, or leave out"):
        world.row(prepare=False)
    with pytest.raises(InputError, match=f"the comment in {re.escape(str(world.config))} says how it is made"):
        world.row()
    (world.path / "data/data-bin").mkdir(parents=True, exist_ok=True)
    (world.path / "data/data-bin/train.en-de.en").touch()
    with pytest.raises(InputError, match="has train as raw text: make binary data"):
        world.row(prepare=False)
