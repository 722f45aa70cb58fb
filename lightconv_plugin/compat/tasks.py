"""Patches for fairseq's tasks."""

from argparse import Namespace
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
