"""The way from raw text to binary data: what it makes, that it makes it once, and that interruptions heal."""

import dataclasses
import errno
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from lightconv_plugin.cli.main import main
from lightconv_plugin.errors import CorpusError
from lightconv_plugin.paths import package_dir
from lightconv_plugin.recipes.data.binarise import binarise
from lightconv_plugin.recipes.data.bpe import encoder, learn_codes
from lightconv_plugin.recipes.data.tasks import TASKS
from tests import programs
from tests.recipes.conftest import ROOT, check_recipes, heed_ctrl_c, script_environment, write_parts
from tests.recipes.data.archive_server import LOCAL, serve
from tests.recipes.data.preparations import prepare
from tests.warm_python import warm_python

STEPS = ("raw text", "tokenise", "learn 200 BPE merges", "apply BPE", "binarise")
ARGUMENTS = ("--bpe", "200", "--workers", "2")
LANGS = ("en", "de")


def test_everything_is_there(prepared):
    raw, out = prepared
    for kind in ("raw", "tok", "bpe"):
        for split, size in (("train", 300), ("valid", 20), ("test", 20)):
            for lang in ("en", "de"):
                assert len((out / kind / f"{split}.{lang}").read_text().splitlines()) == size
    assert (out / "raw/train.de").read_bytes() == (raw / "train.de").read_bytes()
    assert (out / "data-bin/dict.en.txt").read_bytes() == (out / "data-bin/dict.de.txt").read_bytes()
    assert {path.name for path in (out / "data-bin").glob("*.bin")} == {
        f"{split}.en-de.{lang}.bin" for split in ("train", "valid", "test") for lang in ("en", "de")
    }
    about = json.loads((out / "corpus.json").read_text())
    assert about["splits"] == {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    assert (about["src"], about["tgt"], about["lowercase"]) == ("en", "de", True)
    check_recipes(out)


def test_the_text_is_lower_cased_tokenised_and_joined_again_by_removing_bpe(prepared):
    _, out = prepared
    tok = (out / "tok/train.de").read_text()
    assert tok == tok.lower() and " ." in tok
    assert (out / "bpe/train.de").read_text().replace("@@ ", "") == tok


def test_the_second_run_does_no_work(prepared, tmp_path):
    raw, out = prepared
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and ".steps" not in str(path)}
    start = time.monotonic()
    said = prepare(tmp_path, "multi30k_en_de", "--data", raw, "--out", out, *ARGUMENTS)
    assert [line for line in said.splitlines() if "done before" in line] == [f"{s}: done before" for s in STEPS]
    assert time.monotonic() - start < 5
    after = {path: path.stat().st_mtime_ns for path in before if path.name != "corpus.json"}
    assert after == {path: before[path] for path in after}


def test_new_raw_text_is_taken_up(prepared, tmp_path):
    """A changed test set: the merges, learned on the training text, stay."""
    raw, out = (shutil.copytree(path, tmp_path / name) for path, name in zip(prepared, "ab", strict=True))
    lines = (raw / "test_2016_flickr.de").read_text().splitlines()
    (raw / "test_2016_flickr.de").write_text("\n".join(["Ganz neu.", *lines[1:]]) + "\n")
    said = prepare(tmp_path, "multi30k_en_de", "--data", raw, "--out", out, *ARGUMENTS)
    assert [step for step in STEPS if f"{step}: done before" in said] == ["learn 200 BPE merges"]
    assert (out / "tok/test.de").read_text().startswith("ganz neu .\n")


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_an_interruption_heals(tmp_path, stop):
    raw = write_parts(tmp_path / "raw", ("train", "valid", "test"), (4000, 10, 10))
    out = tmp_path / "out"
    arguments = ("multi30k_en_de", "--data", raw, "--out", out, "--valid-prefix", "valid", "--test-prefix", "test")
    arguments += ("--bpe", "50", "--workers", "2")
    process = subprocess.Popen(
        [sys.executable, "-m", "lightconv_plugin", "prepare", *arguments],
        env=script_environment(sys.executable),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )
    programs.wait_until((out / "tok/train.en.tmp").exists, process)
    os.killpg(process.pid, stop)
    error = process.communicate(timeout=60)[1]
    assert not (out / ".steps/tok.json").exists() and not list((out / "tok").glob("*.en"))
    if stop == signal.SIGINT:
        assert process.returncode == 130
        last = [line for line in error.splitlines() if line.strip()][-1]  # a progress bar may be wiped after it
        # The bar is wiped before it, unless the signal came while the bar was being made.
        assert last.endswith("lightconv prepare: interrupted: run the same command again to resume")
        assert "Traceback" not in error
        assert not list(out.rglob("*.tmp"))
        return  # what goes on is the same
    said = prepare(tmp_path, *arguments)
    assert "raw text: done before" in said and "tokenise: done before" not in said
    assert len((out / "tok/train.de").read_text().splitlines()) == 4000
    assert (out / "data-bin/train.en-de.de.bin").stat().st_size > 0
    assert not list(out.rglob("*.tmp"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data", ".", "--out", "x"], "has neither train.en nor train.en.gz"),
        (["--mirror", "empty"], "empty/train.en.gz"),
    ],
    ids=["no-files", "bad-mirror"],
)
def test_one_clear_line_for_wrong_arguments(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    said = prepare(tmp_path / "home", "multi30k_en_de", *arguments, status=2)
    assert said.splitlines()[-1].startswith("lightconv prepare: error: ")
    assert message in said.splitlines()[-1]
    assert not list(tmp_path.rglob("train*.gz*"))


def test_unequal_sides_are_named(tmp_path):
    raw = write_parts(tmp_path / "raw", ("train", "val", "test_2016_flickr"), (5, 2, 2))
    (raw / "val.de").write_text("Nur eine Zeile.\n")
    said = prepare(tmp_path, "multi30k_en_de", "--data", raw, "--out", tmp_path / "out", status=2)
    last = said.splitlines()[-1]
    assert "val.en has 2 lines but" in last and "val.de has 1" in last
    assert not (tmp_path / "out/raw").exists() or not list((tmp_path / "out/raw").glob("*.en"))


def test_what_fairseq_says_when_it_fails(tmp_path, monkeypatch):
    from lightconv_plugin.recipes.data import binarise

    raw = write_parts(tmp_path / "raw", ("train", "val", "test_2016_flickr"), (5, 2, 2))
    monkeypatch.setattr(binarise, "_texts", lambda *arguments: ["--trainpref", "nowhere"])
    said = prepare(tmp_path, "multi30k_en_de", "--data", raw, "--out", tmp_path / "out", "--bpe", "5", status=2)
    last = said.splitlines()[-1]
    assert "fairseq-preprocess failed with status 1: " in last
    assert "nowhere" in last and last.endswith(f"(see {tmp_path}/out/preprocess.log)")


def test_fairseq_is_not_looked_for_in_the_prepared_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", warm_python())
    for name in ("fairseq_cli.py", "lightconv_plugin.py"):
        (tmp_path / name).write_text("raise SystemExit('of the prepared folder')")
    (tmp_path / "train.en").write_text("a b\na\n")
    binarise(tmp_path, ["train"], "{}", ["--source-lang=en", "--only-source"], 1, tmp_path / "data-bin")
    log = (tmp_path / "preprocess.log").read_text()
    assert f"user_dir='{package_dir()}'" in log and "2 sents" in log


def test_test_sets_of_other_languages_are_left_out(tmp_path):
    """Of the three test sets not all have been published in Czech and French."""
    raw = tmp_path / "raw"
    raw.mkdir()
    for name in ("train", "val", "test_2016_flickr", "test_2017_mscoco"):
        (raw / f"{name}.en").write_text("the house is big\nthe house is small\n")
        (raw / f"{name}.cs").write_text("dum je velky\ndum je maly\n")
    for lang in ("en", "de"):
        (raw / f"test_2017_flickr.{lang}").write_text("the house is big\n")
    options = ("--src", "en", "--tgt", "cs", "--bpe", "5", "--workers", "1")
    prepare(tmp_path, "multi30k_en_de", "--data", raw, "--out", tmp_path / "out", *options)
    about = json.loads((tmp_path / "out/corpus.json").read_text())
    assert list(about["splits"].values()) == ["train", "val", "test_2016_flickr", "test_2017_mscoco"]


def test_merges_are_those_of_subword_nmt_on_both_texts_together(tmp_path):
    from subword_nmt import learn_bpe

    texts = [tmp_path / "a", tmp_path / "b"]
    texts[0].write_text("the lower the newer lowest\n" * 3)
    texts[1].write_text("der niedrige der neuere newer lower\n" * 2)
    learn_codes(texts, 30, tmp_path / "codes")
    expected = io.StringIO()
    learn_bpe.learn_bpe(io.StringIO("".join(path.read_text() for path in texts)), expected, 30)
    assert (tmp_path / "codes").read_text() == expected.getvalue()


def test_encoding_is_that_of_subword_nmt_also_when_it_forgets(tmp_path, monkeypatch):
    from subword_nmt.apply_bpe import BPE

    text = "the lower the newer lowest newest slower"
    (tmp_path / "text").write_text(f"{text}\n" * 3)
    learn_codes([tmp_path / "text"], 12, tmp_path / "codes")
    with (tmp_path / "codes").open() as codes:
        expected = BPE(codes).process_line(text)
    assert "@@ " in expected
    monkeypatch.setattr("lightconv_plugin.text.subwords._CACHED_WORDS", 2)
    encode = encoder(tmp_path / "codes")
    assert [encode(text), encode(""), encode(text)] == [expected, "", expected]


NAMES = ("train", "val", "test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")


def test_from_the_web_interrupted_and_taken_up(tmp_path):
    """A mirror with all ten files: killed in the second one, cut off in the third, then done; then nothing to do."""
    raw = write_parts(tmp_path / "raw", NAMES, (200, 10, 10, 5, 5))
    files = {
        f"{name}.{lang}.gz": gzip.compress((raw / f"{name}.{lang}").read_bytes()) for name in NAMES for lang in LANGS
    }
    # The script is what is run here, in a checkout of its own: downloads go below it.
    copy = shutil.copytree(ROOT / "scripts", tmp_path / "checkout/scripts")
    (tmp_path / "checkout/lightconv_plugin").symlink_to(ROOT / "lightconv_plugin")
    down = tmp_path / "checkout/data/multi30k"
    with serve(files) as server:
        command = [copy / "prepare.sh", "multi30k_en_de", "--mirror", server.address, "--out", tmp_path / "out"]
        command += ["--any-size", "--bpe", "100", "--workers", "2"]
        environment = script_environment(**LOCAL)
        server.slow["train.de.gz"] = 2000
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as process:
            programs.wait_until((down / "train.de.gz.part").exists, process)
            os.killpg(process.pid, signal.SIGKILL)
        assert sorted(path.name for path in down.iterdir()) == ["train.de.gz.part", "train.en.gz"]
        server.slow.clear()
        server.cuts["val.en.gz"] = [100]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert [path for path, _ in server.requests].count("train.en.gz") == 1
        assert ("val.en.gz", 100) in server.requests
        server.requests.clear()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, server.requests) == (0, [])
    assert done.stderr.count("done before") == len(STEPS)
    assert sorted(path.name for path in down.iterdir()) == sorted(files)
    assert list(json.loads((tmp_path / "out/corpus.json").read_text())["splits"]) == [
        *("train", "valid", "test", "test1", "test2")
    ]
    assert (tmp_path / "out/data-bin/test2.en-de.de.idx").is_file()


def test_the_usual_number_of_merges(tmp_path):
    """4,000 merges are learned for Multi30k unless another number is given."""
    raw = write_parts(tmp_path / "raw", NAMES[:3], (30, 2, 2))
    (raw / "train.de").write_text(("x " * 251 + "\n") * 30)  # no pair is left: it ends there
    for options, learned in (
        ((), "learn 4000 BPE merges ..."),
        (("--bpe", "50"), "learn 50 BPE merges again, changed: "),
    ):
        said = prepare(tmp_path, "multi30k_en_de", "--data", raw, "--out", tmp_path / "out", *options, status=2)
        assert learned in said
        assert "no training pair is left with --max-len 250 and --max-ratio 9.0" in said.splitlines()[-1]
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert not (tmp_path / "out/bpe/train.de").exists()


def test_the_smoke_task_needs_no_files(tmp_path):
    prepare(tmp_path, "smoke", "--bpe", "50", "--workers", "1")
    out = tmp_path / "runs/smoke/data"
    assert len((out / "text/train.en").read_text().splitlines()) == 600
    assert (out / "data-bin/train.en-de.de.bin").stat().st_size > 0
    assert prepare(tmp_path, "smoke", "--bpe", "50", "--workers", "1").count("done before") == 6
    assert "unrecognized arguments: --mirror" in prepare(tmp_path, "smoke", "--mirror", "x", status=2)


# The scripts of 0.1.0; each calls prepare.sh with its task.
CALLS = {f"prepare_{task}.sh": task for task in TASKS if task not in ("multi30k_en_de", "parallel")}
CALLS |= {"prepare_multi30k.sh": "multi30k_en_de", "prepare.sh parallel": "parallel"}


@pytest.mark.parametrize("call", CALLS)
def test_scripts_call_prepare_with_their_task(call, run_script):
    done = run_script(*call.split(), "--help", env=script_environment("/bin/echo"))
    assert done.stdout.endswith(f" prepare {CALLS[call]} --help\n")


@pytest.mark.parametrize("task", TASKS)
def test_a_task_has_a_help_of_its_own(task, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", task, "--help"])
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and said.startswith(f"usage: lightconv prepare {task} ")
    assert "--data DIR" in said


def test_the_script_lists_the_tasks(run_script):
    done = run_script("prepare.sh", "--help")
    assert done.stdout.startswith("usage: lightconv prepare TASK ") and len(TASKS) == 12
    for task in TASKS:
        assert f"\n  {task} " in done.stdout


@pytest.mark.parametrize(
    "error, line",
    [
        (CorpusError("no text"), "lightconv prepare: error: no text\n"),
        (PermissionError(errno.EACCES, "Permission denied", "f"), "error: [Errno 13] Permission denied: 'f'\n"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "no space left on the disk: free some and run the same command again to resume\n",
        ),
    ],
    ids=["corpus", "os", "disk"],
)
def test_what_is_wrong_is_one_line(error, line, tmp_path, monkeypatch):
    def fail(request):
        raise error

    monkeypatch.setitem(TASKS, "smoke", dataclasses.replace(TASKS["smoke"], plan=fail))
    said = prepare(tmp_path, "smoke", status=2)
    assert line in said and said.count("\n") == 1
