"""Counts the parameters of a checkpoint without building its model."""

from pathlib import Path

from lightconv_plugin.checkpoints.loading import load_model_checkpoint

# Entries that fairseq saves besides the parameters (the second one in 0.12.2, an empty tensor that holds the device).
NOT_PARAMETERS = ("version", "_float_tensor")


def count_parameters(checkpoint: Path) -> int:
    """The number of model parameters in a fairseq checkpoint, each counted once: "shared model params" in its log.

    A checkpoint has tied matrices under each of their names, and an averaging tool may have copied them, so matrices
    with equal content count once. A constant matrix, as before any training, may equal another by chance and always
    counts.

    Raises InputError for a file that is not a checkpoint of a model, or that cannot be loaded safely.
    """
    import torch

    total = 0
    seen: dict[tuple, list[torch.Tensor]] = {}
    for key, value in load_model_checkpoint(checkpoint)["model"].items():
        if key.rpartition(".")[2] in NOT_PARAMETERS:
            continue
        if value.dim() > 1 and value.numel() > 1 and bool((value != value.flatten()[0]).any()):
            begin = value.flatten()[:8].tolist()
            same = seen.setdefault((tuple(value.shape), value.dtype, *begin), [])
            if any(torch.equal(value, other) for other in same):
                continue
            same.append(value)
        total += value.numel()
    return total
