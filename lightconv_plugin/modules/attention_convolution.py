"""Short convolutions along the sequence of attention's queries, keys and values, each separately.

So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling": a depthwise convolution of a few
taps after each of self-attention's three projections, before the heads attend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lightconv_plugin.modules.convolutions import DepthwiseConv, DynamicConv, LightweightConv

PROJECTIONS = ("q", "k", "v")
KINDS = ("depthwise", "lightweight", "dynamic")


@dataclass(frozen=True)
class AttentionConv:
    """Which projections of an attention layer have a convolution, and of which kind.

    projections: some of PROJECTIONS, in this order.
    kernel_size: K ≥ 2.
    kind: "depthwise": one filter per channel, not normalised. It is initialised to the current token's tap alone, so a
        new model computes the same as without it. "lightweight" and "dynamic": one filter per attention head,
        normalised by softmax.
    """

    projections: tuple[str, ...]
    kernel_size: int = 4
    kind: str = "depthwise"

    def __post_init__(self) -> None:
        if not self.projections or [name for name in PROJECTIONS if name in self.projections] != [*self.projections]:
            given = ",".join(map(str, self.projections))
            raise ValueError(f"projections must be some of {','.join(PROJECTIONS)}, in this order: got {given!r}")
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.kernel_size < 2:
            raise ValueError(f"kernel_size must be at least 2, got {self.kernel_size}")

    def build(self, embed_dim: int, num_heads: int, *, causal: bool) -> dict[str, nn.Module]:
        """A convolution over d channels for each of the projections, by the projection's name.

        causal: the last tap is the current token. Otherwise centred; an even kernel has one more tap after it than
            before it.
        """
        padding_l = self.kernel_size - 1 if causal else (self.kernel_size - 1) // 2
        return {name: self._build(embed_dim, num_heads, padding_l) for name in self.projections}

    def _build(self, embed_dim: int, num_heads: int, padding_l: int) -> nn.Module:
        if self.kind == "lightweight":
            return LightweightConv(embed_dim, self.kernel_size, padding_l, num_heads)
        if self.kind == "dynamic":
            return DynamicConv(embed_dim, self.kernel_size, padding_l, num_heads)
        conv = DepthwiseConv(embed_dim, self.kernel_size, padding_l)
        with torch.no_grad():
            conv.weight.zero_()
            conv.weight[:, :, padding_l] = 1
        return conv
