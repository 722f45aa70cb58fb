"""`lightconv prepare wikitext2` → train.sh → perplexity.sh on a miniature, and what the configurations share."""

import gzip
import json
import re
import shutil

import pytest
import yaml

from lightconv_plugin.cli.main import main
from tests.fairseq_cli import write_corpus
from tests.recipes.conftest import ROOT
from tests.recipes.data.preparations import prepare

TINY = (
    "model.decoder_embed_dim=16",
    "model.decoder_ffn_embed_dim=16",
    "model.adaptive_input_cutoff=[2,16]",
    "model.adaptive_softmax_cutoff=[2,16]",
    "task.tokens_per_sample=20",
    "dataset.max_tokens=160",
    "optimization.max_update=8",
    "common.log_interval=2",
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """(raw, prepared): a miniature corpus in a path with a space and a comma, one of its parts compressed."""
    base = tmp_path_factory.mktemp("mini, text")
    raw = base / "raw text"
    (base / "parallel").mkdir()
    raw.mkdir()
    write_corpus(base / "parallel")
    for part in ("train", "valid", "test"):
        text = (base / "parallel" / f"{part}.en").read_bytes()
        (raw / f"{part}.txt").write_bytes(text + b"\n" + text[: text.index(b"\n") + 1])  # with an empty line
    with gzip.open(raw / "train.txt.gz", "wb") as file:
        file.write((raw / "train.txt").read_bytes())
    (raw / "train.txt").unlink()
    out = base / "prepared"
    prepare(base, "wikitext2", "--data", raw, "--out", out, "--workers", "1", "--any-size")
    return raw, out


def test_everything_is_there(prepared):
    raw, out = prepared
    assert (out / "raw/train.txt").read_bytes() == gzip.decompress((raw / "train.txt.gz").read_bytes())
    assert {path.name for path in (out / "data-bin").iterdir()} >= {
        *("dict.txt", "train.bin", "train.idx", "valid.bin", "valid.idx", "test.bin", "test.idx")
    }
    log = (out / "preprocess.log").read_text()
    assert "raw/train.txt: 62 sents" in log and "raw/test.txt: 14 sents" in log
    assert not list(out.rglob("*.tmp"))


def test_the_second_run_does_no_work(prepared, tmp_path):
    said = prepare(tmp_path, "wikitext2", "--data", prepared[0], "--out", prepared[1], "--any-size")
    assert said.splitlines() == ["raw text: done before", "binarise: done before"]


def test_new_text_is_taken_up(prepared, tmp_path):
    raw, out = (shutil.copytree(path, tmp_path / name) for path, name in zip(prepared, "ab", strict=True))
    (raw / "test.txt").write_text("ICH DU\n")
    prepare(tmp_path, "wikitext2", "--data", raw, "--out", out, "--workers", "1", "--any-size")
    assert "raw/test.txt: 1 sents, 3 tokens" in (out / "preprocess.log").read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data", "."], "expected one file train.txt (or wiki.train.tokens, …), plain or .gz, found none"),
        (["--data", "two"], "found train.txt, wiki.train.tokens"),
        (["--data", "cut"], "cut/train.txt.gz: Compressed file ended"),
        (["--data", "broken"], "broken/train.txt.gz: Error -3 while decompressing"),
        (["--data", "empty"], "train.txt is empty"),
    ],
    ids=["no-files", "two-files", "cut-short", "broken", "empty"],
)
def test_one_clear_line_for_wrong_arguments(tmp_path, monkeypatch, arguments, message):
    broken = bytearray(gzip.compress("".join(f"{i * 7919 % 1000} word{i}\n" for i in range(20000)).encode()))
    broken[2000:2100] = b"\xff" * 100
    for name, files in {
        "broken": {"train.txt.gz": bytes(broken), "valid.txt": b"a", "test.txt": b"a"},
        "two": {"train.txt": b"a", "wiki.train.tokens": b"a", "valid.txt": b"a", "test.txt": b"a"},
        "cut": {"train.txt.gz": gzip.compress(b"a" * 1000)[:-9], "valid.txt": b"a", "test.txt": b"a"},
        "empty": {"train.txt": b"", "valid.txt": b"a", "test.txt": b"a"},
    }.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    said = prepare(tmp_path, "wikitext2", "--out", tmp_path / "out", "--any-size", *arguments, status=2)
    last = said.splitlines()[-1]
    assert last.startswith("lightconv prepare: error: ")
    assert message in last
    assert not (tmp_path / "out/data-bin").exists()


def test_the_text_comes_from_a_mirror_and_is_that_of_the_corpus(tmp_path):
    """It is downloaded into the workspace."""
    home, mirror = tmp_path / "home", tmp_path / "mirror"
    arguments = ("wikitext2", "--mirror", mirror, "--out", tmp_path / "out", "--workers", "1")
    assert f"no file {mirror}/train.txt" in prepare(home, *arguments, status=2)
    mirror.mkdir()
    for part in ("train", "valid", "test"):
        (mirror / f"{part}.txt").write_text("not that text\n")
    said = prepare(home, *arguments, status=2)
    assert "expected 2d84b35af79e411d73ea7cae83c73964c6ac83b4" in said
    assert not (tmp_path / "out").exists()


def test_the_size_of_the_corpus_is_enforced_for_a_folder(prepared, tmp_path):
    said = prepare(tmp_path, "wikitext2", "--data", prepared[0], "--out", tmp_path / "out", status=2)
    assert "expected 36,718 lines, 2,088,628 tokens; --any-size accepts" in said.splitlines()[-1]


@pytest.fixture(scope="module")
def checkpoint(prepared, run_script, tmp_path_factory):
    """Of a training by the configuration of talkconv, made small by overrides."""
    save_dir = tmp_path_factory.mktemp("a training")
    done = run_script(
        *("train.sh", ROOT / "configs/wikitext2/talkconv.yaml", f"task.data={prepared[1] / 'data-bin'}"),
        *(f"checkpoint.save_dir={save_dir}", *TINY),
    )
    assert "TalkconvLm" in done.stdout
    return save_dir / "checkpoint_best.pt"


def score(run_script, prepared, checkpoint, *arguments):
    """Standard output of perplexity.sh on the validation text, and the result that it left."""
    done = run_script("perplexity.sh", prepared[1] / "data-bin", checkpoint, "--subset", "valid", "--cpu", *arguments)
    return done.stdout, json.loads(checkpoint.with_name("checkpoint_best.valid.ppl").read_text())


def test_the_perplexity_of_the_same_samples_is_that_of_the_training(checkpoint, prepared, run_script):
    line, result = score(run_script, prepared, checkpoint)
    text = (prepared[0] / "valid.txt").read_text()
    assert result["tokens"] == len(text.split()) + text.count("\n")
    assert re.fullmatch(
        rf"valid: perplexity {result['perplexity']:.2f} over {result['tokens']} tokens, .*; [\d,]+ parameters\n", line
    )
    assert result["perplexity"] == pytest.approx(2 ** result["loss"], rel=1e-3)
    log = (checkpoint.parent / "train.log").read_text()
    assert f"model params: {result['parameters']:,} " in log
    losses = re.findall(r"'valid' subset \| loss ([\d.]+)", log)
    assert result["loss"] == pytest.approx(float(losses[-1]), abs=0.001)


def test_perplexity_with_a_context_window(checkpoint, prepared, run_script):
    line, result = score(run_script, prepared, checkpoint, "--json", "--context-window", "15", "--max-tokens", "40")
    assert json.loads(line) == result
    assert (result["context_window"], result["tokens_per_sample"], result["subset"]) == (15, 20, "valid")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: DATA_BIN, CHECKPOINT"),
        (["nowhere", "x.pt"], "no folder nowhere with binarised data"),
        (["DATA", "x.pt"], "no such checkpoint: x.pt"),
        (["DATA", "MODEL", "--subset", "tast"], "tast.idx is missing"),
        (["DATA", "MODEL", "--context-window", "20"], "context-window must be in 0 … 19"),
        (["DATA", "MODEL", "--tokens-per-sample", "21", "--cpu"], "of the 75 tokens"),
    ],
    ids=["none", "no-data", "no-checkpoint", "no-subset", "window", "skipped-tokens"],
)
def test_wrong_arguments_of_perplexity(prepared, checkpoint, capsys, arguments, message):
    places = {"DATA": prepared[1] / "data-bin", "MODEL": checkpoint}
    try:
        status = main(["perplexity", *(str(places.get(argument, argument)) for argument in arguments)])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["wikitext2", "wikitext103", "gbw"])
def test_the_systems_of_a_folder_are_trained_alike(folder):
    """They differ in the model and in where it is saved, in nothing else."""
    rest = []
    for path in (p for p in (ROOT / "configs" / folder).glob("*.yaml") if p.stem != "protocol"):
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        del config["model"]
        assert config["checkpoint"].pop("save_dir") == f"runs/{folder}/{path.stem}"
        rest.append(config)
    assert len(rest) > 1 and all(config == rest[0] for config in rest)
