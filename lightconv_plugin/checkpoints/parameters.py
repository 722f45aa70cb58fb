"""The number of parameters of a checkpoint, without building its model."""

from pathlib import Path

from lightconv_plugin.checkpoints.loading import safe_torch_load
from lightconv_plugin.errors import InputError

# What fairseq saves beside the parameters (the second: its 0.12.2, an empty tensor that tells the device).
NOT_PARAMETERS = ("version", "_float_tensor")


def count_parameters(checkpoint: Path) -> int:
    """Parameters of the model in a checkpoint of fairseq, each once: the "shared model params" of its training log.

    Tied matrices stand in a checkpoint under each of their names, and a tool that averages may have made copies of
    them. So matrices of equal content count once; a matrix of one constant, as before any training, could be another's
    double by chance and counts as its own.

    Raises InputError for a file that is no checkpoint of a model, or that cannot be loaded safely.
    """
    import torch

    state = safe_torch_load(checkpoint)
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not model:
        raise InputError(f"{checkpoint} is not a checkpoint of fairseq: it holds no 'model'")
    total = 0
    seen: dict[tuple, list[torch.Tensor]] = {}
    for key, value in model.items():
        if not isinstance(value, torch.Tensor) or key.rpartition(".")[2] in NOT_PARAMETERS:
            continue
        if value.dim() > 1 and value.numel() > 1 and bool((value != value.flatten()[0]).any()):
            begin = value.flatten()[:8].tolist()
            same = seen.setdefault((tuple(value.shape), value.dtype, *begin), [])
            if any(torch.equal(value, other) for other in same):
                continue
            same.append(value)
        total += value.numel()
    return total
