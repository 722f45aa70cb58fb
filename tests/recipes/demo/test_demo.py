"""The demonstration from end to end on a miniature, its refusals, and its report."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from lightconv_plugin.cli.main import main
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.demo import run
from lightconv_plugin.recipes.demo.results import Log, Result, read_log, write_report
from lightconv_plugin.recipes.demo.run import claim
from lightconv_plugin.recipes.demo.training import Training, TrainingFailed, run_together
from tests.recipes.conftest import ROOT, heed_ctrl_c, script_environment, write_parts

DEMO = ROOT / "scripts/demo.sh"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_parts(tmp_path_factory.mktemp("demo corpus") / "text", ("train", "dev", "test"), (600, 20, 20))


def demo(*arguments, timeout=240):
    command = [str(DEMO), *map(str, arguments)]
    return subprocess.run(
        command, env=script_environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def processes_in(folder):
    """Command lines of running processes that name this folder."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    line = file.read().decode(errors="replace").replace("\0", " ")
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


def test_interrupted_continued_and_reused(corpus, tmp_path):
    """Ctrl-C while training ends everything it started; the same command resumes; after that there is nothing to do."""
    work = tmp_path / "the work"
    command = [str(DEMO), str(corpus), "--updates", "12", "--work", str(work)]
    process = subprocess.Popen(
        command, env=script_environment(sys.executable), stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    )
    deadline = time.monotonic() + 200
    while not (work / "transformer/train.log").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130, error
    assert error.splitlines()[-1] == "lightconv demo: interrupted; rerun the same command to resume"
    assert processes_in(work) == []
    assert not (work / "report.md").exists()

    done = demo(*command[1:])
    assert done.returncode == 0, done.stderr
    assert "binarise: done before" in done.stderr
    assert "update 12/12" in done.stderr or "done" in done.stderr
    report = json.loads((work / "report.json").read_text())
    assert [system["system"] for system in report["systems"]] == ["dynamicconv", "transformer"]
    for system in report["systems"]:
        assert system["score"]["n"] == 20 and system["parameters"] > 1e6 and system["seconds"] > 0
    assert len(report["translations"]) == 5
    assert set(report["translations"][0]) == {"source", "reference", "dynamicconv", "transformer"}
    assert "| DynamicConv " in done.stdout and "tok:13a" in done.stdout
    assert done.stdout.strip() == (work / "report.md").read_text().strip()
    # Nothing but the case tells sources and references from the text that was trained on and written.
    for shown in report["translations"]:
        assert all(text == text.lower() for text in shown.values())
    assert done.stderr.splitlines()[-1].endswith(f"now open {work / 'report.html'}")
    page = (work / "report.html").read_text(encoding="utf-8")
    assert all(text in page for text in ("dynamicconv", "transformer", "<svg"))
    made = (work / "report.html").stat().st_mtime_ns

    start = time.monotonic()
    again = demo(*command[1:])
    assert again.returncode == 0
    assert again.stdout == done.stdout
    assert again.stderr.count("trained and scored before") == 2 and "training" not in again.stderr
    assert (work / "report.html").stat().st_mtime_ns == made
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["/nowhere/at/all"], "no folder /nowhere/at/all"),
        ([ROOT / "configs"], "cannot tell the language pair"),
        (["--updates", "11"], "--updates must be at least 12, got 11"),
        (["--updates", "few"], "--updates: must be a whole number of at least 1, got 'few'"),
        (["--src", "en"], "--src and --tgt need a folder of text"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["a", "b"], "unrecognized arguments: b"),
    ],
    ids=["no-folder", "no-corpus", "few-updates", "not-a-number", "language", "option", "two-folders"],
)
def test_wrong_arguments(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["demo", *map(str, arguments)])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_without_the_report_s_libraries_the_table_is_what_to_open(tmp_path, monkeypatch, capsys):
    for system in run.SYSTEMS:
        (tmp_path / system).mkdir()
        (tmp_path / system / "result.json").touch()
    for name in [name for name in sys.modules if name.startswith("lightconv_plugin.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run.write_page(tmp_path) == tmp_path / "report.md"
    assert "matplotlib is not installed: pip install '.[report]'" in capsys.readouterr().err


def test_help_works_without_any_set_up():
    done = subprocess.run([DEMO, "--help"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "scripts/demo.sh [DIR]" in done.stdout


def test_a_folder_is_claimed_for_one_training(tmp_path, capsys):
    folder = tmp_path / "dynamicconv"
    claim(folder, "key one")
    (folder / "checkpoint_last.pt").touch()
    claim(folder, "key one")
    assert (folder / "checkpoint_last.pt").exists()
    claim(folder, "key two")
    assert not (folder / "checkpoint_last.pt").exists()
    assert "changed, trained again" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "precious").touch()
    with pytest.raises(InputError, match="exists and is not from a demo"):
        claim(tmp_path, "key")
    assert (tmp_path / "precious").exists()


LOG = """\
[2026-01-01 10:00:00,000][fairseq_cli.train][INFO] - num. shared model params: 2,493,440 (num. trained: 2,493,440)
[2026-01-01 10:01:00,000][train][INFO] - epoch 001 | loss 9.1 | wps 3000 | ups 1 | train_wall 50 | wall 55
[2026-01-01 10:02:00,000][train][INFO] - epoch 002 | loss 8.1 | wps 1000 | ups 1 | train_wall 99 | wall 70
[2026-01-01 10:03:00,000][fairseq_cli.train][INFO] - num. shared model params: 2,493,440 (num. trained: 2,493,440)
[2026-01-01 10:04:00,000][train][INFO] - epoch 002 | loss 8.1 | wps 5000 | ups 1 | train_wall 30 | wall 31
"""


def test_the_log_of_a_training_that_was_resumed(tmp_path):
    (tmp_path / "train.log").write_text(LOG)
    assert read_log(tmp_path / "train.log") == Log(parameters=2493440, tokens_per_second=4000.0, seconds=80.0)


def test_a_log_without_an_epoch_is_refused(tmp_path):
    (tmp_path / "train.log").write_text(LOG.splitlines()[0])
    with pytest.raises(ValueError, match="not the log of a training that finished an epoch"):
        read_log(tmp_path / "train.log")


def test_the_report_is_a_table_with_translations(tmp_path):
    (tmp_path / "raw").mkdir()
    for lang, text in (("en", "The dog sleeps."), ("de", "Der Hund schläft.")):
        (tmp_path / f"raw/test.{lang}").write_text(f"{text}\n" * 2)
    (tmp_path / "corpus.json").write_text('{"lowercase": true}')
    generated = tmp_path / "x.gen"
    lines = [
        f"{kind}-{i}\t{score}der hund schläft ."
        for i in (0, 1)
        for kind, score in (("T", ""), ("H", "0\t"), ("D", "0\t"))
    ]
    last = "Generate test with beam=5: BLEU4 = 100.00, 100.0/100.0/100.0/100.0 (BP=1.000)"
    generated.write_text("\n".join([*lines, last]) + "\n")
    score = {"n": 2, "bleu_tok": 100.0, "sacrebleu": 99.5, "chrf": 98.25, "signature": "tok:13a"}
    results = [
        Result("key", system, score, 1234567, 4321.6, 90.0, 990, 3, 1, True, str(generated))
        for system in ("dynamicconv", "transformer")
    ]
    text = write_report(tmp_path, tmp_path, "en", "de", results)
    row = "| DynamicConv | 100.00 | 99.50 | 98.25 | 1,234,567 | 4,322 | 1.5 min |"
    assert row in re.sub(" +", " ", text)
    assert "en → de, 2 test sentences; 990 updates, the last 3 checkpoints averaged; beam 5." in text
    assert "at the same time, each with 1 thread;" in text
    for who in ("source                 the dog sleeps.", "reference              der hund schläft."):
        assert f"\n{who}\n" in text
    assert "\nDynamicConv            der hund schläft.\n" in text
    widths = {len(line) for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    results[0].write(tmp_path / "result.json")
    assert Result.read(tmp_path / "result.json") == results[0]
    with pytest.raises(FileNotFoundError):
        Result.read(tmp_path / "none.json")


def training(name, code, tmp_path):
    return Training(name, ["bash", "-c", code], 300, tmp_path, "key")


def test_progress_of_two_trainings(tmp_path, capsys):
    line = "epoch 002:     50 / 100 loss=2.5, nll_loss=1.0, ppl=2.14, wps=2993, ups=2.23, num_updates=150"
    both = [training(name, f"echo '[x][train_inner][INFO] - {line}'", tmp_path) for name in ("one", "two")]
    run_together(both, os.environ)
    assert "one: done  |  two: done" in capsys.readouterr().err


def test_the_state_is_that_of_the_last_progress_line(tmp_path):
    line = "epoch 002:     50 / 100 loss=2.5, nll_loss=1.0, ppl=2.14, wps=2993, ups=2.23, num_updates=150"
    one = training("one", f"echo '{line}'", tmp_path)
    one.start(os.environ)
    one.process.wait()
    deadline = time.monotonic() + 10
    while one.state == "starting" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert one.state == "update 150/300 loss 2.50 2,993 tokens/s"


def test_one_failure_ends_the_others_and_shows_its_output(tmp_path):
    start = time.monotonic()
    other = training("other", "sleep 60", tmp_path)
    with pytest.raises(TrainingFailed, match=r"(?s)bad ended with status 3:\nthe reason.*train\.log"):
        run_together([other, training("bad", "echo the reason; sleep 0.5; exit 3", tmp_path)], os.environ)
    assert other.process.returncode == -signal.SIGTERM
    assert time.monotonic() - start < 20
