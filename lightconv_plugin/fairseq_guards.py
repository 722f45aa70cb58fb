"""Two patches of fairseq_patches.py for checkpoints of strangers: no setting runs, no dictionary is mistaken."""

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
