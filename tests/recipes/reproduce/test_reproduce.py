"""A miniature reproduction from end to end with fairseq, killed in its training and in its tuning, against one that was
left alone. What the command refuses: test_reproduce_jobs.py."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from lightconv_plugin.paths import find_config
from lightconv_plugin.recipes.reproduce.protocol import load_yaml, settings_of
from lightconv_plugin.recipes.reproduce.training import differences, head
from tests import programs
from tests.recipes.conftest import ROOT, script_environment
from tests.recipes.training.trainings import commands

CONFIG = "configs/smoke/dynamicconv.yaml"
REPRODUCE = ROOT / "scripts/reproduce.sh"
TIMES = ("tokens_per_second", "train_seconds")


@pytest.fixture(scope="module")
def undisturbed(run_script, tmp_path_factory):
    """Seed 1 of the miniature, in one go: (its folder, the command's result)."""
    folder = tmp_path_factory.mktemp("left alone")
    arguments = ("--runs", folder, f"task.data={folder / 'data/data-bin'}")
    done = run_script("reproduce.sh", ROOT / CONFIG, "--seeds", 1, *arguments, timeout=1200)
    return folder, done


def result(runs):
    return json.loads((runs / "results/smoke/dynamicconv.json").read_text(encoding="utf-8"))


def kill_when(ready, command, everything):
    """Start the command, and kill it (or all that names its folder) as soon as ready()."""
    process = subprocess.Popen(
        command, env=script_environment(sys.executable), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    programs.wait_until(ready, process, seconds=600)
    assert process.poll() is None, "it ended before it could be killed"
    for pid in [pid for pid, _ in commands(everything)] if everything else [process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


@pytest.mark.long
def test_killed_in_training_and_in_tuning_it_ends_in_the_same_row(undisturbed, tmp_path):
    alone, _ = undisturbed
    runs = tmp_path / "killed twice"
    seed = runs / "smoke/dynamicconv/seed1"
    command = [str(REPRODUCE), "--smoke", "--runs", str(runs), "--no-prepare", f"task.data={alone}/data/data-bin"]
    # In training: with all that it started, so that nothing goes on. The first of three checkpoints is there.
    kill_when((seed / "checkpoint_last.pt").exists, command, everything=runs)
    assert not (runs / "smoke/dynamicconv/.steps/seed1.tune.json").exists()
    # In tuning, which is a part of the command itself.
    kill_when((seed / "average1.pt").exists, command, everything=None)
    done = subprocess.run(command, env=script_environment(), capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "seed 1: trained before, 60 updates" in done.stderr
    assert "Loaded checkpoint" in (seed / "train.log").read_text(), "the training went on"
    row, wanted = result(runs), result(alone)
    runs_of_seed_1 = [{k: v for k, v in one["runs"][0].items() if k not in TIMES} for one in (row, wanted)]
    assert runs_of_seed_1[0] == runs_of_seed_1[1]
    assert runs_of_seed_1[0]["test"]["chrf"] > 1, "a score of nothing would be equal to anything"
    assert [run["seed"] for run in row["runs"]] == [1, 2]
    assert row["digest"] == wanted["digest"] and row["signatures"] == wanted["signatures"]

    again = subprocess.run(command, env=script_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert again.stdout == done.stdout
    assert again.stderr.count("done before") == 4 and again.stderr.count("trained before") == 2


def test_what_a_reproduction_leaves(undisturbed):
    runs, done = undisturbed
    row = result(runs)
    run = row["runs"][0]
    assert (run["updates"], run["threads"], run["gpus"]) == (60, 1, [])
    assert run["tokens_per_second"] > 0 and run["parameters"] > 100_000
    # fairseq logs whole seconds, of which a fast machine needs none.
    assert 0 <= run["train_seconds"] < 600
    assert run["average"] in (1, 2) and run["lenpen"] in (1.0, 1.4)
    assert row["summary"]["test"]["chrf"] == {"mean": run["test"]["chrf"], "sd": None}
    assert any("tok:13a" in text for text in row["signatures"])
    assert {"python", "torch"} <= set(row["versions"][0])
    table = (runs / "results/RESULTS.md").read_text(encoding="utf-8")
    assert done.stdout.strip() in table and "| DynamicConv |       1 |" in table
    seed = runs / "smoke/dynamicconv/seed1"
    score = json.loads((seed / f"average{run['average']}.test.score").read_text())
    assert score["chrf"] == run["test"]["chrf"]
    tuned = json.loads((runs / "smoke/dynamicconv/.steps/seed1.tune.json").read_text())["outputs"]
    assert tuned["score"] == run["valid"] == max(one["score"] for one in tuned["tried"])
    assert {one["average"] for one in tuned["tried"]} == {1, 2}, "of three checkpoints no nine can be averaged"
    assert not (ROOT / "benchmarks/results/reproduction/smoke").exists()
    settings = settings_of(load_yaml(find_config("smoke/dynamicconv")), [])
    assert differences(settings, head(seed / "checkpoint_last.pt")[0]) == [], "it would be taken over"


def test_the_table_alone(run_script, tmp_path):
    run_script("reproduce.sh", "--table", env=script_environment(LIGHTCONV_HOME=str(tmp_path)))
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "## Not run" in text and "| WMT14 En-Fr " in text and "`configs/multi30k_en_de`" in text
    assert "smoke" not in text


def test_the_table_of_a_folder_lists_only_what_was_run(undisturbed, run_script, tmp_path):
    """As the commands that fill the folder write it."""
    runs, _ = undisturbed
    results = shutil.copytree(runs / "results", tmp_path / "results")
    written = (results / "RESULTS.md").read_text(encoding="utf-8")
    (results / "RESULTS.md").unlink()
    run_script("reproduce.sh", "--table", "--runs", tmp_path)
    assert (results / "RESULTS.md").read_text(encoding="utf-8") == written
    assert "| DynamicConv |       1 |" in written and "Not run" not in written
