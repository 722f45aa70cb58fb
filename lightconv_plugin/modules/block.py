"""The block around a convolution: what stands where self-attention stood."""

from typing import Any

import torch.nn.functional as F
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from lightconv_plugin.modules.linear import Linear

_STATE = "conv_state"
# Upstream's LightConv keeps the block's parameters, and its names of the norms, directly in the layer.
_UPSTREAM_NAMES = {
    "linear1": "{block}.linear1",
    "linear2": "{block}.linear2",
    "conv": "{block}.conv",
    "layer_norm1": "{layer}.self_attn_layer_norm",
    "layer_norm2": "{layer}.final_layer_norm",
    "conv_layer_norm": "{layer}.self_attn_layer_norm",
}


@with_incremental_state
class ConvBlock(nn.Module):
    """input dropout → Linear d→2c → GLU → zero the pads → convolution → Linear c→d (Wu et al. 2019, figure 2).

    Without `glu` the first Linear maps d→c; without `project` there are no Linears, as the convolution mixes channels
    and gates by itself (FullConv).

    It answers fairseq's MultiheadAttention call, so fairseq's Transformer layers take it as their self-attention and
    keep norms, residuals, encoder attention and FFN.

    Args:
        embed_dim: d.
        conv: the token mixer over c = conv.channels channels (convolutions.py).
        glu: gate the mixer's input (Dauphin et al. 2017): first half · sigmoid(second half).
        project: whether there are the two Linears; else d = c.
        input_dropout: probability at the block's input.
        zero_pads: zero the positions of key_padding_mask before mixing, so that pads read like the outside of the
            sentence. An encoder needs it. In a causal decoder right pads come after all that counts: not needed.
        q_noise, qn_block_size: quantisation noise of the two Linears (Fan et al. 2020), as fairseq's attention has it.
    """

    def __init__(
        self,
        embed_dim: int,
        conv: Any,
        *,
        glu: bool,
        project: bool = True,
        input_dropout: float = 0.0,
        zero_pads: bool = True,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
    ):
        super().__init__()
        if not project and conv.channels != embed_dim:
            raise ValueError(f"a block without Linears needs conv.channels = embed_dim: {conv.channels} != {embed_dim}")
        self.glu = glu and project
        self.zero_pads = zero_pads
        self.num_heads = conv.num_heads
        self.head_dim = embed_dim // conv.num_heads
        self.input_dropout_module = FairseqDropout(input_dropout, module_name=self.__class__.__name__)

        def linear(inputs: int, outputs: int) -> nn.Module:
            return quant_noise(Linear(inputs, outputs), q_noise, qn_block_size) if project else nn.Identity()

        self.linear1 = linear(embed_dim, conv.channels * (2 if glu else 1))
        self.conv: Any = conv
        self.linear2 = linear(conv.channels, embed_dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """query (T,B,d) → ((T,B,d), None). `key` and `value` are the query again, `attn_mask` is causality, which the
        convolution's padding already gives; all three are there for fairseq's call and are not read.

        Args:
            query: with an incremental state, the n ≥ 1 tokens that come next; else the whole sequence.
            key_padding_mask: (B,T) bool, true at pads, on either side.
            incremental_state: fairseq's dictionary of one generation; it keeps the last K − 1 inputs of the mixer.
        """
        x = self.linear1(self.input_dropout_module(query))
        if self.glu:
            x = F.glu(x, dim=-1)
        if self.zero_pads and key_padding_mask is not None:
            x = x.masked_fill(key_padding_mask.transpose(0, 1).unsqueeze(-1), 0)
        if incremental_state is None:
            x = self.conv(x)
        else:
            x, state = self.conv.step(x, self._get_input_buffer(incremental_state).get(_STATE))
            self._set_input_buffer(incremental_state, {_STATE: state})
        return self.linear2(x), None

    def reorder_incremental_state(self, incremental_state: dict, new_order: Tensor) -> dict:
        """Beam search: the batch of the state becomes state[:, new_order]; new_order (B',) int64."""
        state = self._get_input_buffer(incremental_state).get(_STATE)
        if state is not None:
            self._set_input_buffer(incremental_state, {_STATE: state.index_select(1, new_order)})
        return incremental_state

    def _get_input_buffer(self, incremental_state: dict | None) -> dict:
        # fairseq's decoder layer asks for the buffer under this name, with and without incremental state.
        return self.get_incremental_state(incremental_state, _STATE) or {}  # type: ignore[operator]

    def _set_input_buffer(self, incremental_state: dict, buffer: dict) -> None:
        self.set_incremental_state(incremental_state, _STATE, buffer)  # type: ignore[operator]

    def upgrade_state_dict_named(self, state_dict: dict, name: str) -> dict:
        """Renames the keys of fairseq's own LightConv layers, of every version, to this block's; in place.

        Also: (H,K) filters of models trained with the CUDA layer get their middle dimension, and the never used (and
        never initialised) `conv_bias` of newer dynamic layers is dropped.
        """
        layer = name.rpartition(".")[0]
        for old, new in _UPSTREAM_NAMES.items():
            prefix = f"{layer}.{old}."
            for key in [key for key in state_dict if key.startswith(prefix)]:
                target = new.format(block=name, layer=layer) + "." + key[len(prefix) :]
                state_dict[target] = state_dict.pop(key)
        if self.conv.conv_bias is None:
            state_dict.pop(f"{name}.conv.conv_bias", None)
        weight = f"{name}.conv.weight"
        if weight in state_dict and state_dict[weight].dim() == 2:
            state_dict[weight] = state_dict[weight].unsqueeze(1)
        return state_dict
