"""fairseq's tasks beside translation and language modelling."""

import shutil

import pytest

pytest.importorskip("fairseq")

from fairseq.tasks.multilingual_denoising import MultilingualDenoisingConfig, MultilingualDenoisingTask

import lightconv_plugin.models  # noqa: F401 (the patches)
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


@pytest.mark.parametrize("patched", [True, False], ids=["resumed_languages", "fairseq"])
def test_text_of_several_languages_is_shuffled_as_without_interruption(data, tmp_path, monkeypatch, patched):
    shutil.copytree(data.parent / "english", tmp_path / "en")
    shutil.copy(tmp_path / "en" / "dict.txt", tmp_path)
    if not patched:
        monkeypatch.setattr(
            MultilingualDenoisingTask, "load_dataset", MultilingualDenoisingTask.load_dataset.__wrapped__
        )

    def order(epoch):
        """The sentences in the second epoch of a training that is begun, or resumed, in this one."""
        options = {"data": str(tmp_path), "langs": "en", "sample_break_mode": "eos", "tokens_per_sample": 20, "seed": 1}
        cfg = MultilingualDenoisingConfig(**options, dataset_impl=None, train_subset="train", valid_subset="valid")
        task = MultilingualDenoisingTask.setup_task(cfg)
        task.load_dataset("train", epoch=epoch)
        task.dataset("train").set_epoch(2)
        return task.dataset("train").ordered_indices().tolist()

    assert (order(1) == order(2)) is patched
