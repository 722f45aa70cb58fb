"""The operators in plain PyTorch: their definition, the oracle of the tests, and the backend that always works.

talkconv is in reference_talk.py. The other two convolutions are a sum over the K taps of a filter (Wu et al. 2019,
equations 3 to 5):

    out[t, b, c] = bias[c] + Σ_k w[t, b, h, k] · u[t − padding_l + k, b, c],      h = c div (C/H)

where u is x, or x[..., :C]·sigmoid(x[..., C:]) with `glu`, and w is the weight after normalisation and dropout; for
lightconv w does not depend on t and b. Taps outside the sequence read zero. The code loops over the taps and adds one
shifted slice in place for each, so it never allocates anything larger than the inputs (no T×T band, no unfolded
T×B×C×K). The same code serves both operators: filters may be (H, K) or (T, B, H, K).

Sums, normalisation and sigmoid run in float32 for half types and in float64 for float64. u is rounded to x's type, so
that the step functions, whose state holds u, give the same numbers as a full pass. Rows that must not be read are
masked or sliced away, never multiplied by zero, so a NaN in padding does not spread. Nothing here waits for a GPU.

The signatures are those of the registered operators (registration.py). checks.py has already checked the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightconv_plugin.ops.philox import dropout_scale

from .filters import Filter, widen, with_shared_filter
from .normalize import sigmoid
from .reference_decoding import best_words, ring_step  # noqa: F401  (found here by name)
from .reference_loss import label_smoothed_nll, label_smoothed_nll_backward  # noqa: F401  (found here by name)
from .reference_residual import (  # noqa: F401  (found here by name)
    dropout_add_norm,
    dropout_add_norm_backward,
    relu_dropout,
    relu_dropout_backward,
)
from .reference_talk import (  # noqa: F401  (the other operator's, found here by name)
    talkconv,
    talkconv_backward,
    talkconv_step,
    talkconv_step_backward,
)
from .sequences import Sequence, state_rows, step_inside

# ------------------------------------------------------------------------------------------------ the operators


def dynamicconv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    padding_l: int,
    normalize: str,
    dropout: float,
    renorm_padding: bool,
    glu: bool,
) -> Tensor:
    """dynamicconv's forward pass: x (T, B, C or 2C), weight (T, B, H, K) → (T, B, C), in the layout of x."""
    sequence = Sequence(x, lengths, cu_seqlens)
    inside = sequence.inside(weight.shape[-1], -padding_l) if renorm_padding else None
    taps = Filter(weight, seed, normalize, dropout, inside).taps
    out = _new_output(x, bias, glu)
    _gather(out, widen(_inputs(x, glu)), taps, -padding_l, sequence)
    return out.to(x.dtype)


def dynamicconv_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    padding_l: int,
    normalize: str,
    dropout: float,
    renorm_padding: bool,
    glu: bool,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of dynamicconv for x and weight; those not needed are empty tensors."""
    sequence = Sequence(x, lengths, cu_seqlens)
    inside = sequence.inside(weight.shape[-1], -padding_l) if renorm_padding else None
    filters = Filter(weight, seed, normalize, dropout, inside)
    grad = widen(grad)
    dx, dweight = x.new_empty(0), weight.new_empty(0)
    if need_x:
        dsource = _zeros(_channels(x, glu))
        _scatter(dsource, grad, filters.taps, -padding_l, sequence)
        dx = _inputs_backward(dsource, x, glu)
        if sequence.pad is not None:
            dx.masked_fill_(sequence.pad, 0)
    if need_weight:
        dtaps = torch.zeros_like(filters.taps)
        _correlate(dtaps, widen(_inputs(x, glu)), grad, -padding_l, sequence)
        dweight = torch.empty_like(weight).copy_(filters.backward(dtaps))
    return dx, dweight


def dynamicconv_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    normalize: str,
    dropout: float,
    renorm_padding: bool,
    glu: bool,
) -> tuple[Tensor, Tensor]:
    """n more tokens of a causal dynamicconv: x (n, B, C or 2C), state (r, B, C), weight (n, B, H, K) → (out, next)."""
    new, seen = x.shape[0], state.shape[0]
    history = weight.shape[-1] - 1
    inside = step_inside(x, seen, history) if renorm_padding else None
    taps = Filter(weight, seed, normalize, dropout, inside).taps
    inputs = _inputs(x, glu)
    out = _new_output(x, bias, glu)
    # The state's rows come first in time, so each output still adds its taps in ascending order, as in a full pass.
    _gather(out, widen(state), taps, seen - history)
    _gather(out, widen(inputs), taps, -history)
    from_inputs, from_state = state_rows(new, seen, history)
    return out.to(x.dtype), torch.cat([state[seen - from_state :], inputs[new - from_inputs :]])


def dynamicconv_step_backward(
    grad: Tensor | None,
    grad_state: Tensor | None,
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    normalize: str,
    dropout: float,
    renorm_padding: bool,
    glu: bool,
    need_x: bool,
    need_state: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of dynamicconv_step for x, state and weight; those not needed are empty tensors."""
    new, seen = x.shape[0], state.shape[0]
    history = weight.shape[-1] - 1
    inside = step_inside(x, seen, history) if renorm_padding else None
    filters = Filter(weight, seed, normalize, dropout, inside)
    from_inputs, from_state = state_rows(new, seen, history)
    grad = None if grad is None else widen(grad)
    dx, dstate, dweight = x.new_empty(0), state.new_empty(0), weight.new_empty(0)
    if need_x:
        dinputs = _zeros(_channels(x, glu))
        if grad is not None:
            _scatter(dinputs, grad, filters.taps, -history)
        if grad_state is not None:
            dinputs[new - from_inputs :] += grad_state[from_state:]
        dx = _inputs_backward(dinputs, x, glu)
    if need_state:
        dstate = _zeros(state)
        if grad is not None:
            _scatter(dstate, grad, filters.taps, seen - history)
        if grad_state is not None:
            dstate[seen - from_state :] += grad_state[:from_state]
        dstate = dstate.to(state.dtype)
    if need_weight:
        dtaps = torch.zeros_like(filters.taps)
        if grad is not None:
            _correlate(dtaps, widen(state), grad, seen - history)
            _correlate(dtaps, widen(_inputs(x, glu)), grad, -history)
        dweight = torch.empty_like(weight).copy_(filters.backward(dtaps))
    return dx, dstate, dweight


lightconv = with_shared_filter(dynamicconv)
lightconv_backward = with_shared_filter(dynamicconv_backward)
lightconv_step = with_shared_filter(dynamicconv_step)
lightconv_step_backward = with_shared_filter(dynamicconv_step_backward)


def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """x times the factors of `dropout_scale`, in x's type; contiguous."""
    wide = widen(x.contiguous())
    return (wide * dropout_scale(seed, x.shape, p, wide.dtype)).to(x.dtype)


# ------------------------------------------------------------------------------------------------ sums over taps


def _overlaps(out_rows: int, source_rows: int, kernel_size: int, offset: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield (k, rows of the output, rows of the source) for every tap k that overlaps the source.

    Output row t and tap k read source row t + offset + k.
    """
    for k in range(max(0, 1 - offset - out_rows), min(kernel_size, source_rows - offset)):
        first = max(0, -offset - k)
        last = min(out_rows, source_rows - offset - k)
        yield k, slice(first, last), slice(first + offset + k, last + offset + k)


def _tap(taps: Tensor, k: int, rows: slice) -> Tensor:
    """Tap k of (K, H) or (K, T, B, H) filters, shaped to multiply (rows, B, H, R)."""
    return (taps[k] if taps.dim() == 2 else taps[k, rows]).unsqueeze(-1)


def _outside(sequence: Sequence | None, rows: slice, sources: slice) -> Tensor | None:
    return None if sequence is None else sequence.outside(rows, sources)


def _inside(rows: Tensor, tap: Tensor, outside: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both factors of a product, each 0 where it is outside the sequence: either may be NaN or infinite there."""
    if outside is None:
        return rows, tap
    return rows.masked_fill(outside, 0), torch.where(outside, 0, tap)


def _heads(rows: Tensor, taps: Tensor) -> Tensor:
    """(T, B, C) as (T, B, H, R), without a copy."""
    return rows.unflatten(-1, (taps.shape[-1], rows.shape[-1] // taps.shape[-1]))


def _gather(out: Tensor, source: Tensor, taps: Tensor, offset: int, sequence: Sequence | None = None) -> None:
    """out[t] += Σ_k taps[k, t] · source[t + offset + k]."""
    out, source = _heads(out, taps), _heads(source, taps)
    for k, to, at in _overlaps(out.shape[0], source.shape[0], taps.shape[0], offset):
        rows, tap = _inside(source[at], _tap(taps, k, to), _outside(sequence, to, at))
        out[to].addcmul_(rows, tap)


def _scatter(dsource: Tensor, grad: Tensor, taps: Tensor, offset: int, sequence: Sequence | None = None) -> None:
    """The transpose of _gather: dsource[t + offset + k] += taps[k, t] · grad[t]."""
    dsource, grad = _heads(dsource, taps), _heads(grad, taps)
    for k, to, at in _overlaps(grad.shape[0], dsource.shape[0], taps.shape[0], offset):
        rows, tap = _inside(grad[to], _tap(taps, k, to), _outside(sequence, to, at))
        dsource[at].addcmul_(rows, tap)


def _correlate(dtaps: Tensor, source: Tensor, grad: Tensor, offset: int, sequence: Sequence | None = None) -> None:
    """dtaps[k, t] += Σ_r grad[t] · source[t + offset + k]; for (K, H) filters the sum is over t and b too."""
    source, grad = _heads(source, dtaps), _heads(grad, dtaps)
    buffer = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    for k, to, at in _overlaps(grad.shape[0], source.shape[0], dtaps.shape[0], offset):
        product, outside = torch.mul(grad[to], source[at], out=buffer[to]), _outside(sequence, to, at)
        if outside is not None:
            product.masked_fill_(outside, 0)
        if dtaps.dim() == 2:
            dtaps[k] += product.sum((0, 1, 3))
        else:
            dtaps[k, to] += product.sum(-1)


# ------------------------------------------------------------------------------------------------ inputs and outputs


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _channels(x: Tensor, glu: bool) -> Tensor:
    """x without its gates: the C channels whose layout the output has."""
    return x[..., : x.shape[-1] // 2] if glu else x


def _inputs(x: Tensor, glu: bool) -> Tensor:
    """u (T, B, C), the input of the filters, in x's type."""
    if not glu:
        return x
    value, gate = x.chunk(2, -1)
    return (widen(value) * sigmoid(widen(gate))).to(x.dtype)


def _inputs_backward(grad: Tensor, x: Tensor, glu: bool) -> Tensor:
    """The gradient for x, in x's type and layout, given that for u in the precision of the sums."""
    if not glu:
        return grad.to(x.dtype)
    value, gate = x.chunk(2, -1)
    gate = sigmoid(widen(gate))
    dx = torch.empty_like(x)
    dvalue, dgate = dx.chunk(2, -1)
    dvalue.copy_(grad * gate)
    dgate.copy_(grad * widen(value) * gate * (1 - gate))
    return dx


def _new_output(x: Tensor, bias: Tensor | None, glu: bool) -> Tensor:
    """The output before any tap, in the precision of the sums and the layout of x's first C channels."""
    out = _zeros(_channels(x, glu))
    return out if bias is None else out.add_(bias)
