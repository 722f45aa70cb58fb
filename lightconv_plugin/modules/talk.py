"""TaLK convolutions as a module, which holds the parameters for `ops.talkconv`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin import ops
from lightconv_plugin.modules.dropout import Dropout


class TaLKConv(nn.Module):
    """Time-aware large kernel convolution (Lioutas & Guo 2020, section 3): a sum over a window whose two ends are
    predicted from the current token, divided by the size of the longest window.

    Args:
        channels: C, divisible by num_heads.
        max_left, max_right: L and R ≥ 0, the longest reach to either side; max_right is 0 in a decoder.
        num_heads: H; the channels of a head share a window.
        weight_dropout: dropout of the relative offsets. As published, it scales the kept offsets by 1/(1−p), so a
            window may be longer than L in training.

    Parameters: offsets.weight (H or 2H, C), offsets.bias: rows h reach to the left, rows H + h to the right.
    """

    conv_bias = None

    def __init__(self, channels: int, max_left: int, max_right: int, num_heads: int, *, weight_dropout: float = 0.0):
        super().__init__()
        if num_heads < 1 or channels % num_heads:
            raise ValueError(f"num_heads must divide the channels: got {num_heads=} for {channels=}")
        for name, reach in (("max_left", max_left), ("max_right", max_right)):
            if reach < 0:
                raise ValueError(f"{name} must be at least 0, got {reach}")
        self.channels = channels
        self.max_left = max_left
        self.max_right = max_right
        self.num_heads = num_heads
        self.weight_dropout_module = Dropout(weight_dropout, module_name=type(self).__name__)
        # Not Xavier-initialised like the other Linears: the published models use nn.Linear's default.
        self.offsets = nn.Linear(channels, num_heads * (2 if max_right else 1))

    def relative_offsets(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x (T,B,C) → how far each window reaches, (T,B,H) as a share of L, and of R (None where R is 0)."""
        offsets = self.weight_dropout_module(torch.sigmoid(self.offsets(x)))
        return offsets[..., : self.num_heads], offsets[..., self.num_heads :] if self.max_right else None

    def forward(self, x: Tensor) -> Tensor:
        """(T,B,C) → (T,B,C), the whole sequence at once."""
        return ops.talkconv(x, *self.relative_offsets(x), self.max_left, self.max_right)

    def step(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next n tokens (n,B,C) of a causal sequence; the state is the last min(seen, L) inputs.

        With dropout p on, windows are up to L/(1−p) long, and the state is as long.
        """
        if self.max_right:
            raise ValueError(f"step needs a causal window, max_right = 0: got max_right={self.max_right}")
        offsets, rate = self.relative_offsets(x)[0], self.weight_dropout_module.rate
        if not 0 < rate < 1:  # at 1 all offsets are dropped
            return ops.talkconv_step(x, state, offsets, self.max_left)
        # The operator's step keeps L rows only, so these windows are those of a full pass over the state and x.
        seen = x if state is None else torch.cat([state, x])
        before = seen.shape[0] - x.shape[0]
        out = ops.talkconv(seen, F.pad(offsets, (0, 0, 0, 0, before, 0)), None, self.max_left, 0)[before:]
        reach = math.floor(self.max_left / (1 - rate)) + 1  # rounded up, also where the offset's type rounds up
        return out, seen[max(0, seen.shape[0] - reach) :].clone()

    def extra_repr(self) -> str:
        return f"{self.channels}, max_left={self.max_left}, max_right={self.max_right}, num_heads={self.num_heads}"
