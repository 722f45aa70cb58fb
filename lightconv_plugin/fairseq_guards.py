"""Patches of fairseq_patches.py for checkpoints: no setting runs, nothing of another model is mistaken for its own."""

import sys
from typing import Any

import torch

from lightconv_plugin.safe_expressions import evaluate


def settings_that_run() -> bool:
    """fairseq calls Python's eval on settings, also on those in a checkpoint: loading one could run any command.

    Safe loading of tensors does not help there (`--adaptive-softmax-cutoff`, the layers of fconv, …). A global of that
    name goes before the builtin; evaluate() reads all that fairseq's own defaults and documentation write.
    """
    import fairseq.models
    import fairseq.optim
    import fairseq.tasks  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith("fairseq."):
            vars(module).setdefault("eval", evaluate)
    return True


def other_dictionaries() -> bool:
    """fairseq tells of dictionaries that are not those of a checkpoint only by the shapes of tensors, if at all.

    Training hides even these ("please ensure that the architectures match"); a traceback shows what is named here.
    """
    from fairseq.models import BaseFairseqModel

    original = BaseFairseqModel.load_state_dict

    def load_state_dict(self: torch.nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, state_dict, *args, **kwargs)
        except RuntimeError as error:  # not before: some models bring the table of a checkpoint to the size of theirs
            for side in ("encoder", "decoder"):
                theirs = state_dict.get(f"{side}.embed_tokens.weight")
                ours = getattr(getattr(getattr(self, side, None), "embed_tokens", None), "weight", None)
                if theirs is not None and ours is not None and len(theirs) != len(ours):
                    raise RuntimeError(
                        f"the checkpoint has {len(theirs)} embeddings in its {side}, but its dictionary here has "
                        f"{len(ours)} entries with fairseq's own: it is not the dictionary of that training; give the "
                        "data that it was trained on, and its languages in its direction"
                    ) from error
            raise

    BaseFairseqModel.load_state_dict = load_state_dict
    return True


def optimizers_of_other_parameters() -> bool:
    """fairseq counts the parameters of a saved optimizer, and does not look whether they are those of the model.

    With another order of the same number, as a training that fairseq 0.12.2 began has it, the first update fails far
    away ("The size of tensor a (24) must match"), or moments of the same shape go to other parameters.
    """
    from fairseq.optim import FairseqOptimizer

    original = FairseqOptimizer.load_state_dict

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        ours = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        theirs = [number for group in state_dict["param_groups"] for number in group["params"]]
        cause = None
        if len(ours) != len(theirs):
            cause = f"of {len(theirs)} parameters, and the model here has {len(ours)}"
        else:
            for place, (parameter, number) in enumerate(zip(ours, theirs, strict=True), 1):
                for name in ("exp_avg", "momentum_buffer"):  # of a parameter's shape in every optimizer that has them
                    saved = state_dict["state"].get(number, {}).get(name)
                    if cause is None and torch.is_tensor(saved) and saved.shape != parameter.shape:
                        shapes = f"{tuple(saved.shape)}, and the model's is {tuple(parameter.shape)}"
                        cause = f"of other parameters: the shape of its parameter {place} is {shapes}"
        if cause is not None:
            raise ValueError(
                f"the checkpoint's optimizer state is {cause}; --reset-optimizer goes on from its parameters alone"
            )
        return original(self, state_dict, *args, **kwargs)

    FairseqOptimizer.load_state_dict = load_state_dict
    return True


def uninitialised_positions() -> bool:
    """fairseq 0.12.2 saves a number that nothing ever sets with sinusoidal positions: the memory's, at times NaN.

    It marks a device and a type. Two runs of the same training left different files.
    """
    from fairseq.modules import SinusoidalPositionalEmbedding as Positions

    if not hasattr(Positions(4, 0, 2), "_float_tensor"):
        return False
    original = Positions.__init__

    def __init__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.register_load_state_dict_post_hook(_zero_marker)
        _zero_marker(self)

    Positions.__init__ = __init__
    return True


def _zero_marker(positions: Any, keys: Any = None) -> None:
    """Also what fairseq puts into a state before it loads it."""
    positions._float_tensor.zero_()
