"""Patches for fairseq's tasks."""

import functools
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
