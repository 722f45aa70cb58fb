"""A training that is resumed in any epoch has the batches that it would have had."""

import inspect

import numpy as np
import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.tasks.fairseq_task import FairseqTask, LegacyFairseqTask

import lightconv_plugin.models  # noqa: F401 (the patches)

LENGTHS = np.array([3, 2, 3, 2, 3, 3, 2, 4] * 5)


class Task(LegacyFairseqTask):
    """A task whose batches are kept over epochs, or not."""

    def __init__(self, kept=True):
        super().__init__(args=None)
        self.kept = kept

    def can_reuse_epoch_itr(self, dataset):
        return self.kept


def batches(epoch, kept=True, get=FairseqTask.get_batch_iterator, seed=1):
    """The batches that a training has which begins, or is resumed, in this epoch."""
    words = Dictionary()
    sentences = [[words.add_symbol(f"w{number}_{i}") for i in range(n)] for number, n in enumerate(LENGTHS)]
    dataset = LanguagePairDataset(sentences, LENGTHS, words, shuffle=True)
    iterator = get(Task(kept), dataset, max_sentences=4, seed=seed, epoch=epoch)
    assert "ordered_indices" not in vars(dataset)
    return [list(map(int, batch)) for batch in iterator.frozen_batches]


def test_a_resumed_training_has_the_batches_of_the_first_epoch():
    assert batches(3) == batches(1) == batches(7)
    assert batches(1) != batches(1, seed=2)


def test_fairseq_alone_makes_others():
    """What the patch is for; and its first epoch is as it was."""
    patched = FairseqTask.get_batch_iterator
    if not hasattr(patched, "__wrapped__"):
        assert "numpy_seed(seed)" in inspect.getsource(patched)
        pytest.skip("this fairseq draws by the seed alone")
    assert batches(3, get=patched.__wrapped__) != batches(1, get=patched.__wrapped__)
    assert batches(1, get=patched.__wrapped__) == batches(1)


def test_batches_that_are_made_anew_every_epoch_stay_so():
    if not hasattr(FairseqTask.get_batch_iterator, "__wrapped__"):
        pytest.skip("this fairseq draws by the seed alone")
    assert batches(3, kept=False) != batches(1, kept=False)
