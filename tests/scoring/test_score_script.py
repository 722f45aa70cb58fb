"""`lightconv evaluate`, which is scripts/evaluate.sh: what goes to fairseq-generate and what to the scorers."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from lightconv_plugin.cli import main
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.evaluation import check_data
from lightconv_plugin.scoring.measuring import languages_of

pytest.importorskip("fairseq")


@pytest.fixture
def evaluate(toy_data, capsys):
    """(standard output, standard error) of a call with these arguments after the data, which ends with `status`."""

    def run(checkpoint, *arguments, status=0):
        capsys.readouterr()
        try:
            ended = main.main(["evaluate", str(toy_data), str(checkpoint), *map(str, arguments)])
        except SystemExit as stopped:
            ended = stopped.code
        out, err = capsys.readouterr()
        assert ended == status, err[-2000:]
        return out, err

    return run


@pytest.fixture
def checkpoint(toy_training, tmp_path):
    (tmp_path / "model.pt").hardlink_to(toy_training / "checkpoint4.pt")
    return tmp_path / "model.pt"


SEARCH = ("--beam", "2", "--max-len-b", "8", "--cpu")


def test_options_go_where_they_belong(evaluate, checkpoint, toy_data, tmp_path, capsys, refusal):
    (tmp_path / "other").write_text("DEN HUND\n" * 12, encoding="utf-8")
    corpus = toy_data.parent
    (corpus / "raw").mkdir()
    (corpus / "raw/test.en").write_bytes((corpus / "test.en").read_bytes())
    (corpus / "corpus.json").write_text('{"lowercase": true}')
    options = ("--compound-split", "--against", tmp_path / "other", "--samples", "30")
    try:
        out, _ = evaluate(checkpoint, *SEARCH, "--json", *options)
        got = json.loads(out)
        log = tmp_path / "model.test.gen"
        by_hand = ["score", "--gen", log, "--lang", "en", "--raw-ref", corpus / "raw/test.en", "--lowercase", "--json"]
        by_hand += ["--speed", "--checkpoint", checkpoint, *options]
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
        said = refusal("score", "--gen", log, "--data", toy_data)
        assert "corpus.json is not JSON: prepare the data again" in said
    finally:
        (corpus / "corpus.json").unlink()
        (corpus / "raw/test.en").unlink()
        (corpus / "raw").rmdir()


def test_options_in_a_file_and_a_name_that_begins_with_a_dash(evaluate, checkpoint, tmp_path, monkeypatch):
    """What stands later counts; `@@ ` is no file."""
    monkeypatch.chdir(tmp_path)
    checkpoint.rename("-x.pt")
    (tmp_path / "my.args").write_text("--beam 4 # a comment\n--cpu --subset test\n--max-len-b 6", encoding="utf-8")
    out, _ = evaluate("-x.pt", "--beam", "3", "@my.args", "--max-len-b", "5", "--remove-bpe", "@@ ")
    log = (tmp_path / "-x.test.gen").read_text()
    assert "beam=4" in log and "'max_len_b': 5.0" in log.replace("'max_len_b': 5,", "'max_len_b': 5.0,")
    assert (tmp_path / "-x.test.score").read_text() == out
    assert out.startswith("BLEU4 = ") and "parameters = " in out and "speed = " in out
    assert out.endswith("search = the plugin's own search\n")


@pytest.mark.parametrize(
    "options, search",
    [
        ((), "the plugin's own search"),
        (("--task", "translation"), "fairseq's generator"),
        (("--diverse-beam-groups", "1"), "fairseq's generator (search by DiverseBeamSearch is not supported)"),
        (("--print-alignment",), "fairseq's generator (--print-alignment is not supported)"),
        (("--generation-dtype", "auto"), "the plugin's own search with --generation-dtype auto"),
        (("--task", "translation", "--prefix-size", "2"), "fairseq's generator with --prefix-size 2"),
    ],
)
def test_the_search_is_named(options, search, evaluate, checkpoint):
    """The plugin's own where it supports the options, fairseq's otherwise."""
    out, err = evaluate(checkpoint, *SEARCH, "--json", *options)
    assert json.loads(out)["search"] == search
    warned = "--prefix-size 2: each translation begins with as many words of its reference, which are scored too"
    assert (warned in err) is ("--prefix-size" in options)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--against", "/no/where"], "no file /no/where"),
        (["--samples", "3"], "--samples needs --against FILE"),
        (["--metric", "rouge", "--lang", "de"], "--lang is not valid with --metric rouge"),
        (["--sentence-end", "."], "--sentence-end is not valid with --metric bleu"),
        (["--lang", "klingon"], "--lang: Moses has no rules for the language 'klingon'"),
        (["--subset", "dev"], "has no subset dev"),
        (["@latin.args"], "latin.args is not UTF-8: byte 0xfc in line 1"),
        (["@none.args"], "there is no configuration none.args: did you mean cnndm/generate.args?"),
        (["--raw-ref", "/no/where"], "no such file: /no/where"),
        (["--raw-ref", "two.txt"], "two.txt has 2 lines, but test has 12 sentences"),
        (["-s", "en", "-t", "fr"], "has no direction en-fr; test is there as de-en"),
        (["--results-path", "x"], "--results-path is set by this command"),
        (["--score-reference"], "--score-reference translates nothing"),
        (["--num-shards=2"], "--num-shards takes a part of the subset alone: remove it from the options of fair"),
        (["--sampling"], "--sampling draws as many translations as --beam, of which one is scored: give --beam 1"),
        (["--sampling-topk", "3"], "in the options for fairseq-generate: --sampling-topk requires --sampling"),
        (["--sampling", "--beam", "1", "--match-source-len"], "in the options for fairseq-generate: Provided Search"),
        (["--beem", "3"], "in the options for fairseq-generate: unrecognized arguments: --beem 3"),
        (["--tokenizer", "moses"], "--detok is missing: the text is from fairseq-generate with --bpe or --tokenizer"),
        (["--bpe", "sentencepiece"], "--detok is missing: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_refused_before_any_work(
    arguments, said, evaluate, checkpoint, tmp_path_factory, monkeypatch
):
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    Path("two.txt").write_text("a\nb\n")
    Path("latin.args").write_bytes("--beam 4 # für".encode("latin-1"))
    _, err = evaluate(checkpoint, *arguments, status=2)
    assert said in err.splitlines()[-1], err
    assert [path.name for path in checkpoint.parent.iterdir()] == ["model.pt"]


def test_a_checkpoint_in_a_read_only_folder_is_refused_before_any_work(evaluate, checkpoint, tmp_path, monkeypatch):
    access = os.access  # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    _, err = evaluate(checkpoint, *SEARCH, status=2)
    assert "generating" not in err
    assert err.endswith(f"cannot write {tmp_path}/model.test.gen: the folder {tmp_path} is read-only\n")


def test_scores_do_not_outlive_the_log_they_are_of(evaluate, checkpoint, tmp_path):
    old, other = tmp_path / "model.test.score", tmp_path / "other.gen"
    old.write_text("of an earlier log")
    lines = [f"S-{n}\ta\nT-{n}\tanother text\nH-{n}\t0\ta\nD-{n}\t0\ta\nP-{n}\t0" for n in range(12)]
    other.write_text("\n".join([*lines, "Generate test with beam=5: chrF2 = 58.1"]))
    _, err = evaluate(checkpoint, *SEARCH, "--against", other, status=2)  # whose text is compared after generating
    assert "has translations of another text" in err
    assert (tmp_path / "model.test.gen").is_file() and not old.exists()


@pytest.mark.parametrize(
    "other, said",
    [(b"\xff", "is not UTF-8"), (b"Hund\n" * 11, "has 11 translations, but there are 12 references")],
)
def test_a_wrong_file_to_compare_with_is_refused_before_any_work(other, said, evaluate, checkpoint, tmp_path):
    (tmp_path / "model.test.score").write_text("of an earlier log")
    (tmp_path / "other").write_bytes(other)
    _, err = evaluate(checkpoint, *SEARCH, "--against", tmp_path / "other", status=2)
    assert said in err and "generating" not in err
    assert (tmp_path / "model.test.score").read_text() == "of an earlier log"
    assert not (tmp_path / "model.test.gen").exists()


def test_a_model_of_the_opposite_direction_is_refused(evaluate, checkpoint, toy_data, tmp_path, refusal):
    state = torch.load(checkpoint, weights_only=False)
    state["cfg"]["task"] |= {"source_lang": "en", "target_lang": "de"}
    torch.save(state, tmp_path / "checkpoint1.pt")
    said = "checkpoint1.pt translates en to de, but test of"
    _, err = evaluate(tmp_path / "checkpoint1.pt", *SEARCH, status=2)
    assert said in err and "give --source-lang en --target-lang de" in err
    assert said.replace("test", "valid") in refusal("tune", toy_data, tmp_path)
    for direction in (("de", "en"), ("en", "de")):
        evaluate(tmp_path / "checkpoint1.pt", *SEARCH, "-s", direction[0], "-t", direction[1])


def test_of_two_directions_the_one_that_is_scored_is_generated(evaluate, checkpoint, toy_data, monkeypatch):
    """fairseq-generate would take the first one that it finds."""
    monkeypatch.setattr("fairseq.data.data_utils.infer_language_pair", lambda path: ("en", "de"))
    both = list(toy_data.glob("test.de-en.*"))
    made = [toy_data / f"test.en-de.{path.name.split('.', 2)[2]}" for path in both]
    for path, copy in zip(both, made, strict=True):
        copy.hardlink_to(path)
    try:
        _, err = evaluate(checkpoint, *SEARCH, status=2)
        assert "has several directions: name the languages; test is there as de-en, en-de" in err
        scores = []
        for languages in (("-s", "de", "-t", "en"), ("-s", "de"), ("--lang", "en")):
            out, _ = evaluate(checkpoint, *SEARCH, "--json", *languages)
            scores.append(json.loads(out) | {"sentences_per_second": 0})
        assert scores[0]["lang"] == "en" and scores.count(scores[0]) == 3
    finally:
        for copy in made:
            copy.unlink()


def test_files_of_the_opposite_direction_serve_as_well(evaluate, checkpoint, toy_data, tmp_path, capsys):
    """As in fairseq; without languages, it is the files' own direction."""
    expected, _ = evaluate(checkpoint, *SEARCH, "--json", "-s", "de", "-t", "en")
    shutil.copy(tmp_path / "model.test.gen", tmp_path / "first.gen")
    shutil.copytree(toy_data, tmp_path / "data")
    for path in (tmp_path / "data").glob("test.de-en.*"):
        path.rename(path.with_name(path.name.replace("de-en", "en-de")))
    options = [*SEARCH, "--json", "--against", f"{tmp_path}/first.gen", "--samples", "5"]
    assert main.main(["evaluate", f"{tmp_path}/data", str(checkpoint), *options, "-s", "de", "-t", "en"]) == 0
    got, plain = (json.loads(text) for text in (capsys.readouterr().out, expected))
    assert {key: got[key] for key in plain} | {"sentences_per_second": 0} == plain | {"sentences_per_second": 0}


def test_a_colon_in_a_path_does_not_divide_it(evaluate, checkpoint, toy_data, tmp_path, capsys):
    """fairseq would read the data in `data`, the part before the colon."""
    plain, _ = evaluate(checkpoint, *SEARCH, "--json")
    folder = tmp_path / "12:30"
    folder.mkdir()
    shutil.copy(checkpoint, folder)
    shutil.copytree(toy_data, tmp_path / "data:2")
    shutil.copytree(toy_data, tmp_path / "data", ignore=shutil.ignore_patterns("test.*"))
    places = [str(tmp_path / "data:2"), str(folder / "model.pt")]
    assert main.main(["evaluate", *places, *SEARCH, "--json"]) == 0
    ours, theirs = (json.loads(text) for text in (capsys.readouterr().out, plain))
    assert ours | {"sentences_per_second": 0} == theirs | {"sentences_per_second": 0}


def test_a_checkpoint_that_is_not_there(evaluate, tmp_path):
    _, err = evaluate(tmp_path / "x.pt", status=2)
    assert f"no such checkpoint: {tmp_path / 'x.pt'}" in err
    _, err = evaluate(tmp_path, status=2)
    assert f"{tmp_path} is a folder: name a checkpoint in it" in err


def test_data_without_the_subset(toy_data, files, tmp_path, refusal):
    options = [*map(str, files(["a"], ["a"]))]
    said = refusal("score", *options, "--data", toy_data, "--subset", "dev")
    assert "has no subset dev; it has test, train, valid" in said
    assert "--subset belongs to --data DATA_BIN: give both or neither" in refusal("score", *options, "--subset", "test")
    assert "no folder" in refusal("score", *options, "--data", tmp_path / "none")


def test_text_of_a_language_model_is_not_called_a_missing_subset(tmp_path):
    (tmp_path / "test.idx").touch()
    with pytest.raises(InputError, match=r"has test as text of a language model, .* lightconv perplexity"):
        languages_of(tmp_path, "test")


def test_raw_text_is_not_called_a_missing_subset(tmp_path):
    (tmp_path / "test.de-en.de").write_text("a\n")
    (tmp_path / "valid.de-en.de.bin").touch()
    with pytest.raises(InputError, match="has no subset valid"):
        languages_of(tmp_path, "valid")
    with pytest.raises(InputError, match="has test as raw text: make binary data without --dataset-impl raw"):
        languages_of(tmp_path, "test")
    (tmp_path / "dict.txt").touch()
    (tmp_path / "train.None-None").write_text("a\n")
    with pytest.raises(InputError, match="has train as raw text"):  # of a language model
        check_data(tmp_path, "train")


def test_the_folder_around_the_binarised_data(tmp_path):
    inner = tmp_path / "data-bin"
    inner.mkdir()
    with pytest.raises(InputError, match="has no subset test; it has none"):
        languages_of(tmp_path, "test")
    (inner / "test.de-en.de.idx").touch()
    for check in (languages_of, check_data):
        with pytest.raises(InputError, match=f"{tmp_path} has its binarised data in a folder of its own: name {inner}"):
            check(tmp_path, "test")
