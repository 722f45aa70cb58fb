"""fairseq's tasks beside translation and language modelling."""

import pytest

pytest.importorskip("fairseq")

from tests.compat.fairseq_runs import BLEU, NO_GPU, PLUGIN, check_needed, train
from tests.fairseq_cli import run

BART = "--task translation_from_pretrained_bart --langs de,en --source-lang de --target-lang en".split()


def test_translation_from_pretrained_bart(data, tmp_path):
    """With BLEU, for which it makes a generator in training; a language's name ends each of its sentences."""

    def command(**environment):
        return train(data, tmp_path, *BART, *BLEU, "--max-update", 2, **environment)

    assert '"valid_bleu"' in command()
    path = tmp_path / "checkpoint_last.pt"
    log = run("generate", data, *PLUGIN, *BART, "--path", path, "--max-len-b", 6, **NO_GPU)
    assert "Generate test with beam=5" in log and "S-0" in log
    check_needed("pretrained_bart_options", "no attribute 'args'", command)
