"""fairseq's commands as users type them: each needs several patches, and fails without any one of them.

A command runs twice: with the patches it must work; without the one under test (LIGHTCONV_SKIP_PATCHES) it must fail
the way the patch says, so that a patch which is no longer needed shows.
"""

import re

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

from lightconv_plugin.checkpoints.loading import safe_torch_load
from tests.compat.fairseq_runs import BLEU, NO_GPU, PLUGIN, check_needed, is_applied, losses, train
from tests.fairseq_cli import run

ALL_AT_ONCE = [*BLEU, "--bf16", "--num-batch-buckets", 3, "--reset-optimizer", "--max-update", 6, "--restore-file"]


def test_resume_in_bf16_with_buckets_and_bleu(data, checkpoint, tmp_path):
    assert max(losses(train(data, tmp_path, *ALL_AT_ONCE, checkpoint))) == 6


@pytest.mark.parametrize(
    "patch, message",
    [
        ("safe_checkpoint_loading", "Weights only load failed"),
        ("numpy_compat", r"attribute 'compat'|compat. was removed"),
        ("batch_buckets", "interpolation"),
        ("bf16_without_xla", "xla_device"),
    ],
)
def test_that_training_without(data, checkpoint, tmp_path, patch, message):
    check_needed(patch, message, lambda **e: train(data, tmp_path, *ALL_AT_ONCE, checkpoint, **e))


def test_language_model_by_sentence(data, language_model):
    """numpy_compat again: train and evaluate with one sentence per sample."""
    options = ["--path", language_model, "--sample-break-mode", "eos"]
    log = run("eval-lm", data.parent / "english", *PLUGIN, *options, **NO_GPU)
    assert float(re.search(r"Perplexity: ([\d.]+)", log)[1]) > 1


def generate(data, checkpoint, **environment) -> str:
    return run("generate", data, *PLUGIN, "--path", checkpoint, "--beam", 2, **NO_GPU, **environment)


def test_checkpoint_of_2019_translates_every_sentence(data, old_checkpoint):
    log = generate(data, old_checkpoint)
    assert len(re.findall(r"^H-\d+\t", log, re.M)) == 12
    assert "Generate test with beam=2: BLEU4" in log


@pytest.mark.parametrize(
    "patch, message",
    [
        ("safe_checkpoint_loading", "Weights only load failed"),
        ("encoder_layer_copies", "Mask Type should be defined"),
    ],
)
def test_that_generation_without(data, old_checkpoint, patch, message):
    check_needed(patch, message, lambda **e: generate(data, old_checkpoint, **e))


def test_pretrained_embeddings_whose_file_is_gone(data, checkpoint, tmp_path):
    state = safe_torch_load(checkpoint)
    vars(state["cfg"]["model"])["encoder_embed_path"] = "/gone/encoder.vec"
    torch.save(state, moved := tmp_path / "moved.pt")
    sentences = re.compile(r"^H-\d+\t.*", re.M)
    assert sentences.findall(generate(data, moved)) == sentences.findall(generate(data, checkpoint))
    check_needed("pretrained_embeddings", "/gone/encoder.vec", lambda **e: generate(data, moved, **e))


def test_generation_without_last_batch_drops_sentences(data, old_checkpoint):
    """The twelve sentences of the test set are a batch of eight and one of four."""
    log = generate(data, old_checkpoint, LIGHTCONV_SKIP_PATCHES="last_batch")
    assert len(re.findall(r"^H-\d+\t", log, re.M)) == (8 if is_applied("last_batch") else 12)
