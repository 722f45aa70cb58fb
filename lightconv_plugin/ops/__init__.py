"""The operators: lightweight, dynamic and TaLK convolutions over time, for any PyTorch program (imports torch only).

A full pass over sequences, and the same one or a few tokens at a time:

    out = lightconv(x, weight, padding_l)              one filter (H, K) for all positions
    out = dynamicconv(x, weight, padding_l)            a filter (T, B, H, K) for each position
    out, state = lightconv_step(x, state, weight)      causal, state None to begin with
    out, state = dynamicconv_step(x, state, weight)

and the sum of a window whose ends each position chooses (TaLK), for which nothing is multiplied:

    out = talkconv(x, offset_left, offset_right, max_left, max_right)      offsets (T, B, H)
    out, state = talkconv_step(x, state, offset_left, max_left)

Layout is (T, B, C) throughout; channel c belongs to head h = c div (C/H), whose channels share one filter or window.

Types: float32, bfloat16, float16 and float64 (which the CUDA kernels do not take), one for all floating tensors of a
call; sums, normalisation and sigmoid run in float32 (float64 for float64). Under autocast, floating tensors other than
float64 are cast to autocast's dtype.
x, weight and offsets may have any strides in T and B (so `y.transpose(0, 1)` of a (B, T, C) tensor needs no copy), and
the result has the layout of `torch.empty_like(x)`; a channel stride other than 1 costs a copy. Every floating tensor
argument has a gradient (of first order). An empty batch is allowed. The result for one sentence does not depend on the
batch it is in. Wrong arguments raise TypeError (types) or ValueError (shapes, devices, values).

Sources: Wu, Fan, Baevski, Dauphin and Auli, "Pay Less Attention with Lightweight and Dynamic Convolutions", ICLR 2019;
Lioutas and Guo, "Time-aware Large Kernel Convolutions", ICML 2020.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightconv_plugin.ops import checks, registration  # noqa: F401  (registration registers the operators)

from .normalize import EPSILON, NORMALIZATIONS

__all__ = [
    "EPSILON",
    "NORMALIZATIONS",
    "dropout",
    "dynamicconv",
    "dynamicconv_step",
    "lightconv",
    "lightconv_step",
    "talkconv",
    "talkconv_step",
]


def lightconv(
    x: Tensor,
    weight: Tensor,
    padding_l: int,
    *,
    normalize: str = "softmax",
    dropout: float = 0.0,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    glu: bool = False,
) -> Tensor:
    """Lightweight convolution (Wu et al. 2019, section 3, equations 4 and 5): depthwise, weights shared in a head.

        out[t, b, c] = bias[c] + Σ_k normalize(weight)[h, k] · x[t − padding_l + k, b, c],   h = c div (C/H)

    Taps outside the sequence read zero; the normalisation is over all K taps, whatever T is.

    Args:
        x: (T, B, C), or (T, B, 2C) with `glu`; T ≥ 1.
        weight: (H, K), before normalisation; K ≥ 1 and H divides C.
        padding_l: taps to the left of the current position, 0 ≤ padding_l < K. K − 1 is causal; K // 2 is centred
            (an even K then reaches one position further to the left than to the right).
        normalize: one of `NORMALIZATIONS`, over the K taps.
        dropout: DropConnect's probability p, 0 ≤ p < 1: each of the H·K normalised weights becomes 0 with probability
            p, else is multiplied by 1/(1−p). p > 0 always drops: pass 0 in evaluation. Seeded from torch's default
            generator of x's device (philox.py defines the mask).
        bias: (C,), added to every output.
        lengths: (B,) int32 or int64: positions ≥ lengths[b] of x read as zero. Their content, NaN included, reaches
            no output and no gradient; outputs there are those of an x that is zero there.
        cu_seqlens: (N+1,) int32, rising from 0 to T, for B = 1: sequence i is x[cu_seqlens[i]:cu_seqlens[i+1]], and no
            filter reaches across a boundary. Not together with `lengths`.
        glu: use x[..., :C] · sigmoid(x[..., C:]) (rounded to x's dtype) instead of x.

    Returns:
        (T, B, C), in x's dtype and layout.

    Raises:
        TypeError, ValueError: see `checks`. Values of lengths and cu_seqlens are checked on the CPU and outside tracing
            only: elsewhere the host would have to wait for them. Unchecked values never read outside x.
    """
    x, weight, bias = _prepare(x=x, weight=weight, bias=bias)
    checks.convolution(
        x,
        weight,
        padding_l,
        dynamic=False,
        normalize=normalize,
        dropout=dropout,
        bias=bias,
        lengths=lengths,
        cu_seqlens=cu_seqlens,
        glu=glu,
    )
    x, seed = _contiguous_channels(x), _draw_seed(dropout, x)
    return torch.ops.lightconv.lightconv.default(
        x, weight, bias, lengths, cu_seqlens, seed, padding_l, normalize, float(dropout), glu
    )


def dynamicconv(
    x: Tensor,
    weight: Tensor,
    padding_l: int,
    *,
    normalize: str = "softmax",
    dropout: float = 0.0,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    renorm_padding: bool = False,
    glu: bool = False,
) -> Tensor:
    """Dynamic convolution (Wu et al. 2019, section 4): like `lightconv`, with a filter of its own at each position.

        out[t, b, c] = bias[c] + Σ_k normalize(weight)[t, b, h, k] · x[t − padding_l + k, b, c],   h = c div (C/H)

    Args:
        weight: (T, B, H, K), before normalisation; any strides. In a model a linear function of x's row t.
        dropout: as for `lightconv`, with one mask of the shape (T, B, H, K).
        renorm_padding: normalise only over the taps inside the sequence (0 ≤ t, t < T or lengths[b], or the
            packed sequence's rows); the others weigh 0. A row without any such tap gives 0 (plus bias).
        x, padding_l, normalize, bias, lengths, cu_seqlens, glu: as for `lightconv`.

    Returns:
        (T, B, C), in x's dtype and layout.

    Raises:
        TypeError, ValueError: as for `lightconv`.
    """
    x, weight, bias = _prepare(x=x, weight=weight, bias=bias)
    checks.convolution(
        x,
        weight,
        padding_l,
        dynamic=True,
        normalize=normalize,
        dropout=dropout,
        bias=bias,
        lengths=lengths,
        cu_seqlens=cu_seqlens,
        glu=glu,
        renorm_padding=renorm_padding,
    )
    x, seed = _contiguous_channels(x), _draw_seed(dropout, x)
    return torch.ops.lightconv.dynamicconv.default(
        x, weight, bias, lengths, cu_seqlens, seed, padding_l, normalize, float(dropout), renorm_padding, glu
    )


def lightconv_step(
    x: Tensor,
    state: Tensor | None,
    weight: Tensor,
    *,
    normalize: str = "softmax",
    dropout: float = 0.0,
    bias: Tensor | None = None,
    glu: bool = False,
) -> tuple[Tensor, Tensor]:
    """The next n tokens of a causal `lightconv` (padding_l = K − 1): any chunking of a sequence equals the full pass.

    Args:
        x: the new tokens, (n, B, C), or (n, B, 2C) with `glu`; n ≥ 1.
        state: None before the first token, then what the previous call returned: (r, B, C), the last r ≤ K − 1 inputs
            (after the GLU), in x's dtype. Dimension 1 is the batch, so a beam search reorders it by
            `state.index_select(1, order)`. Missing rows read as zero. Not changed by the call.
        weight: (H, K).
        normalize, dropout, bias, glu: as for `lightconv`.

    Returns:
        out (n, B, C), and the next state (min(r + n, K − 1), B, C), which shares no memory with the arguments.

    Raises:
        TypeError, ValueError: see `checks`.
    """
    x, state, weight, bias = _prepare(x=x, state=state, weight=weight, bias=bias)
    checks.step(x, state, weight, dynamic=False, normalize=normalize, dropout=dropout, bias=bias, glu=glu)
    x, state, seed = _contiguous_channels(x), _begin(state, x, glu), _draw_seed(dropout, x)
    return torch.ops.lightconv.lightconv_step.default(x, state, weight, bias, seed, normalize, float(dropout), glu)


def dynamicconv_step(
    x: Tensor,
    state: Tensor | None,
    weight: Tensor,
    *,
    normalize: str = "softmax",
    dropout: float = 0.0,
    bias: Tensor | None = None,
    renorm_padding: bool = False,
    glu: bool = False,
) -> tuple[Tensor, Tensor]:
    """The next n tokens of a causal `dynamicconv` (padding_l = K − 1): any chunking of a sequence equals the full pass.

    Args:
        weight: (n, B, H, K), the filters of the new tokens.
        renorm_padding: as for `dynamicconv`; rows that the state does not hold (the sequence's beginning) are outside.
        x, state, normalize, dropout, bias, glu: as for `lightconv_step`.

    Returns:
        out (n, B, C), and the next state (min(r + n, K − 1), B, C), which shares no memory with the arguments.

    Raises:
        TypeError, ValueError: see `checks`.
    """
    x, state, weight, bias = _prepare(x=x, state=state, weight=weight, bias=bias)
    checks.step(
        x,
        state,
        weight,
        dynamic=True,
        normalize=normalize,
        dropout=dropout,
        bias=bias,
        glu=glu,
        renorm_padding=renorm_padding,
    )
    x, state, seed = _contiguous_channels(x), _begin(state, x, glu), _draw_seed(dropout, x)
    return torch.ops.lightconv.dynamicconv_step.default(
        x, state, weight, bias, seed, normalize, float(dropout), renorm_padding, glu
    )


def talkconv(
    x: Tensor,
    offset_left: Tensor,
    offset_right: Tensor | None,
    max_left: int,
    max_right: int,
    *,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """TaLK convolution (Lioutas and Guo 2020, section 3): the sum of a window that each position and head chooses.

        out[t, b, c] = 1 / (max_left + max_right + 1) · Σ_s part(t, s) · x[s, b, c],            h = c div (C/H)

        part(t, s) = 1                                                           s = t
                     clip(offset_left[t, b, h] · max_left − (t − s) + 1, 0, 1)   s < t
                     clip(offset_right[t, b, h] · max_right − (s − t) + 1, 0, 1) s > t

    So a window reaches offset · max rows to each side, the last row in part. Rows outside the sequence read zero,
    which is the same as the paper's ends clamped into it. Its cost does not depend on the windows' sizes.

    Args:
        x: (T, B, C), T ≥ 1.
        offset_left, offset_right: (T, B, H), any strides; H divides C. In a model sigmoids of a linear function of x's
            row t, then dropout, which may make them larger than 1: windows then reach beyond max. Negative ones count
            as 0, infinite ones reach to the sequence's end, NaN makes out[t, b] of its head NaN. offset_right is None
            if and only if max_right is 0.
        max_left, max_right: ints ≥ 0, in rows. max_right = 0 is causal.
        lengths: (B,) int32 or int64: positions ≥ lengths[b] of x read as zero. Their content, NaN included, reaches
            no output and no gradient; outputs there are those of an x that is zero there.
        cu_seqlens: (N+1,) int32, rising from 0 to T, for B = 1: sequence i is x[cu_seqlens[i]:cu_seqlens[i+1]], and no
            window reaches across a boundary. Not together with `lengths`.

    Returns:
        (T, B, C), in x's dtype and layout. NaN or ±inf in x is in those outputs only whose windows hold it. An offset's
        gradient is that of the part of its window's last row: 0 where that is whole, or outside the sequence.

    Raises:
        TypeError, ValueError: see `checks`. Values of lengths and cu_seqlens are checked on the CPU and outside tracing
            only: elsewhere the host would have to wait for them. Unchecked values never read outside x.
    """
    x, offset_left, offset_right = _prepare(x=x, offset_left=offset_left, offset_right=offset_right)
    checks.talk(x, offset_left, offset_right, max_left, max_right, lengths=lengths, cu_seqlens=cu_seqlens)
    return torch.ops.lightconv.talkconv.default(
        _contiguous_channels(x), offset_left, offset_right, lengths, cu_seqlens, max_left, max_right
    )


def talkconv_step(x: Tensor, state: Tensor | None, offset_left: Tensor, max_left: int) -> tuple[Tensor, Tensor]:
    """The next n tokens of a causal `talkconv` (max_right = 0): any chunking of a sequence equals the full pass.

    Args:
        x: the new tokens, (n, B, C), n ≥ 1.
        state: None before the first token, then what the previous call returned: (r, B, C), the last r ≤ max_left
            inputs, in x's dtype. Dimension 1 is the batch, so a beam search reorders it by
            `state.index_select(1, order)`. Missing rows read as zero. Not changed by the call. (The paper's code keeps
            prefix sums, which grow with the sequence, and keep a NaN for good.)
        offset_left: (n, B, H), the offsets of the new tokens; at most 1, as the state has no rows beyond max_left.
        max_left: as for `talkconv`.

    Returns:
        out (n, B, C), and the next state (min(r + n, max_left), B, C), which shares no memory with the arguments.

    Raises:
        TypeError, ValueError: see `checks`. An offset larger than 1 is found on the CPU and outside tracing only;
            elsewhere such a window ends where the state does.
    """
    x, state, offset_left = _prepare(x=x, state=state, offset_left=offset_left)
    checks.talk_step(x, state, offset_left, max_left)
    x = _contiguous_channels(x)
    return torch.ops.lightconv.talkconv_step.default(x, _begin(state, x, glu=False), offset_left, max_left)


def dropout(x: Tensor, p: float) -> Tensor:
    """x with elements dropped: 0 with probability p, else times 1/(1−p); always, so pass 0 in evaluation.

    The mask is the one of philox.py, drawn again for the gradient instead of being kept, from a seed of torch's default
    generator of x's device. It is meant for the CPU, where it costs a fraction of torch's own dropout; there are
    no CUDA kernels for it.

    Args:
        x: any shape, of a type that the convolutions take; dropped elements must be finite to become 0.
        p: 0 ≤ p < 1.

    Returns:
        A tensor of x's shape and dtype, contiguous; x itself for p = 0.

    Raises:
        TypeError, ValueError: see `checks`.
    """
    checks.floating(x=x)
    checks.probability("p", p)
    return torch.ops.lightconv.dropout.default(x, _draw_seed(p, x), float(p)) if p > 0 else x


# Asked once, because torch 2.6's compiler cannot trace the question; for other devices torch raises an error.
_AUTOCAST = tuple(
    device for device in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(device)
)


def _prepare(*, x: Tensor, **arguments: Tensor | None) -> tuple[Any, ...]:
    """Check that these are floating tensors (or None), and cast all but float64 as autocast asks for."""
    arguments = {"x": x, **arguments}
    checks.floating(**arguments)
    device = x.device.type
    if device not in _AUTOCAST or not torch.is_autocast_enabled(device):
        return tuple(arguments.values())
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        value if value is None or value.dtype == torch.float64 else value.to(dtype) for value in arguments.values()
    )


def _contiguous_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _draw_seed(dropout: float, x: Tensor) -> Tensor | None:
    """A seed for this call, drawn on x's device: torch.manual_seed governs it, and the host does not wait for it."""
    if dropout == 0:
        return None
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=x.device)


def _begin(state: Tensor | None, x: Tensor, glu: bool) -> Tensor:
    """The state before the first token: no rows."""
    if state is not None:
        return _contiguous_channels(state)
    return x.new_empty((0, x.shape[1], x.shape[2] // 2 if glu else x.shape[2]))
