"""A patch of fairseq_patches.py: the batches of a training that is resumed."""

import functools
import inspect
from typing import Any


def same_batches_when_resumed() -> bool:
    """fairseq-fixed makes other batches when a training is resumed in a later epoch than the first.

    A training makes its batches once, of sentences in an order drawn by seed + epoch, and deals them anew every epoch.
    One that is resumed in epoch N draws by seed + N: it goes on in the middle of other batches, sees some sentences of
    the epoch twice and others not, and ends in another state. Here the order is epoch 1's wherever batches are kept.
    (fairseq 0.12.2 draws by the seed alone.)
    """
    from fairseq.data import data_utils
    from fairseq.tasks import fairseq_task

    original = fairseq_task.FairseqTask.get_batch_iterator
    if "numpy_seed(seed + epoch)" not in inspect.getsource(original):
        return False

    @functools.wraps(original)
    def get_batch_iterator(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(self, dataset, *args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        kept = not options["disable_iterator_cache"] and not options["update_epoch_batch_itr"]
        if not kept or getattr(self.cfg, "rebuild_batches", False) or not self.can_reuse_epoch_itr(dataset):
            return original(self, dataset, *args, **kwargs)
        order, first = dataset.ordered_indices, options["seed"] + 1

        def ordered_indices() -> Any:
            with data_utils.numpy_seed(first):
                return order()

        dataset.ordered_indices = ordered_indices  # of this object alone, while its batches are made
        try:
            return original(self, dataset, *args, **kwargs)
        finally:
            del dataset.ordered_indices

    fairseq_task.FairseqTask.get_batch_iterator = get_batch_iterator
    return True
