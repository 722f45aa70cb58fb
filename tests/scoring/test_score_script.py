"""scripts/score.sh: what it passes to fairseq-generate and what to `lightconv score`."""

import json
import os
import subprocess
import sys

import pytest

from lightconv_plugin.cli import main

pytest.importorskip("fairseq")


@pytest.fixture(scope="module")
def score_script(repository, toy_data):
    def run(checkpoint, *arguments):
        environment = os.environ | {"LIGHTCONV_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        command = [str(repository / "scripts/score.sh"), str(toy_data), str(checkpoint), *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)

    return run


@pytest.fixture
def checkpoint(toy_training, tmp_path):
    (tmp_path / "model.pt").hardlink_to(toy_training / "checkpoint4.pt")
    return tmp_path / "model.pt"


SEARCH = ("--beam", "2", "--max-len-b", "8", "--cpu")


def test_options_go_where_they_belong(score_script, checkpoint, toy_data, tmp_path, capsys):
    (tmp_path / "other").write_text("DEN HUND\n" * 12, encoding="utf-8")
    corpus = toy_data.parent
    (corpus / "raw").mkdir()
    (corpus / "raw/test.en").write_bytes((corpus / "test.en").read_bytes())
    (corpus / "corpus.json").write_text('{"lowercase": true}')
    options = ("--compound-split", "--against", tmp_path / "other", "--samples", "30")
    try:
        done = score_script(checkpoint, *SEARCH, "--json", *options)
        assert done.returncode == 0, done.stderr[-2000:]
        got = json.loads(done.stdout)
        log = tmp_path / "model.test.gen"
        by_hand = ["score", "--gen", log, "--lang", "en", "--raw-ref", corpus / "raw/test.en", "--lowercase", "--json"]
        by_hand += ["--speed", "--checkpoint", checkpoint, *options]
        capsys.readouterr()
        assert main.main([*map(str, by_hand)]) == 0
        assert got == json.loads(capsys.readouterr().out)
        assert (got["lang"], got["lowercase"], got["compound_split"], got["n"]) == ("en", True, True, 12)
        assert got["against"]["samples"] == 30
        assert json.loads((tmp_path / "model.test.score").read_text()) == got
        text = log.read_text()
        assert "beam=2" in text and "'lenpen': 1.0" in text
        # The folder's options in the command itself: the language, the raw references and the case.
        assert main.main(["score", "--gen", str(log), "--data", str(toy_data), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["signature"] == got["signature"]
        (corpus / "corpus.json").write_text("no JSON")
        assert main.main(["score", "--gen", str(log), "--data", str(toy_data), "--json"]) == 2
        assert "corpus.json is not JSON: prepare the data again" in capsys.readouterr().err
    finally:
        (corpus / "corpus.json").unlink()
        (corpus / "raw/test.en").unlink()
        (corpus / "raw").rmdir()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--against"], "--against needs a value"),
        (["--metric", "ter"], "--metric must be bleu or rouge, got: ter"),
        (["--subset", "dev"], "has no subset dev"),
    ],
    ids=["no-value", "metric", "subset"],
)
def test_wrong_arguments_are_refused_before_any_work(arguments, said, score_script, checkpoint):
    done = score_script(checkpoint, *arguments)
    assert done.returncode == 1 and said in done.stderr
    assert [path.name for path in checkpoint.parent.iterdir()] == ["model.pt"]


def test_data_without_the_subset(toy_data, files, tmp_path, capsys):
    options = [*map(str, files(["a"], ["a"]))]
    assert main.main(["score", *options, "--data", str(toy_data), "--subset", "dev"]) == 2
    assert "has no subset dev; it has test, train, valid" in capsys.readouterr().err
    assert main.main(["score", *options, "--data", str(tmp_path / "none")]) == 2
    assert "no folder" in capsys.readouterr().err
