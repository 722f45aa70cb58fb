"""Preparation of corpora: from published archives to fairseq's binary data, in steps that can be resumed."""

from collections.abc import Sequence


def prepare(task: str, arguments: Sequence[str] = ()) -> None:
    """Prepare the corpus of a task: download what is missing, check it, tokenise, encode and binarise it.

    Finished steps are not repeated; after an interruption, the same call resumes.

    Args:
        task: a name of `tasks.TASKS`, such as multi30k_en_de
        arguments: command-line options: --data, --out, --mirror, --workers, --any-size and the task's own options

    Raises:
        InputError: an unknown task, a wrong argument, damaged or unexpected data, a failed download, a full disk.
        OSError: a folder that cannot be written.
    """
    from lightconv_plugin.recipes.data import tasks  # late: the text modules import this package, but not the tasks

    tasks.prepare(task, arguments)
