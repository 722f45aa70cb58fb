"""LightConv, DynamicConv and their ancestor, the depthwise convolution, as modules, which hold the parameters for the
operators of `lightconv_plugin.ops`.

All have the same interface, and the block around them uses nothing else:

    conv(x)              (T,B,C) → (T,B,C), the whole sequence at once
    conv.step(x, state)  the next n tokens (n,B,C) of a causal sequence, and the state of those before → (out, state)
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightconv_plugin import ops
from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.modules.linear import Linear
from lightconv_plugin.ops.normalize import normalize

# These hooks set the weight or the bias before each forward pass.
_COMPUTES_PARAMETER = (BasePruningMethod, SpectralNorm, WeightNorm)


class Convolution(nn.Module):
    """The common parts: geometry, dropout of the filter (DropConnect) and the optional output bias."""

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        padding_l: int,
        num_heads: int,
        *,
        weight_dropout: float = 0.0,
        normalize: str = "softmax",
        conv_bias: bool = False,
    ):
        super().__init__()
        if num_heads < 1 or channels % num_heads:
            raise ValueError(f"num_heads must divide the channels: got {num_heads=} for {channels=}")
        if kernel_size < 1:
            raise ValueError(f"kernel_size must be at least 1, got {kernel_size}")
        if not 0 <= padding_l < kernel_size:
            raise ValueError(f"padding_l must be in 0 … kernel_size - 1 = {kernel_size - 1}, got {padding_l}")
        self.channels = channels
        self.kernel_size = kernel_size
        self.padding_l = padding_l
        self.num_heads = num_heads
        self.normalize = normalize
        # A module rather than a number: fairseq's --retain-dropout can keep it on at inference.
        self.weight_dropout_module = Dropout(weight_dropout, module_name=type(self).__name__)
        self.conv_bias = nn.Parameter(torch.zeros(channels)) if conv_bias else None

    def _options(self) -> dict:
        return {"normalize": self.normalize, "dropout": self.weight_dropout_module.rate, "bias": self.conv_bias}

    def _prepare_step(self, x: Tensor) -> None:
        """Check that the convolution is causal, and compute anew the parameters that a hook of torch's computes."""
        if self.padding_l != self.kernel_size - 1:
            raise ValueError(
                "step needs a causal convolution, padding_l = kernel_size - 1: "
                f"got padding_l={self.padding_l}, kernel_size={self.kernel_size}"
            )
        for hook in self._forward_pre_hooks.values():
            if isinstance(hook, _COMPUTES_PARAMETER):
                hook(self, (x,))

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, kernel_size={self.kernel_size}, padding_l={self.padding_l}, "
            f"num_heads={self.num_heads}, normalize={self.normalize}, weight_dropout={self.weight_dropout_module.p}"
        )


class StaticConv(Convolution):
    """A convolution whose filters do not depend on the text; a subclass has them as `weight`.

    weight: (H,1,K) before the normalisation, a parameter or computed from parameters.
    """

    weight: Tensor

    def filters(self) -> Tensor:
        """The normalised filters (H,K), in float32 if the weight is narrower; without dropout."""
        weight = self.weight.detach().squeeze(1)
        return normalize(weight.to(torch.promote_types(weight.dtype, torch.float32)).t(), self.normalize).t()

    def forward(self, x: Tensor) -> Tensor:
        return ops.lightconv(x, self.weight.squeeze(1), self.padding_l, **self._options())

    def step(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        self._prepare_step(x)
        return ops.lightconv_step(x, state, self.weight.squeeze(1), **self._options())


def is_static(conv: nn.Module) -> bool:
    """Whether `filters` describes all that a convolution computes: a subclass may compute something else."""
    return isinstance(conv, StaticConv) and all(
        getattr(type(conv), name) is getattr(StaticConv, name) for name in ("forward", "step", "filters")
    )


class LightweightConv(StaticConv):
    """Lightweight convolution: one softmax-normalised filter per head, shared by its channels (Wu et al. 2019, sec. 3).

    Args:
        channels: C, divisible by num_heads; channel c belongs to head c // (C / num_heads).
        kernel_size: K ≥ 1, odd or even.
        padding_l: how many of the K taps lie before the current token: K − 1 is causal, (K − 1) // 2 centred.
        num_heads: H.
        weight_dropout: probability p of DropConnect: each normalised weight is dropped with p (one mask per batch).
        normalize: "softmax" (the paper's), "none" or another of `lightconv_plugin.ops`.
        conv_bias: add a learned bias (C,) to the output.

    Parameters: weight (H,1,K); conv_bias (C,) if requested.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight = nn.Parameter(torch.empty(self.num_heads, 1, self.kernel_size))
        nn.init.xavier_uniform_(self.weight)


class DepthwiseConv(LightweightConv):
    """Depthwise convolution: a separate filter for each channel, not normalised (Wu et al. 2019, equation 3).

    The arguments are LightweightConv's without num_heads: each channel is its own head.

    Parameters: weight (C,1,K); conv_bias (C,) if requested.
    """

    def __init__(self, channels: int, kernel_size: int, padding_l: int, **kwargs):
        super().__init__(channels, kernel_size, padding_l, channels, normalize="none", **kwargs)


class DynamicConv(Convolution):
    """Dynamic convolution: the filter of each position is predicted from that position (Wu et al. 2019, section 4).

    The arguments are LightweightConv's and these:

    Args:
        query_size: features of the tensor that predicts the filters; default: C.
        rank: R ≥ 1 predicts them at low rank: B · (A · query) with R features between, A without bias. 0: one matrix.
        bias: whether the prediction has a bias, a static filter for each head that is added to the predicted one before
            the normalisation (--dynamic-residual). It is initialised with zeros.
        renorm_padding: normalise only over the taps inside the sequence.

    Parameters: weight_linear.weight (H·K, query_size), row h·K + k; with a rank rank_linear.weight (R, query_size),
    which is A, and weight_linear.weight (H·K, R), which is B; all Xavier-uniform. weight_linear.bias (H·K,).
    """

    def __init__(
        self,
        channels: int,
        *args,
        query_size: int | None = None,
        rank: int = 0,
        bias: bool = False,
        renorm_padding=False,
        **kwargs,
    ):
        super().__init__(channels, *args, **kwargs)
        if rank < 0:
            raise ValueError(f"rank must be at least 1, or 0 for one matrix, got {rank}")
        self.renorm_padding = renorm_padding
        self.query_size = query_size or channels
        self.rank_linear = Linear(self.query_size, rank, bias=False) if rank else None
        self.weight_linear = Linear(rank or self.query_size, self.num_heads * self.kernel_size, bias=bias)

    def filters(self, query: Tensor) -> Tensor:
        """query (…, query_size) → the filters before normalisation, (…, H, K)."""
        if self.rank_linear is not None:
            query = self.rank_linear(query)
        return self.weight_linear(query).unflatten(-1, (self.num_heads, self.kernel_size))

    def _options(self) -> dict:
        return {**super()._options(), "renorm_padding": self.renorm_padding}

    def forward(self, x: Tensor, query: Tensor | None = None) -> Tensor:
        return ops.dynamicconv(x, self.filters(x if query is None else query), self.padding_l, **self._options())

    def step(self, x: Tensor, state: Tensor | None, query: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._prepare_step(x)
        return ops.dynamicconv_step(x, state, self.filters(x if query is None else query), **self._options())
