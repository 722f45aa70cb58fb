"""benchmarks.recipes: trainings at the same time, what becomes of them, time that runs out; one real training."""

import argparse
import json
import shlex
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

from benchmarks import recipes, report
from tests.warm_python import warm_python

LOG = "[2026-01-02 03:04:05,678][train_inner][INFO] - "
STEP = LOG + '{{"epoch": 1, "update": 0.1, "loss": "{loss}", "num_updates": "{update}", "wall": "1"}}'
VALID = (
    '[2026-01-02 03:04:05,678][valid][INFO] - {{"epoch": 1, "valid_loss": "{loss}", "valid_num_updates": "{update}"}}'
)
SCORE = {"sacrebleu": 12.5, "n": 3}


def trains(losses=(9.0, 4.0), then="", checkpoint=True):
    """A stand-in for train.sh in a training's folder."""
    lines = [STEP.format(loss=loss, update=n) for n, loss in enumerate(losses, 1)]
    lines.append(VALID.format(loss=losses[-1] + 1, update=len(losses)))
    log = "\n".join(lines)
    return f"printf '%s\\n' {shlex.quote(log)} >train.log; {'touch checkpoint_last.pt;' * checkpoint} {then}"


SCORES = f"echo some words; echo {shlex.quote(json.dumps(SCORE))}"


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Runs trainings and scorings that are shell scripts; returns the results by system and the wall time."""

    def run(scripts, score=SCORES, seconds=60, updates=2):
        def command(folder, script):
            return ["bash", "-c", f"cd {shlex.quote(str(folder))}; {script}"]

        monkeypatch.setattr(recipes, "training_command", lambda name, folder, *_: command(folder, scripts[name]))
        monkeypatch.setattr(recipes, "scoring_command", lambda folder, _: command(folder, score))
        options = argparse.Namespace(seconds=seconds, updates=updates, no_score=False)
        runs = [recipes.Run(name, tmp_path / "with space" / name, options, 1) for name in scripts]
        start = time.monotonic()
        return recipes.measure(runs, options), time.monotonic() - start

    return run


def test_all_train_at_the_same_time_and_are_scored(measure):
    results, seconds = measure({name: "sleep 1.5; " + trains() for name in recipes.SYSTEMS})
    assert list(results) == list(recipes.SYSTEMS) and seconds < 6
    for result in results.values():
        assert (result["status"], result["updates"], result["score"]) == ("ok", 2, SCORE)
        assert result["loss"] == [(1, 9.0), (2, 4.0)] and result["valid_loss"] == [(2, 5.0)]
        assert 1.2 < result["seconds"] < 5


def test_what_fails_is_said_and_costs_the_others_nothing(measure):
    results, _ = measure(
        {
            "dynamicconv": trains(losses=(4.0, 4.5)),
            "lightweightconv": "echo 'ValueError: no such thing' >train.log; echo train.sh: ended >&2; exit 1",
            "talkconv": trains(losses=(9.0, float("nan"))),
            "transformer": trains(),
        }
    )
    status = {name: result["status"] for name, result in results.items()}
    assert status["dynamicconv"] == "did not learn: training loss 4.000 → 4.500"
    assert status["lightweightconv"] == "training failed (1): ValueError: no such thing"
    assert status["talkconv"] == "did not learn: training loss 9.000 → nan"
    assert status["transformer"] == "ok"
    assert [name for name, result in results.items() if "score" in result] == ["dynamicconv", "talkconv", "transformer"]


@pytest.mark.parametrize(
    ("score", "status"),
    [
        ("echo no data >&2; exit 2", "scoring failed (2): no data"),
        ("echo not JSON", "scoring failed: it printed no JSON: nothing was said"),
        ("true", "scoring failed: it printed no JSON: nothing was said"),
    ],
)
def test_scoring_that_fails(measure, score, status):
    results, _ = measure({"talkconv": trains()}, score)
    assert results["talkconv"]["status"] == status and results["talkconv"]["loss"]


def test_no_log_and_no_checkpoint(measure):
    results, _ = measure({"talkconv": "true", "dynamicconv": trains(checkpoint=False)})
    assert (
        results["talkconv"]["status"] == "did not learn: training loss unknown" and results["talkconv"]["updates"] == 0
    )
    assert results["dynamicconv"]["status"] == "ok" and "score" not in results["dynamicconv"]


def test_fewer_updates_than_asked_for(measure):
    results, _ = measure({"talkconv": trains()}, updates=3)
    assert results["talkconv"]["status"] == "stopped" and results["talkconv"]["score"] == SCORE


def test_time_that_runs_out_ends_a_training_and_what_it_started(measure, tmp_path):
    child = tmp_path / "child"
    results, seconds = measure(
        {"talkconv": trains(then=f"sleep 300 & echo $! >{child}; wait"), "dynamicconv": trains()}, seconds=2
    )
    assert seconds < 10 and results["talkconv"]["status"].startswith("out of time (")
    assert results["talkconv"]["loss"] and "score" not in results["talkconv"]
    assert results["dynamicconv"]["status"] == "ok"
    assert gone(int(child.read_text()))


def test_what_ignores_the_signal_is_killed(measure, monkeypatch):
    monkeypatch.setattr(recipes, "_TO_STOP", 0.5)
    results, seconds = measure({"talkconv": trains(then="trap '' TERM; sleep 300 & wait; sleep 300")}, seconds=1)
    assert seconds < 6 and results["talkconv"]["status"].startswith("out of time (-9)")


def gone(process):
    for _ in range(50):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_part_that_is_ended_leaves_nothing_behind(tmp_path):
    """gpu_fairseq.sh's `timeout` sends SIGTERM."""
    (tmp_path / "dict.en.txt").write_text("a 1\n", encoding="utf-8")
    program = """\
        from benchmarks import recipes
        recipes.training_command = lambda name, folder, *_: ["bash", "-c", f"echo $$ >{folder}/pid; exec sleep 300"]
        recipes.main()
    """
    options = ("--data", tmp_path, "--folder", tmp_path / "runs", "--systems", "talkconv")
    process = subprocess.Popen([warm_python(), "-c", textwrap.dedent(program), *options])
    pid = tmp_path / "runs" / "talkconv" / "pid"
    for _ in range(600):
        if pid.exists() and pid.read_text().strip():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143 and gone(int(pid.read_text()))


def test_the_commands(tmp_path):
    options = recipes.parser().parse_args(["--data", str(tmp_path), "--updates", "90", "--device", "cuda"])
    script, *arguments = recipes.training_command("talkconv", tmp_path / "it's", options, 18.0)
    assert script.endswith("scripts/train.sh") and arguments[4].endswith("configs/multi30k_en_de/talkconv.yaml")
    settings = dict(argument.split("=", 1) for argument in arguments[5:])
    assert settings["task.data"] == f"'{tmp_path}'" and settings["checkpoint.save_dir"] == f"'{tmp_path}/it\\'s'"
    assert settings["optimization.max_update"] == settings["lr_scheduler.total_num_update"] == "90"
    assert settings["lr_scheduler.warmup_updates"] == "10" and settings["optimization.stop_time_hours"] == "0.005"
    assert (settings["common.bf16"], settings["common.cpu"]) == ("true", "false")
    script, *arguments = recipes.scoring_command(tmp_path, options)
    assert script.endswith("scripts/evaluate.sh") and "--cpu" not in arguments
    options.device = "cpu"
    assert "--cpu" in recipes.scoring_command(tmp_path, options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/nowhere"], "--data: /nowhere is not a data-bin folder: it has no dict.*.txt"),
        (["--data", "/nowhere", "--json", "/nowhere/a.json"], "--json: /nowhere is not a folder"),
    ],
)
def test_wrong_options(capsys, arguments, message):
    assert report.run(lambda: recipes.main(arguments)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_a_real_training(tmp_path, capsys, monkeypatch):
    from tests import fairseq_cli

    fairseq_cli.write_corpus(tmp_path)
    prefixes = [f"--{name}pref={tmp_path / name}" for name in ("train", "valid", "test")]
    languages = ("--source-lang=en", "--target-lang=de", "--joined-dictionary", "--workers=1")
    fairseq_cli.run("preprocess", *languages, *prefixes, f"--destdir={tmp_path / 'data-bin'}")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own stays
    arguments = ["--data", tmp_path / "data-bin", "--updates", 6, "--systems", "lightweightconv", "--seconds", 240]
    arguments += ["--threads", 1, "--json", tmp_path / "recipes.json"]
    status = report.run(lambda: recipes.main([str(argument) for argument in arguments]))
    out, error = capsys.readouterr()
    assert status == 0, error
    content = json.loads((tmp_path / "recipes.json").read_text(encoding="utf-8"))
    result = content["systems"]["lightweightconv"]
    assert (content["benchmark"], content["dtype"], result["status"]) == ("recipes", "bfloat16", "ok")
    assert result["updates"] == 6 and len(result["loss"]) == 6 and result["parameters"] > 1e6
    assert 0 <= result["score"]["sacrebleu"] <= 100 and result["score"]["n"] == 12
    assert "| lightweightconv | " in out and not list(tmp_path.glob("*.part*"))
