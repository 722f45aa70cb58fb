"""The operators: lightweight, dynamic and TaLK convolutions over time, for any PyTorch program (imports torch only).

A full pass over whole sequences, or one or a few tokens at a time:

    out = lightconv(x, weight, padding_l)              one filter (H, K) for all positions
    out = dynamicconv(x, weight, padding_l)            a filter (T, B, H, K) for each position
    out, state = lightconv_step(x, state, weight)      causal, state None to begin with
    out, state = dynamicconv_step(x, state, weight)

and TaLK, the sum over a window whose ends are chosen for each position, without any filter:

    out = talkconv(x, offset_left, offset_right, max_left, max_right)      offsets (T, B, H)
    out, state = talkconv_step(x, state, offset_left, max_left)

Layout is (T, B, C) throughout; channel c belongs to head h = c div (C/H), whose channels share one filter or window.

Types: float32, bfloat16, float16 and float64 (not in the CUDA kernels); all floating tensors of a call have the same
type. Sums, normalisation and sigmoid run in float32 (float64 for float64). Under autocast, the convolutions cast
floating tensors other than float64 to autocast's dtype; the other operators compute in the type that they are given.
All tensors may have any strides, and may overlap. Strides in T and B cost nothing (`y.transpose(0, 1)` of a (B, T, C)
tensor needs no copy), those of channels, taps and heads at most a copy. The result has the layout of
`torch.empty_like(x)`, or is contiguous where x is copied. Every floating tensor argument has a first-order gradient,
also in torch.func.grad, vjp and jacrev; forward-mode derivatives raise NotImplementedError. An empty batch is allowed.
The result for one sentence does not depend on the batch it is in. Wrong arguments raise TypeError (types) or ValueError
(shapes, devices, values): see `checks`. None of this is said of `ring_step` and `best_words`, which are for a step of
beam search (decoding.py).

Sources: Wu, Fan, Baevski, Dauphin and Auli, "Pay Less Attention with Lightweight and Dynamic Convolutions", ICLR 2019;
Lioutas and Guo, "Time-aware Large Kernel Convolutions", ICML 2020.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightconv_plugin.ops import checks, registration, seeds  # noqa: F401  (registration registers the operators)

from .decoding import best_words, ring_step
from .loss import label_smoothed_nll_loss
from .normalize import EPSILON, NORMALIZATIONS
from .residual import dropout_add_layer_norm, relu_dropout
from .transforms import call

__all__ = [
    "EPSILON",
    "NORMALIZATIONS",
    "best_words",
    "dropout",
    "dropout_add_layer_norm",
    "dynamicconv",
    "dynamicconv_step",
    "label_smoothed_nll_loss",
    "lightconv",
    "lightconv_step",
    "relu_dropout",
    "ring_step",
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
    """Lightweight convolution (Wu et al. 2019, section 3, equations 4 and 5): depthwise, with a filter for each head.

        out[t, b, c] = bias[c] + Σ_k normalize(weight)[h, k] · x[t − padding_l + k, b, c],   h = c div (C/H)

    Taps outside the sequence read zero; the normalisation is over all K taps, whatever T is.

    Args:
        x: (T, B, C), or (T, B, 2C) with `glu`; T ≥ 1.
        weight: (H, K), before normalisation; K ≥ 1 and H divides C.
        padding_l: taps to the left of the current position, 0 ≤ padding_l < K. K − 1 is causal; K // 2 is centred
            (an even K then reaches one position further to the left than to the right).
        normalize: one of `NORMALIZATIONS`, over the K taps.
        dropout: probability p of DropConnect, 0 ≤ p < 1: each of the H·K normalised weights is set to 0 with
            probability p and otherwise multiplied by 1/(1−p). There is no evaluation mode: pass 0 there. Seeded from
            torch's default generator (seeds.py says which; philox.py defines the mask).
        bias: (C,), added to every output.
        lengths: (B,) int32 or int64: positions ≥ lengths[b] of x read as zero. Their content, NaN included, affects
            no output and no gradient. The outputs at these positions are computed as if x were zero there.
        cu_seqlens: (N+1,) int32, non-decreasing from 0 to T; requires B = 1. Sequence i is
            x[cu_seqlens[i]:cu_seqlens[i+1]]; no filter reaches across a boundary. Cannot be combined with `lengths`.
        glu: use x[..., :C] · sigmoid(x[..., C:]) (rounded to x's dtype) instead of x.

    Returns:
        (T, B, C), in x's dtype and layout.

    Raises:
        TypeError, ValueError: see `checks`. The values of lengths and cu_seqlens are checked only on the CPU,
            outside tracing and torch.vmap; elsewhere the host would have to wait for them. Invalid values that are not
            checked never cause reads outside x.
    """
    return _convolve("lightconv", x, weight, bias, lengths, cu_seqlens, padding_l, normalize, dropout, glu)


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
    """Dynamic convolution (Wu et al. 2019, section 4): like `lightconv`, with a separate filter for each position.

        out[t, b, c] = bias[c] + Σ_k normalize(weight)[t, b, h, k] · x[t − padding_l + k, b, c],   h = c div (C/H)

    Args:
        weight: (T, B, H, K), before normalisation; any strides. In the models it is a linear function of x[t].
        dropout: as for `lightconv`, with a mask of shape (T, B, H, K).
        renorm_padding: normalise only over the taps inside the sequence (0 ≤ t, t < T or lengths[b], or the
            packed sequence's rows); the other taps get weight 0. A row without any tap inside gives 0 (plus bias).
        x, padding_l, normalize, bias, lengths, cu_seqlens, glu: as for `lightconv`.

    Returns and raises what `lightconv` does.
    """
    return _convolve(
        "dynamicconv", x, weight, bias, lengths, cu_seqlens, padding_l, normalize, dropout, renorm_padding, glu
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
    """The next n tokens of a causal `lightconv` (padding_l = K − 1).

    The outputs equal those of the full pass, however the sequence is divided into calls.

    Args:
        x: the new tokens, (n, B, C), or (n, B, 2C) with `glu`; n ≥ 1.
        state: None before the first token, then what the previous call returned: (r, B, C), the last r ≤ K − 1 inputs
            (after the GLU), in x's dtype. Dimension 1 is the batch, so a beam search reorders it with
            `state.index_select(1, order)`. Missing rows read as zero. The call does not modify it.
        weight: (H, K).
        normalize, dropout, bias, glu: as for `lightconv`.

    Returns:
        out (n, B, C), and the next state (min(r + n, K − 1), B, C), which shares no memory with the arguments.
    """
    return _convolve_step("lightconv_step", x, state, weight, bias, normalize, dropout, glu)


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
    """The next n tokens of a causal `dynamicconv` (padding_l = K − 1), as `lightconv_step`.

    Args:
        weight: (n, B, H, K), the filters of the new tokens.
        renorm_padding: as for `dynamicconv`; rows missing in the state (before the sequence's beginning) are outside.
        x, state, normalize, dropout, bias, glu: as for `lightconv_step`.
    """
    return _convolve_step("dynamicconv_step", x, state, weight, bias, normalize, dropout, renorm_padding, glu)


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
    """TaLK convolution (Lioutas and Guo 2020, section 3): the sum over a window chosen for each position and head.

        out[t, b, c] = 1 / (max_left + max_right + 1) · Σ_s part(t, s) · x[s, b, c],            h = c div (C/H)

        part(t, s) = 1                                                           s = t
                     clip(offset_left[t, b, h] · max_left − (t − s) + 1, 0, 1)   s < t
                     clip(offset_right[t, b, h] · max_right − (s − t) + 1, 0, 1) s > t

    A window reaches offset · max rows to each side; a fraction of a row remains at each end. Rows outside the sequence
    read as zero, which is equivalent to clamping the window to the sequence as in the paper. The cost grows little
    with the sizes of the windows, but a window that an offset above 2 takes beyond 2 · max may be summed row by row.

    Args:
        x: (T, B, C), T ≥ 1.
        offset_left, offset_right: (T, B, H), any strides; H divides C. In the models they are sigmoids of a linear
            function of x[t], followed by dropout, which may make them larger than 1: the window then reaches beyond
            max. Negative offsets count as 0, infinite ones reach the end of the sequence on their side, and NaN makes
            out[t, b] NaN for its head. offset_right is None if and only if max_right is 0.
        max_left, max_right: ints, 0 ≤ max < 2³⁰, in rows. max_right = 0 is causal.
        lengths, cu_seqlens: as for `lightconv`; no window reaches across a boundary.

    Returns:
        (T, B, C), in x's dtype and layout. NaN or ±inf in x affects only the outputs whose windows contain it. An
        offset's gradient is that of the fractional row at its end of the window. It is 0 if there is no fraction, or
        if that row is outside the sequence.

    Raises what `lightconv` does.
    """
    x, offset_left, offset_right = _prepare(("x", "offset_left", "offset_right"), x, offset_left, offset_right)
    checks.talk(x, offset_left, offset_right, max_left, max_right, lengths=lengths, cu_seqlens=cu_seqlens)
    return call(
        "talkconv", _contiguous_channels(x), offset_left, offset_right, lengths, cu_seqlens, max_left, max_right
    )


def talkconv_step(x: Tensor, state: Tensor | None, offset_left: Tensor, max_left: int) -> tuple[Tensor, Tensor]:
    """The next n tokens of a causal `talkconv` (max_right = 0).

    The outputs equal those of the full pass, however the sequence is divided into calls.

    Args:
        x: the new tokens, (n, B, C), n ≥ 1.
        state: None before the first token, then what the previous call returned: (r, B, C), the last r ≤ max_left
            inputs, in x's dtype. Dimension 1 is the batch, so a beam search reorders it with
            `state.index_select(1, order)`. Missing rows read as zero. The call does not modify it. (The paper's code
            keeps prefix sums instead; they grow with the sequence, and a NaN stays in them forever.)
        offset_left: (n, B, H), the offsets of the new tokens; at most 1, as the state has no rows beyond max_left.
        max_left: as for `talkconv`.

    Returns:
        out (n, B, C), and the next state (min(r + n, max_left), B, C), which shares no memory with the arguments.

    Raises:
        TypeError, ValueError: see `checks`. An offset larger than 1 is detected only on the CPU, outside tracing and
            torch.func's transforms; elsewhere its window ends where the state does.
    """
    x, state, offset_left = _prepare(("x", "state", "offset_left"), x, state, offset_left)
    checks.talk_step(x, state, offset_left, max_left)
    x = _contiguous_channels(x)
    return call("talkconv_step", x, _begin(state, x, x.shape[2]), offset_left, max_left)


def dropout(x: Tensor, p: float) -> Tensor:
    """Dropout: each element of x is set to 0 with probability p, otherwise multiplied by 1/(1−p).

    There is no evaluation mode: pass p = 0 there. philox.py defines the mask, which is recomputed for the gradient
    instead of stored. Its seed is drawn from torch's default generator (seeds.py). This is meant for the CPU, where it
    costs a fraction of torch's own dropout; there is no CUDA kernel.

    Args:
        x: any shape, in one of the convolutions' types. A dropped element becomes 0 only if it is finite.
        p: 0 ≤ p < 1.

    Returns:
        A tensor of x's shape and dtype, contiguous; x itself for p = 0.
    """
    checks.floating(("x",), (x,))
    checks.probability("p", p)
    if p == 0:
        return x
    if forward_ad._current_level >= 0:
        checks.no_tangents(x)
    return call("dropout", x, seeds.draw(p, x, on_device=True), float(p))


def _convolve(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    padding_l: int,
    normalize: str,
    dropout: float,
    *flags: bool,
) -> Tensor:
    """lightconv or dynamicconv; the flags as the registered operator has them."""
    x, weight, bias = _prepare(("x", "weight", "bias"), x, weight, bias)
    checks.convolution(x, weight, bias, normalize, dropout, flags)
    checks.full_pass(x, weight, lengths, cu_seqlens, padding_l)
    x, seed = _contiguous_channels(x), seeds.draw(dropout, x)
    return call(name, x, weight, bias, lengths, cu_seqlens, seed, padding_l, normalize, float(dropout), *flags)


def _convolve_step(
    name: str,
    x: Tensor,
    state: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    normalize: str,
    dropout: float,
    *flags: bool,
) -> tuple[Tensor, Tensor]:
    """A step of `_convolve`."""
    x, state, weight, bias = _prepare(("x", "state", "weight", "bias"), x, state, weight, bias)
    checks.convolution(x, weight, bias, normalize, dropout, flags)
    channels = x.shape[2] // 2 if flags[-1] else x.shape[2]
    if state is not None:
        checks.state(state, x, weight.shape[-1] - 1, "K-1", channels)
    x = _contiguous_channels(x)
    state, seed = _begin(state, x, channels), seeds.draw(dropout, x)
    return call(name, x, state, weight, bias, seed, normalize, float(dropout), *flags)


# Computed once at import: torch 2.6's compiler cannot trace this call. For other device types torch raises an error.
_AUTOCAST = tuple(
    device for device in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(device)
)


def _prepare(names: tuple[str, ...], *tensors: Any) -> tuple[Any, ...]:
    """Check that the arguments are floating tensors (or None); under autocast, cast all but float64 to its dtype."""
    checks.floating(names, tensors)
    if forward_ad._current_level >= 0:  # torch has no public name for it
        checks.no_tangents(*tensors)
    device = tensors[0].device.type
    if device not in _AUTOCAST or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(value if value is None or value.dtype == torch.float64 else value.to(dtype) for value in tensors)


def _contiguous_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _begin(state: Tensor | None, x: Tensor, channels: int) -> Tensor:
    """The state before the first token: no rows."""
    return x.new_empty((0, x.shape[1], channels)) if state is None else _contiguous_channels(state)
