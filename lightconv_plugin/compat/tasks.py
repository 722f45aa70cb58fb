"""Patches for fairseq's tasks."""

import functools
import math
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from lightconv_plugin.compat.registry import patch


def _task_forgets_its_options() -> bool:
    from fairseq.data import Dictionary
    from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask

    return not hasattr(TranslationFromPretrainedBARTTask(Namespace(langs="de,en"), Dictionary(), Dictionary()), "args")


@patch(versions="all versions of fairseq", needed=_task_forgets_its_options)
def pretrained_bart_options() -> None:
    """fairseq's task translation_from_pretrained_bart fails when it loads data: it has no attribute `args`.

    Its base class, the translation task, keeps the options in `cfg` only, since it has a dataclass for them.
    """
    from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask as Task

    original = Task.__init__

    def __init__(self: Any, args: Namespace, *dictionaries: Any) -> None:
        self.args = args
        original(self, args, *dictionaries)

    Task.__init__ = __init__


@patch(versions="all versions of fairseq")
def resumed_languages() -> None:
    """fairseq's tasks for text in several languages shuffle it differently when a training is resumed in a later epoch.

    They do so when the text is loaded, with seed + epoch, and without interruption that is in the first epoch only. A
    training that is resumed continues in the middle of different batches. Here the text of one folder is always loaded
    as in the first epoch; what changes from epoch to epoch is drawn after that.
    """
    from fairseq.tasks.multilingual_denoising import MultilingualDenoisingTask
    from fairseq.tasks.multilingual_language_modeling import MultilingualLanguageModelingTask
    from fairseq.tasks.multilingual_masked_lm import MultiLingualMaskedLMTask

    for task in (MultilingualDenoisingTask, MultilingualLanguageModelingTask, MultiLingualMaskedLMTask):
        task.load_dataset = _loaded_as_in_the_first_epoch(task.load_dataset)


def _loaded_as_in_the_first_epoch(load: Callable) -> Callable:
    @functools.wraps(load)
    def load_dataset(self: Any, split: str, epoch: int = 1, *args: Any, **kwargs: Any) -> Any:
        return load(self, split, epoch if self.has_sharded_data(split) else 1, *args, **kwargs)

    return load_dataset


def _all_sentences_are_too_many() -> bool:
    from fairseq.data import ListDataset, ResamplingDataset

    try:
        ResamplingDataset(ListDataset([0]), replace=False, size_ratio=1.0)
    except AssertionError:
        return True
    return False


@patch(versions="all versions of fairseq", needed=_all_sentences_are_too_many)
def languages_without_sampling() -> None:
    """fairseq's multilingual_language_modeling fails (`AssertionError`) where a language is neither cut nor repeated.

    This is so with the default of --multilang-sampling-alpha. The part of its text that is drawn must be less than 1,
    and that is rounded up to a number of sentences.
    """
    from fairseq.data import ResamplingDataset

    original = ResamplingDataset.__init__

    @functools.wraps(original)
    def __init__(
        self: Any,
        dataset: Any,
        weights: Any = None,
        replace: bool = True,
        size_ratio: float = 1.0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not replace and size_ratio == 1:
            size_ratio = math.nextafter(1, 0)
        original(self, dataset, weights, replace, size_ratio, *args, **kwargs)

    ResamplingDataset.__init__ = __init__


@patch(versions="all versions of fairseq")
def multilingual_perplexity() -> None:
    """fairseq-eval-lm fails with the task multilingual_language_modeling, whose batches cannot be iterated over.

    The task for one language returns the batches of an epoch there.
    """
    from fairseq.data.iterators import EpochBatchIterating
    from fairseq.tasks.multilingual_language_modeling import MultilingualLanguageModelingTask as Task

    original = Task.eval_lm_dataloader

    @functools.wraps(original)
    def eval_lm_dataloader(self: Any, *args: Any, **kwargs: Any) -> Any:
        batches = original(self, *args, **kwargs)
        return batches.next_epoch_itr(shuffle=False) if isinstance(batches, EpochBatchIterating) else batches

    Task.eval_lm_dataloader = eval_lm_dataloader
