"""The block around a convolution, which takes the place of self-attention."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.modules.linear import Linear


def split_parts(x: Tensor, parts: int) -> tuple[Tensor, Tensor | None]:
    """What a block's first Linear returns, (…, parts · c) → the convolution's input (…, c), and the gate of its output.

    parts: 1 if there are no gates, 2 for a GLU, 3 for gates of the input and of the output.
    """
    if parts == 3:
        before, after, values = x.chunk(3, dim=-1)
        return before * values, after
    return (x if parts == 1 else F.glu(x, dim=-1)), None


def gated(x: Tensor, gate: Tensor | None) -> Tensor:
    """A convolution's output, multiplied by its gate if there is one."""
    return x if gate is None else x * gate


class ConvBlock(nn.Module):
    """input dropout → Linear d→2c → GLU → zero the pads → convolution → Linear c→d (Wu et al. 2019, figure 2).

    Without `glu` the first Linear maps d→c. Without `project` there are no Linears: the convolution mixes channels and
    gates by itself (FullConv). With `gates_output` it is LFM2's gated short convolution (2025): the first Linear maps
    d→3c to B, C and x, and the second one reads C · convolution(B · x).

    Args:
        embed_dim: d.
        conv: the token mixer over c = conv.channels channels (convolutions.py).
        glu: gate the mixer's input (Dauphin et al. 2017): first half · sigmoid(second half).
        gates_output: gate the mixer's input and its output by products, instead of a GLU.
        project: whether the block has the two Linears; without them d = c.
        input_dropout: dropout probability at the block's input.
        zero_pads: zero the pads before mixing, so that they count as outside the sentence. Needed in an encoder, and in
            a decoder whose pads are on the left. A causal decoder's words never read pads on the right.
    """

    def __init__(
        self,
        embed_dim: int,
        conv: Any,
        *,
        glu: bool,
        gates_output: bool = False,
        project: bool = True,
        input_dropout: float = 0.0,
        zero_pads: bool = True,
    ):
        super().__init__()
        if not project and conv.channels != embed_dim:
            raise ValueError(f"a block without Linears needs conv.channels = embed_dim: {conv.channels} != {embed_dim}")
        self.parts = 3 if gates_output else 2 if glu and project else 1
        self.zero_pads = zero_pads
        self.num_heads = conv.num_heads
        self.head_dim = embed_dim // conv.num_heads
        self.input_dropout_module = Dropout(input_dropout, module_name="ConvBlock")
        self.linear1 = Linear(embed_dim, conv.channels * self.parts) if project else nn.Identity()
        self.conv: Any = conv
        self.linear2 = Linear(conv.channels, embed_dim) if project else nn.Identity()

    def forward(self, x: Tensor, pads: Tensor | None = None) -> Tensor:
        """The whole sequence at once: x (T,B,d), pads (B,T) bool and true at pads, on either side → (T,B,d)."""
        x, gate = self._enter(x, pads)
        return self.linear2(gated(self.conv(x), gate))

    def step(self, x: Tensor, state: Any, pads: Tensor | None = None) -> tuple[Tensor, Any]:
        """The next n ≥ 1 tokens of a causal sequence, x (n,B,d) and pads (B,n) → ((n,B,d), state).

        state: None before the first token, then what the previous call returned: the mixer's last inputs.
        """
        x, gate = self._enter(x, pads)
        x, state = self.conv.step(x, state)
        return self.linear2(gated(x, gate)), state

    @staticmethod
    def reorder(state: Any, order: Tensor) -> Any:
        """For beam search: a state whose batch row n is row order[n] of the given state; order (B',) int64."""
        return None if state is None else state.index_select(1, order)

    def _enter(self, x: Tensor, pads: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The mixer's input, and the gate of its output if there is one."""
        x, gate = split_parts(self.linear1(self.input_dropout_module(x)), self.parts)
        if self.zero_pads and pads is not None:
            x = x.masked_fill(pads.transpose(0, 1).unsqueeze(-1), 0)
        return x, gate
