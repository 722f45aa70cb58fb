"""Exported models and graphs of older versions give what they did when they were made, without fairseq."""

import io
import json
import runpy
import sys
import tarfile

import pytest
import torch

from lightconv_plugin import ops  # noqa: F401 (registers the operators)
from lightconv_plugin.checkpoints.exported import load_model, open_exported
from lightconv_plugin.generation.translator import Translator
from tests.deployment.toys import greedy
from tests.robustness.golden_files import GOLDEN, LANGUAGE_MODEL, MIXERS, PREVIOUS, SENTENCES, SOURCE
from tests.robustness.make_golden_exported import CHECKPOINTS, DEPLOYED, arguments

FILES = GOLDEN / "0.2.0-exported"
EXPECTED = json.loads((FILES / "expected.json").read_text(encoding="utf-8"))
MODELS = json.loads((CHECKPOINTS / "expected.json").read_text(encoding="utf-8"))["models"]
newer = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, EXPECTED["torch"].split(".")[:2])),
    reason=f"torch reads no graphs of newer versions: they are of {EXPECTED['torch']}, this is {torch.__version__}",
)


def unpacked(name, folder):
    with tarfile.open(FILES / f"{name}.tar.gz") as archive:
        archive.extractall(folder / name)
    return folder / name


@torch.no_grad()
@pytest.mark.parametrize("name", [*MIXERS, LANGUAGE_MODEL])
def test_a_model_computes_the_same(name, tmp_path):
    model = load_model(open_exported(unpacked(f"{name}-float32", tmp_path))).eval()
    previous, source = torch.tensor(PREVIOUS), torch.tensor(SOURCE)
    logits = model(previous).logits if name == LANGUAGE_MODEL else model(source, previous).logits
    want = torch.tensor(MODELS[name]["log_probabilities"])
    torch.testing.assert_close(logits.log_softmax(-1), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", [*(f"{mixer}-float32" for mixer in MIXERS), "dynamic-int8"])
def test_a_model_translates_the_same(name, tmp_path):
    with Translator([unpacked(name, tmp_path)], beam=3) as translator:
        found = [each.text for each in translator.translate(list(SENTENCES))]
    assert found == MODELS[name.partition("-")[0]]["translations"]


@newer
@pytest.mark.parametrize("mixer", DEPLOYED)
def test_graphs_decode_the_same(mixer, tmp_path, repository, monkeypatch, capsys):
    """By the program of the page, which tests/deployment runs in a process that has torch alone."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{sentence}\n" for sentence in SENTENCES)))
    program = runpy.run_path(str(repository / "docs/examples/decode.py"))
    program["main"](unpacked(f"{mixer}-graphs", tmp_path))
    exported = open_exported(unpacked(f"{mixer}-float32", tmp_path))
    model, words = load_model(exported), exported.target
    sources = [[exported.source.index(word) for word in sentence.split()] for sentence in SENTENCES]
    found = [greedy(model, [*source, words.eos()], words.eos(), 200) for source in sources]
    assert capsys.readouterr().out.splitlines() == [" ".join(words[token] for token in tokens) for tokens in found]


@newer
def test_a_saved_graph_of_the_operators_computes_the_same():
    program = torch.export.load(FILES / "operators.pt2")
    names = {str(node.target) for node in program.graph.nodes if "lightconv." in str(node.target)}
    assert len(names) == 6
    found = program.module()(*arguments(9, 2))
    torch.testing.assert_close(found, torch.tensor(EXPECTED["operators"]), rtol=0, atol=1e-5)
