"""A patch for dictionaries that do not match a checkpoint."""

from typing import Any

import torch

from lightconv_plugin.compat.registry import patch


@patch(versions="all versions of fairseq")
def dictionary_sizes() -> None:
    """fairseq reports dictionaries that do not match a checkpoint only as tensor shapes, if at all.

    Training hides even these ("please ensure that the architectures match"); its traceback shows the error raised here.
    """
    from fairseq.models import BaseFairseqModel

    original = BaseFairseqModel.load_state_dict

    def load_state_dict(self: torch.nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, state_dict, *args, **kwargs)
        except RuntimeError as error:  # not checked in advance: some models resize a checkpoint's table to their own
            for side in ("encoder", "decoder"):
                theirs = state_dict.get(f"{side}.embed_tokens.weight")
                ours = getattr(getattr(getattr(self, side, None), "embed_tokens", None), "weight", None)
                if theirs is not None and ours is not None and len(theirs) != len(ours):
                    raise RuntimeError(
                        f"the checkpoint has {len(theirs)} embeddings in its {side}, but its dictionary here has "
                        f"{len(ours)} entries with fairseq's own: the dictionary does not match the checkpoint; check "
                        "the data folder and the language direction"
                    ) from error
            raise

    BaseFairseqModel.load_state_dict = load_state_dict
