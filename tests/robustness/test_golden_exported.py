"""Exported models and graphs of older versions give what they did when they were made, without fairseq."""

import io
import runpy
import sys
import tarfile

import pytest
import torch

from lightconv_plugin import ops  # noqa: F401 (registers the operators)
from lightconv_plugin.checkpoints.exported import load_model, open_exported
from lightconv_plugin.generation.translator import Translator
from tests.deployment.toys import greedy
from tests.robustness.golden_files import (
    GOLDEN,
    LANGUAGE_MODEL,
    PREVIOUS,
    SENTENCES,
    SOURCE,
    TRANSLATION,
    expectations,
)
from tests.robustness.make_golden_exported import arguments

FOLDERS = {path.parent.name: expectations(path.parent) for path in sorted(GOLDEN.glob("*/operators.pt2"))}
MODELS = {name: expectations(GOLDEN / about["checkpoints"])["models"] for name, about in FOLDERS.items()}
FILES = sorted(GOLDEN.glob("*/*.tar.gz"))


def unpacked(path, folder):
    with tarfile.open(path) as archive:
        archive.extractall(folder / path.name)
    return folder / path.name


def known(path):
    """What a model's checkpoint computed, and the model's name."""
    model = path.name.partition("-")[0]
    return MODELS[path.parent.name][model], model


def files(suffix, models):
    """The packed models of that kind, as parameters of a test."""
    found = [path for path in FILES if path.name.endswith(f"-{suffix}.tar.gz") and known(path)[1] in models]
    assert found
    return [pytest.param(path, id=f"{path.parent.name}-{known(path)[1]}") for path in found]


def skip_if_newer(folder):
    made, here = (tuple(map(int, each.split(".")[:2])) for each in (FOLDERS[folder]["torch"], torch.__version__))
    if here < made:
        pytest.skip(f"torch reads no graphs of newer versions: they are of {made}, this is {here}")


def test_there_are_files_of_every_model():
    missing = {*TRANSLATION, LANGUAGE_MODEL} - {known(path)[1] for path in FILES}
    command = (
        "python -m tests.robustness.make_golden_exported tests/robustness/golden/NAME tests/robustness/golden/MADE"
    )
    assert not missing, f"export the golden checkpoints of {', '.join(sorted(missing))}: {command}"


@torch.no_grad()
@pytest.mark.parametrize("path", files("float32", [*TRANSLATION, LANGUAGE_MODEL]))
def test_a_model_computes_the_same(path, tmp_path):
    model = load_model(open_exported(unpacked(path, tmp_path))).eval()
    previous, source = torch.tensor(PREVIOUS), torch.tensor(SOURCE)
    about, name = known(path)
    logits = model(previous).logits if name == LANGUAGE_MODEL else model(source, previous).logits
    want = torch.tensor(about["log_probabilities"])
    torch.testing.assert_close(logits.log_softmax(-1), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("path", [*files("float32", TRANSLATION), *files("int8", TRANSLATION)])
def test_a_model_translates_the_same(path, tmp_path):
    with Translator([unpacked(path, tmp_path)], beam=3) as translator:
        found = [each.text for each in translator.translate(list(SENTENCES))]
    assert found == known(path)[0]["translations"]


@pytest.mark.parametrize("path", files("graphs", TRANSLATION))
def test_graphs_decode_the_same(path, tmp_path, repository, monkeypatch, capsys):
    """By the program of the page, which tests/deployment runs in a process that has torch alone."""
    skip_if_newer(path.parent.name)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{sentence}\n" for sentence in SENTENCES)))
    program = runpy.run_path(str(repository / "docs/examples/decode.py"))
    program["main"](unpacked(path, tmp_path))
    exported = open_exported(unpacked(path.with_name(path.name.replace("graphs", "float32")), tmp_path))
    model, words = load_model(exported), exported.target
    sources = [[exported.source.index(word) for word in sentence.split()] for sentence in SENTENCES]
    found = [greedy(model, [*source, words.eos()], words.eos(), 200) for source in sources]
    assert capsys.readouterr().out.splitlines() == [" ".join(words[token] for token in tokens) for tokens in found]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_saved_graph_of_the_operators_computes_the_same(folder):
    skip_if_newer(folder)
    program = torch.export.load(GOLDEN / folder / "operators.pt2")
    names = {str(node.target) for node in program.graph.nodes if "lightconv." in str(node.target)}
    assert len(names) == 6
    found = program.module()(*arguments(9, 2))
    torch.testing.assert_close(found, torch.tensor(FOLDERS[folder]["operators"]), rtol=0, atol=1e-5)
