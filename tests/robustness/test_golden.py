"""Checkpoints of older versions compute what they did when they were made (make_golden.py), whatever is installed."""

import json

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

import lightconv_plugin.models  # noqa: F401 (registers the architectures)
from tests.robustness.golden_files import GOLDEN, LANGUAGE_MODEL, MIXERS, unpack
from tests.robustness.make_golden import load, logits, translations

FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/dynamic.pt.gz"))
EXPECTED = {folder.name: json.loads((folder / "expected.json").read_text(encoding="utf-8")) for folder in FOLDERS}


@pytest.fixture(params=FOLDERS, ids=[folder.name for folder in FOLDERS])
def folder(request):
    return request.param


def test_there_are_files_of_both_distributions_of_fairseq():
    made = [about["made"] for about in EXPECTED.values()]
    assert any("fairseq" in each for each in made) and any("fairseq-fixed" in each for each in made)


@pytest.mark.parametrize("mixer", [*MIXERS, LANGUAGE_MODEL])
def test_it_loads_and_computes_the_same(mixer, folder, tmp_path):
    about = EXPECTED[folder.name]["models"][mixer]
    path = unpack(folder, mixer, tmp_path)
    data = folder
    if mixer == LANGUAGE_MODEL:
        data = tmp_path / "data"
        data.mkdir()
        (data / "dict.txt").write_bytes((folder / "dict.txt").read_bytes())
    want = torch.tensor(about["log_probabilities"])
    torch.testing.assert_close(logits(load(path, data)), want, rtol=0, atol=2e-5)
    assert want.std() > 0.5, "a model that has learnt nothing tells little"


@pytest.mark.parametrize("mixer", MIXERS)
def test_it_translates_the_same(mixer, folder, tmp_path):
    want = EXPECTED[folder.name]["models"][mixer]["translations"]
    assert translations(unpack(folder, mixer, tmp_path), folder) == want
    assert len(set(want)) > 1
