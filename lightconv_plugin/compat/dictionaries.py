"""Patches for dictionaries: those that do not match a checkpoint, and those of masked language models."""

import functools
import inspect
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


def _cannot_be_loaded() -> bool:
    from fairseq.data import Dictionary
    from fairseq.data.legacy.masked_lm_dictionary import MaskedLMDictionary

    name = "add_special_symbols"
    loading, making = (inspect.signature(call).parameters for call in (Dictionary.load, MaskedLMDictionary))
    return name in loading and name not in making


@patch(versions="fairseq's main branch, fairseq-fixed", needed=_cannot_be_loaded)
def masked_lm_dictionaries() -> None:
    """fairseq's tasks cross_lingual_lm and translation_from_pretrained_xlm cannot load a dictionary (`TypeError`).

    `Dictionary.load` passes an argument that their dictionary, which always has the special symbols, does not take.
    """
    from fairseq.data.legacy.masked_lm_dictionary import MaskedLMDictionary

    original = MaskedLMDictionary.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, add_special_symbols: bool = True, **kwargs: Any) -> None:
        original(self, *args, **kwargs)

    MaskedLMDictionary.__init__ = __init__
