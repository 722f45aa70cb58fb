"""The convolutions in torch's own operators, for graphs that run without this package.

The registered operators (ops/registration.py) exist only in programs that load this package. In an exported graph,
these functions replace them. Unlike ops/reference.py, they have one form for all sequence lengths, so that a graph is
valid for all of them, and they support only inference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightconv_plugin.ops.filters import widen, with_shared_filter
from lightconv_plugin.ops.normalize import normalize as normalize_taps


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
    """See ops.dynamicconv."""
    _refuse(bias=bias, lengths=lengths, cu_seqlens=cu_seqlens, seed=seed, renorm_padding=renorm_padding, glu=glu)
    rows = _padded(x, padding_l, weight.shape[-1] - 1 - padding_l)
    return _sum_over_taps(rows, _taps(weight, normalize), x)


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
    """See ops.dynamicconv_step; the state has all K − 1 rows."""
    _refuse(bias=bias, seed=seed, renorm_padding=renorm_padding, glu=glu)
    return _step(x, state, _taps(weight, normalize))


def talkconv(
    x: Tensor,
    offset_left: Tensor,
    offset_right: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    max_left: int,
    max_right: int,
) -> Tensor:
    """See ops.talkconv; no offset is larger than 1."""
    _refuse(lengths=lengths, cu_seqlens=cu_seqlens)
    taps = _window(offset_left, offset_right, max_left, max_right)
    return _sum_over_taps(_padded(x, max_left, max_right), taps, x)


def talkconv_step(x: Tensor, state: Tensor, offset_left: Tensor, max_left: int) -> tuple[Tensor, Tensor]:
    """See ops.talkconv_step; the state has all `max_left` rows."""
    return _step(x, state, _window(offset_left, None, max_left, 0))


def decompositions() -> dict[Any, Callable]:
    """These functions, by the operators that they replace."""
    functions: dict[str, Callable] = {
        "lightconv": with_shared_filter(dynamicconv),
        "lightconv_step": with_shared_filter(dynamicconv_step),
        "dynamicconv": dynamicconv,
        "dynamicconv_step": dynamicconv_step,
        "talkconv": talkconv,
        "talkconv_step": talkconv_step,
    }
    return {getattr(torch.ops.lightconv, name).default: function for name, function in functions.items()}


def _refuse(**options: object) -> None:
    """ValueError for options that inference never uses: a graph that ignored them would be wrong."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    if given:
        raise ValueError(f"graphs for deployment hold no convolution with {', '.join(given)}")


def _padded(x: Tensor, left: int, right: int) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, left, right))


def _taps(weight: Tensor, normalize: str) -> Tensor:
    """The filters (…,K), normalised."""
    if normalize == "softmax":
        return widen(weight).softmax(dim=-1)
    return normalize_taps(widen(weight).movedim(-1, 0), normalize).movedim(0, -1)


def _window(left: Tensor, right: Tensor | None, max_left: int, max_right: int) -> Tensor:
    """A window as a filter: offsets (T,B,H) → (T,B,H, max_left + 1 + max_right)."""

    def side(offset: Tensor, reach: int) -> Tensor:
        distances = torch.arange(1, reach + 1, device=offset.device)
        return (widen(offset).unsqueeze(-1) * reach - distances + 1).clamp(0, 1)

    middle = torch.ones_like(widen(left)).unsqueeze(-1)
    parts = [side(left, max_left).flip(-1), middle] + ([] if right is None else [side(right, max_right)])
    return torch.cat(parts, dim=-1) / (max_left + max_right + 1)


def _step(x: Tensor, state: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.cat([state, x])
    return _sum_over_taps(rows, taps, x), rows.narrow(0, x.shape[0], state.shape[0]).clone()


def _sum_over_taps(rows: Tensor, taps: Tensor, x: Tensor) -> Tensor:
    """out[t] = Σ_k taps[t, …, k] · rows[t + k]: rows (T+K−1,B,C), taps (H,K) or (T,B,H,K) → (T,B,C), in x's type.

    A compiler fuses it into one loop; without one, all products are in memory at once, K times the size of x.
    """
    heads, kernel_size = taps.shape[-2:]
    windows = widen(rows).unflatten(-1, (heads, rows.shape[-1] // heads)).unfold(0, kernel_size, 1)
    # Time and taps have equal strides, so their order in the product's layout would depend on the length.
    windows = windows.clone(memory_format=torch.contiguous_format)
    return (windows * taps.unsqueeze(-2)).sum(dim=-1).flatten(-2).to(x.dtype)
