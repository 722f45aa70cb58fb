"""fairseq's tasks beside translation and language modelling."""

import re
import shutil

import pytest

pytest.importorskip("fairseq")

from fairseq.tasks.multilingual_language_modeling import (
    MultilingualLanguageModelingConfig,
    MultilingualLanguageModelingTask,
)

import lightconv_plugin.models  # noqa: F401 (the patches)
from tests.compat.fairseq_runs import BLEU, LANGUAGE_MODEL, NO_GPU, PLUGIN, RECIPE, check_needed, train
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


@pytest.fixture
def languages(data, tmp_path):
    """The data of a task for text in several languages, of which there is one."""
    shutil.copytree(data.parent / "english", tmp_path / "data" / "en")
    shutil.copy(data.parent / "english" / "dict.txt", tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize("patched", [True, False], ids=["resumed_languages", "fairseq"])
def test_text_of_several_languages_is_shuffled_as_without_interruption(languages, monkeypatch, patched):
    if not patched:
        original = MultilingualLanguageModelingTask.load_dataset.__wrapped__
        monkeypatch.setattr(MultilingualLanguageModelingTask, "load_dataset", original)

    def order(epoch):
        """The sentences in the second epoch of a training that is begun, or resumed, in this one."""
        cfg = MultilingualLanguageModelingConfig(data=str(languages), sample_break_mode="eos", tokens_per_sample=20)
        cfg.seed, cfg.dataset_impl, cfg.train_subset, cfg.combine_val = 1, None, "train", False
        task = MultilingualLanguageModelingTask.setup_task(cfg)
        task.load_dataset("train", epoch=epoch)
        task.dataset("train").set_epoch(2)
        return task.dataset("train").ordered_indices().tolist()

    assert (order(1) == order(2)) is patched


def test_a_language_model_of_several_languages(languages, tmp_path):
    """Its text is drawn as it is: languages_without_sampling. multilingual_perplexity: fairseq-eval-lm scores it."""
    task = ["--task", "multilingual_language_modeling"]

    def training(**environment):
        options = [*LANGUAGE_MODEL, *task, *RECIPE, "--max-update", 1, "--save-dir", tmp_path]
        return run("train", languages, *PLUGIN, *options, **NO_GPU, **environment)

    def perplexity(**environment):
        options = [*task, "--tokens-per-sample", 20, "--path", tmp_path / "checkpoint_last.pt"]
        return run("eval-lm", languages, *PLUGIN, *options, **NO_GPU, **environment)

    training()
    assert re.search(r"Perplexity: \d", perplexity())
    check_needed("languages_without_sampling", "AssertionError", training)
    check_needed("multilingual_perplexity", "is not iterable", perplexity)
