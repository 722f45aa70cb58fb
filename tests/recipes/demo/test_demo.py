"""The demonstration from end to end on a miniature, its refusals, and its report."""

import fcntl
import json
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml

import lightconv_plugin.report
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.demo import run
from lightconv_plugin.recipes.demo.results import Result, write_report
from lightconv_plugin.recipes.demo.run import claim, costs
from lightconv_plugin.recipes.training.child import TrainingFailed
from lightconv_plugin.records.file import append
from lightconv_plugin.text.recipe import Recipe
from tests import programs
from tests.recipes.conftest import ROOT, heed_ctrl_c, script_environment, write_parts
from tests.recipes.training.trainings import commands

DEMO = ROOT / "scripts/demo.sh"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_parts(tmp_path_factory.mktemp("demo corpus") / "text", ("train", "dev", "test"), (600, 20, 20))


@pytest.fixture
def environment(tmp_path):
    """That of a workspace with the demonstration's configurations, but for the size of the models."""
    for system in run.SYSTEMS:
        config = yaml.safe_load((ROOT / f"configs/demo/{system}.yaml").read_text(encoding="utf-8"))
        for end, size in {"_embed_dim": 16, "put_dim": 16, "coder_layers": 1, "_kernel_size_list": [3]}.items():
            config["model"].update((name, size) for name in config["model"] if name.endswith(end))
        path = tmp_path / f"home/demo/{system}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{yaml.safe_dump(config)}", encoding="utf-8")
    return script_environment(LIGHTCONV_HOME=str(tmp_path / "home"))


def test_interrupted_continued_and_reused(corpus, environment, tmp_path):
    """Ctrl-C while training ends everything it started; the same command resumes; after that there is nothing to do."""
    work = tmp_path / "the work"
    command = [str(DEMO), str(corpus), "--updates", "12", "--work", str(work)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c)
    programs.wait_until((work / "transformer/train.log").exists, process, seconds=200)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130, error
    assert error.splitlines()[-1] == "lightconv demo: interrupted; rerun the same command to resume"
    assert list(commands(work)) == []
    assert not (work / "report.md").exists()

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "binarise: done before" in done.stderr
    assert "update 12/12" in done.stderr or "done" in done.stderr
    report = json.loads((work / "report.json").read_text())
    assert [system["system"] for system in report["systems"]] == ["dynamicconv", "transformer"]
    for system in report["systems"]:
        assert system["score"]["n"] == 20 and system["parameters"] > 1e4
        assert 0 <= system["seconds"] < 240  # fairseq counts whole seconds, and twelve updates may take half of one
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
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0
    assert again.stdout == done.stdout
    assert again.stderr.count("trained and scored before") == 2 and "training" not in again.stderr
    assert (work / "report.html").stat().st_mtime_ns == made
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    "renamed, advice",
    [
        ({"de": "ca"}, "--tokenizer none"),
        ({"de": "tr"}, "--tokenizer none"),
        ({"test": "train_2"}, "--train-prefix"),
    ],
    ids=["no-tokeniser", "no-rules", "several-texts"],
)
def test_what_the_demo_has_no_option_for_has_a_command(renamed, advice, tmp_path, refusal):
    folder = write_parts(tmp_path / "text", ("train", "dev", "test"), (60, 5, 5))
    for path in folder.iterdir():
        part, lang = path.name.split(".")
        path.rename(folder / f"{renamed.get(part, part)}.{renamed.get(lang, lang)}")
    said = refusal("demo", folder, "--work", tmp_path / "work").splitlines()[-1]
    assert said.endswith(f" lightconv prepare parallel {advice}") and "`" not in said


def test_without_the_report_s_libraries_the_table_is_what_to_open(tmp_path, monkeypatch, capsys):
    for system in run.SYSTEMS:
        (tmp_path / system).mkdir()
        (tmp_path / system / "result.json").touch()
    for name in [name for name in sys.modules if name.startswith("lightconv_plugin.report")]:
        monkeypatch.delitem(sys.modules, name)
    # Importing it again sets this attribute, which is restored as well.
    monkeypatch.setattr(lightconv_plugin, "report", lightconv_plugin.report)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run.write_page(tmp_path) == tmp_path / "report.md"
    assert "matplotlib is not installed: pip install '.[report]'" in capsys.readouterr().err


def test_a_folder_is_claimed_for_one_training(tmp_path, capsys):
    folder = tmp_path / "dynamicconv"
    claim(folder, "key one")
    (folder / "checkpoint_last.pt").touch()
    claim(folder, "key one")
    assert (folder / "checkpoint_last.pt").exists()
    claim(folder, "key two")
    assert not (folder / "checkpoint_last.pt").exists()
    assert "changed, trained again" in capsys.readouterr().err
    (folder / "demo.key").unlink()  # killed before it was written
    claim(folder, "key two")
    assert (folder / "demo.key").is_file() and not list(tmp_path.glob(".*"))


def test_a_training_that_a_killed_demo_has_left_is_waited_for(tmp_path, capsys):
    folder = tmp_path / "dynamicconv"
    claim(folder, "key one")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish():
            (folder / "checkpoint_last.pt").touch()
            fcntl.flock(lock, fcntl.LOCK_UN)

        threading.Timer(0.3, finish).start()
        claim(folder, "key two")
    assert "waiting: a training is writing to" in capsys.readouterr().err
    assert {path.name for path in folder.iterdir()} == {"demo.key"}


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "precious").touch()
    with pytest.raises(InputError, match="exists and is not from a demo"):
        claim(tmp_path, "key")
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    "name, mark",
    [("report.md", "transformer/demo.key"), ("report.json", "data/.steps"), ("report.html", "data/.steps")],
)
def test_a_report_of_something_else_is_left_alone(name, mark, tmp_path, monkeypatch, refusal):
    pytest.importorskip("fairseq")
    monkeypatch.setattr(run, "write_corpus", lambda *_: pytest.fail("work has begun"))
    (tmp_path / name).write_text("precious")
    text = refusal("demo", "--work", tmp_path)
    said = f"{tmp_path / name} exists and is not from a demo: choose another --work folder"
    assert said in text and [path.name for path in tmp_path.iterdir()] == [name]
    (tmp_path / mark).parent.mkdir()
    (tmp_path / mark).write_text("key")
    with pytest.raises(pytest.fail.Exception, match="work has begun"):
        refusal("demo", "--work", tmp_path)


def test_a_training_without_a_finished_epoch_is_an_error(tmp_path):
    append(tmp_path, {"record": "start", "update": 0, "parameters": 7})
    with pytest.raises(TrainingFailed, match="no records of a training that finished an epoch"):
        costs(tmp_path)
    values = {"wps": 4000.0, "train_wall": 80.0}
    append(tmp_path, {"record": "statistics", "part": "train/epoch", "epoch": 1, "update": 9, "values": values})
    assert costs(tmp_path) == (7, 4000.0, 80.0)


def test_the_report_is_a_table_with_translations(tmp_path):
    (tmp_path / "raw").mkdir()
    for lang, text in (("en", "The dog sleeps."), ("de", "Der Hund schläft.")):
        (tmp_path / f"raw/test.{lang}").write_text(f"{text}\n" * 2)
    about = {"lowercase": True, "text": {"de": Recipe("moses", "de").as_json()}}
    (tmp_path / "corpus.json").write_text(json.dumps(about))
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
    about["text"]["de"] = Recipe("jieba", "zh").as_json()
    (tmp_path / "corpus.json").write_text(json.dumps(about))
    generated.write_text(generated.read_text().replace("der hund schläft .", "狗 在 睡觉 。"))
    assert "\nDynamicConv            狗在睡觉。\n" in write_report(tmp_path, tmp_path, "en", "de", results)
