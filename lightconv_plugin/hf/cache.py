"""The decoder's state between the steps of `generate`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightconv_plugin.modules.transformer import DecoderState

NAMES = ("past_key_values", "cache")
# What transformers calls the cache, among arguments and outputs: "cache" since 5.24.
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


class LightConvCache(Cache):
    """The decoder's state for `generate`.

    It holds the states of the mixers (the last K − 1 inputs of a convolution, keys and values of attention) and, in a
    translation model, the keys and values of the encoder's output, which are computed once.

    A new cache is empty: `model(…, past_key_values=LightConvCache())` fills it. Unlike a cache of attention only, it
    cannot be cropped: a convolution does not keep inputs beyond its kernel.

    Attributes:
        state: the decoder's state; None before the first token.
        length: number of tokens seen, including pads.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: DecoderState | None = None
        self.length = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length}, batch_size={self.batch_size})"

    def __len__(self) -> int:
        """Number of layers; 0 before the first token."""
        return 0 if self.state is None else len(self.state.mixers)

    def update_state(self, state: DecoderState, new: int) -> None:
        """Store the state after `new` more tokens."""
        self.state = state
        self.length += new

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        """Whether a layer does not know how many tokens it has seen: `generate` would then repeat those of a prompt."""
        return [False] * len(self)

    @property
    def batch_size(self) -> int:
        """-1 before the first token."""
        return -1 if self.state is None else len(self.state.seen)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.state is not None

    def reset(self) -> None:
        """Make the cache empty again."""
        self.state = None
        self.length = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row n becomes the old row beam_idx[n]; beam_idx (B',) int64."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx.to(self.state.seen.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        if self.state is not None:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, given as indices or as a mask."""
        if self.state is not None:
            self.reorder_cache(torch.arange(self.batch_size, device=indices.device)[indices])

    def crop(self, tokens_to_remove: int) -> None:
        """Not supported: RuntimeError unless `tokens_to_remove` is 0."""
        if tokens_to_remove:
            raise RuntimeError(
                f"cannot remove {abs(tokens_to_remove)} tokens: a convolution forgets what it no longer needs"
            )

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported, since the states are not only keys and values: RuntimeError."""
        raise RuntimeError("a LightConvCache works only with the models of lightconv_plugin.hf")
