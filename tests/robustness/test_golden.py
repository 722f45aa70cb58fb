"""Checkpoints of older versions compute what they did when they were made (make_golden.py), whatever is installed."""

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

import lightconv_plugin.models  # noqa: F401 (registers the architectures)
from tests.robustness.golden_files import GOLDEN, TRANSLATION, data_of, expectations, unpack
from tests.robustness.make_golden import EVERY, load, logits, translations

EXPECTED = {path.name: expectations(path) for path in sorted(GOLDEN.iterdir()) if next(path.glob("*.pt.gz"), None)}
CASES = [(name, model) for name, expected in EXPECTED.items() for model in expected["models"]]


def test_there_are_files_of_both_distributions_of_fairseq():
    made = [about["made"] for about in EXPECTED.values()]
    assert any("fairseq" in each for each in made) and any("fairseq-fixed" in each for each in made)


def test_there_are_files_of_every_model():
    missing = sorted({*EVERY} - {model for _, model in CASES})
    assert not missing, f"run: python -m tests.robustness.make_golden tests/robustness/golden/NAME {' '.join(missing)}"


@pytest.mark.parametrize(("name", "model"), CASES)
def test_it_loads_and_computes_the_same(name, model, tmp_path):
    path = unpack(GOLDEN / name, model, tmp_path)
    want = torch.tensor(EXPECTED[name]["models"][model]["log_probabilities"])
    torch.testing.assert_close(logits(load(path, data_of(model, tmp_path / "data"))), want, rtol=0, atol=2e-5)
    assert want.std() > 0.5, "a model that has learnt nothing tells little"


@pytest.mark.parametrize(("name", "model"), [case for case in CASES if case[1] in TRANSLATION])
def test_it_translates_the_same(name, model, tmp_path):
    want = EXPECTED[name]["models"][model]["translations"]
    assert translations(unpack(GOLDEN / name, model, tmp_path), GOLDEN) == want
    assert len(set(want)) > 1
