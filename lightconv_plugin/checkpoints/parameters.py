"""The number of parameters of a checkpoint, without building its model."""

from pathlib import Path

from lightconv_plugin.checkpoints.loading import load_model_checkpoint

# What fairseq saves beside the parameters (the second: its 0.12.2, an empty tensor that holds the device).
NOT_PARAMETERS = ("version", "_float_tensor")


def count_parameters(checkpoint: Path) -> int:
    """Parameters of the model in a checkpoint of fairseq, each once: the "shared model params" of its training log.

    A checkpoint has tied matrices under each of their names, and an averaging tool may have copied them, so matrices of
    equal content count once. A matrix of one constant, as before any training, may equal another by chance and always
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
