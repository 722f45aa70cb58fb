"""The full convolution, from every input channel to every output channel: where the paper's ablation starts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin.modules.convolutions import Convolution


class FullConv(Convolution):
    """A non-separable convolution over time (row "CNN" of Wu et al. 2019, table 3), with gates as in convolutional
    sequence to sequence learning (Gehring et al. 2017).

    It mixes channels itself, so the block around it has no Linears. Without a GLU and for K = 3, that is C² more
    parameters per block than with a lightweight convolution: the difference between those rows of the table.

    Args:
        channels: C, in and out.
        kernel_size: K ≥ 1.
        padding_l: how many of the K taps lie before the current token.
        glu: convolve to 2C channels and gate: first half · sigmoid(second half).
        weight_dropout: probability p of DropConnect: each weight is dropped with p (one mask per batch).

    Parameters: weight (C or 2C, C, K), Xavier-uniform; bias (C or 2C,), zero.
    """

    def __init__(
        self, channels: int, kernel_size: int, padding_l: int, *, glu: bool = False, weight_dropout: float = 0.0
    ):
        super().__init__(channels, kernel_size, padding_l, 1, weight_dropout=weight_dropout, normalize="none")
        self.glu = glu
        self.weight = nn.Parameter(torch.empty(channels * (2 if glu else 1), channels, kernel_size))
        self.bias = nn.Parameter(torch.zeros(self.weight.shape[0]))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(T,B,C) → (T,B,C); positions outside the sequence read as zero."""
        return self._convolve(x, self.padding_l, self.kernel_size - 1 - self.padding_l)

    def step(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next n tokens (n,B,C) of a causal sequence; the state is the last min(seen, K − 1) inputs."""
        self._prepare_step(x)
        history = self.kernel_size - 1
        seen = x if state is None else torch.cat([state, x])
        missing = history - (seen.shape[0] - x.shape[0])
        return self._convolve(seen, missing, 0), seen[max(0, seen.shape[0] - history) :].clone()

    def _convolve(self, x: Tensor, left: int, right: int) -> Tensor:
        y = F.pad(x.permute(1, 2, 0), (left, right))
        y = F.conv1d(y, self.weight_dropout_module(self.weight), self.bias)
        return (F.glu(y, dim=1) if self.glu else y).permute(2, 0, 1)

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}, padding_l={self.padding_l}, glu={self.glu}"
