"""All checks of the operators' arguments. A message names the argument, its value and what is allowed.

TypeError: something is not a dense tensor, not a number, or has the wrong dtype. ValueError: a wrong shape, device or
value. NotImplementedError: a forward-mode derivative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .normalize import NORMALIZATIONS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


_FLAGS = ("renorm_padding", "glu")
MOST_PENALTIES = 4  # of best_words; kMostPenalties in cuda/decoding/launchers.h
OPTIONAL = ("bias", "state", "offset_right")


def floating(names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> None:
    """All are dense tensors of an allowed floating dtype; the `OPTIONAL` ones may be None."""
    for name, value in zip(names, tensors, strict=True):
        if value is not None or name not in OPTIONAL:
            _tensor(name, value, DTYPES)


def no_tangents(*tensors: Tensor | None) -> None:
    """NotImplementedError for forward-mode derivatives, which torch would silently take to be zero."""
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        no_forward_mode()


def no_forward_mode(*_: object) -> NoReturn:
    """NotImplementedError for forward-mode derivatives."""
    raise NotImplementedError(
        "the lightconv operators have no forward-mode derivatives (jvp, jacfwd, hessian): use those of "
        "torch.autograd.grad, torch.func.grad, vjp or jacrev"
    )


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, normalize: str, dropout: float, flags: tuple[bool, ...]
) -> None:
    """What a full pass and a step share; the tensors have passed `floating`.

    flags: `glu` of lightconv; `renorm_padding` and `glu` of dynamicconv.
    """
    _options(normalize, dropout, flags)
    _shapes(x, weight, bias, dynamic=len(flags) == len(_FLAGS), glu=flags[-1])


def full_pass(x: Tensor, weight: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, padding_l: int) -> None:
    """The other arguments of lightconv and dynamicconv."""
    kernel_size = weight.shape[-1]
    if isinstance(padding_l, bool) or not isinstance(padding_l, (int, torch.SymInt)):
        raise TypeError(f"padding_l must be an int, got {_what(padding_l)}")
    if not 0 <= padding_l < kernel_size:
        raise ValueError(f"padding_l must satisfy 0 <= padding_l < K = {kernel_size} (weight's last), got {padding_l}")
    _sequences(lengths, cu_seqlens, x)


def talk(
    x: Tensor,
    offset_left: Tensor,
    offset_right: Tensor | None,
    max_left: int,
    max_right: int,
    *,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """The arguments of talkconv; the floating ones have passed `floating`."""
    _limit("max_left", max_left)
    _limit("max_right", max_right)
    _three_dimensions(x)
    _offset("offset_left", offset_left, x)
    if offset_right is None:
        if max_right > 0:
            raise TypeError(f"offset_right must be a tensor with max_right = {max_right}, got None (for max_right = 0)")
    elif max_right == 0:
        raise ValueError(f"offset_right must be None with max_right = 0, got a tensor of shape {_shape(offset_right)}")
    else:
        _offset("offset_right", offset_right, x)
        if offset_right.shape[2] != offset_left.shape[2]:
            raise ValueError(
                f"offset_right must have offset_left's H = {offset_left.shape[2]}, got {_shape(offset_right)}"
            )
    _sequences(lengths, cu_seqlens, x)


def talk_step(x: Tensor, rows: Tensor | None, offset_left: Tensor, max_left: int) -> None:
    """The arguments of talkconv_step; the floating ones have passed `floating`."""
    _limit("max_left", max_left)
    _three_dimensions(x)
    _offset("offset_left", offset_left, x)
    if rows is not None:
        state(rows, x, max_left, "max_left", x.shape[2])
    if _readable(offset_left) and (offset_left > 1).any():
        raise ValueError(
            f"offset_left must not exceed 1 in a step, which keeps the last max_left = {max_left} inputs only, "
            f"got {offset_left[offset_left > 1].max().item():.6g}"
        )


def probability(name: str, value: float) -> None:
    """A dropout probability: it must be below 1, because 1/(1−p) must be finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):
        raise TypeError(f"{name} must be a float, got {_what(value)}")
    if not 0 <= value < 1:
        raise ValueError(f"{name} must satisfy 0 <= {name} < 1, got {value}")


def loss(logits: Tensor, target: Tensor, epsilon: float, ignore_index: int) -> None:
    """The arguments of label_smoothed_nll_loss."""
    floating(("logits",), (logits,))
    _tensor("target", target, (torch.int64,))
    probability("epsilon", epsilon)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {_what(ignore_index)}")
    if logits.dim() < 1 or logits.shape[-1] < 2:
        raise ValueError(f"logits must have the shape (…, V) with V >= 2, got {tuple(logits.shape)}")
    if target.shape != logits.shape[:-1]:
        raise ValueError(f"target must have the shape {tuple(logits.shape[:-1])}, got {tuple(target.shape)}")
    if target.device != logits.device:
        raise ValueError(f"target must be on the device of logits, {logits.device}, got {target.device}")


def residual(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, p: float, eps: float) -> None:
    """The arguments of dropout_add_layer_norm."""
    named = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    for name, tensor in named.items():
        _tensor(name, tensor, DTYPES)
    probability("p", p)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a float, got {_what(eps)}")
    if not 0 < eps < float("inf"):
        raise ValueError(f"eps must be above 0 and finite, got {eps}")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must have the shape (…, C) with C >= 1, got {_shape(x)}")
    for name, tensor in named.items():
        shape = x.shape[-1:] if name in ("weight", "bias") else x.shape
        _same_kind(name, tensor, x)
        if tensor.shape != shape:
            raise ValueError(f"{name} must have the shape {tuple(shape)}, got {_shape(tensor)}")


def ring_step(x: Tensor, ring: Tensor, weight: Tensor, ancestors: Tensor, now: Tensor, bias: Tensor | None) -> None:
    """The arguments of ring_step."""
    floating(("x", "ring", "bias"), (x, ring, bias))
    _tensor("weight", weight, (x.dtype, torch.promote_types(x.dtype, torch.float32)))
    _tensor("ancestors", ancestors, (torch.int64,))
    _tensor("now", now, (torch.int64,))
    others = {"ring": ring, "weight": weight, "ancestors": ancestors, "now": now} | (
        {} if bias is None else {"bias": bias}
    )
    for name, tensor in others.items():
        _same_device(name, tensor, x)
    if x.dim() != 2 or ancestors.dim() != 3 or x.shape[0] != ancestors.shape[0] * ancestors.shape[1]:
        raise ValueError(
            f"x and ancestors must have the shapes (S·B, C) and (S, B, steps), got {_shape(x)} and {_shape(ancestors)}"
        )
    if weight.dim() not in (2, 3) or weight.shape[:-2] not in ((), x.shape[:1]) or 0 in weight.shape[-2:]:
        raise ValueError(f"weight must have the shape (H, K) or (S·B, H, K), S·B = {x.shape[0]}, got {_shape(weight)}")
    heads, taps = weight.shape[-2:]
    _ring(ring, x, ancestors, taps)
    if x.shape[1] % heads:
        raise ValueError(f"weight must have a number of heads H that divides C = {x.shape[1]}, got {_shape(weight)}")
    if now.shape != (1,):
        raise ValueError(f"now must have the shape (1,), got {_shape(now)}")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != x.shape[1:]):
        raise ValueError(
            f"bias must have the shape (C,) = ({x.shape[1]},) and x's dtype, got {_shape(bias)}, {bias.dtype}"
        )
    _no_gradient("ring_step", x, ring, weight, bias)


def _ring(ring: Tensor, x: Tensor, ancestors: Tensor, taps: int) -> None:
    if ring.dtype != x.dtype:
        raise TypeError(f"ring must have x's dtype {x.dtype}, got {ring.dtype}")
    sentences, beams, _ = ancestors.shape
    least = (taps, sentences, beams)
    if (
        ring.dim() != 4
        or ring.shape[3] != x.shape[1]
        or any(size < n for size, n in zip(ring.shape, least, strict=False))
    ):
        raise ValueError(
            f"ring must have the shape (slots, sentences, beams, C), at least {least} and with C = {x.shape[1]}, "
            f"got {_shape(ring)}"
        )
    if not ring.is_contiguous():
        raise ValueError(f"ring must be contiguous, got strides {ring.stride()}")


def best_words(
    logits: Tensor, count: int, normalisers: Tensor | None, scores: Tensor | None, penalties: Mapping[int, float]
) -> None:
    """The arguments of best_words."""
    _tensor("logits", logits, DTYPES[:3])
    if logits.dim() != 2:
        raise ValueError(f"logits must have the shape (N, V), got {_shape(logits)}")
    rows, words = logits.shape
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"count must be an int, got {_what(count)}")
    if not 1 <= count <= words:
        raise ValueError(f"count must satisfy 1 <= count <= V = {words}, got {count}")
    for name, tensor in (("normalisers", normalisers), ("scores", scores)):
        if tensor is not None:
            _tensor(name, tensor, (torch.float32,))
            _same_device(name, tensor, logits)
            if tensor.shape != (rows,):
                raise ValueError(f"{name} must have the shape (N,) = ({rows},), got {_shape(tensor)}")
    if len(penalties) > MOST_PENALTIES:
        raise ValueError(f"penalties must be for at most {MOST_PENALTIES} words, got {len(penalties)}")
    for word, penalty in penalties.items():
        if not 0 <= word < words or not penalty > -math.inf:
            raise ValueError(
                f"penalties must be numbers above −∞ for words in 0 … V − 1 = {words - 1}, got {word}: {penalty}"
            )
    _no_gradient("best_words", logits, normalisers, scores)


def _no_gradient(operator: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError(f"{operator} has no gradients: call it under torch.no_grad(), or detach its arguments")


def _options(normalize: str, dropout: float, flags: tuple[bool, ...]) -> None:
    if not isinstance(normalize, str):
        raise TypeError(f"normalize must be a str, got {_what(normalize)}")
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"normalize must be one of {', '.join(NORMALIZATIONS)}, got {normalize!r}")
    probability("dropout", dropout)
    for place, value in enumerate(flags, -len(flags)):
        if not isinstance(value, bool):
            raise TypeError(f"{_FLAGS[place]} must be a bool, got {_what(value)}")


def _shapes(x: Tensor, weight: Tensor, bias: Tensor | None, *, dynamic: bool, glu: bool) -> None:
    """Dtypes, devices and shapes of the tensors that a full pass and a step share."""
    _same_kind("weight", weight, x)
    _three_dimensions(x, "2C" if glu else "C")
    steps, batch, channels = x.shape
    if glu:
        if channels % 2:
            raise ValueError(f"x must have an even last dimension 2C with glu=True, got shape {_shape(x)}")
        channels = channels // 2
    if dynamic:
        if weight.dim() != 4 or weight.shape[0] != steps or weight.shape[1] != batch:
            raise ValueError(
                f"weight must have shape (T, B, H, K) with x's T = {steps} and B = {batch}, got {_shape(weight)}"
            )
    elif weight.dim() != 2:
        raise ValueError(f"weight must have shape (H, K), got {_shape(weight)}")
    if weight.shape[-1] < 1 or weight.shape[-2] < 1:
        raise ValueError(f"weight must have at least one head H and one tap K, got shape {_shape(weight)}")
    if channels % weight.shape[-2]:
        raise ValueError(
            f"weight must have a number of heads H that divides C = {channels}, got H = {weight.shape[-2]} "
            f"in shape {_shape(weight)}"
        )
    if bias is not None:
        _same_kind("bias", bias, x)
        if bias.dim() != 1 or bias.shape[0] != channels:
            raise ValueError(f"bias must have shape (C,) = ({channels},), got {_shape(bias)}")


def _three_dimensions(x: Tensor, channels: str = "C") -> None:
    if x.dim() != 3:
        raise ValueError(f"x must have three dimensions (T, B, {channels}), got shape {_shape(x)}")
    if x.shape[0] < 1 or x.shape[2] < 1:
        raise ValueError(f"x must have at least one time step and one channel, got shape {_shape(x)}")


def state(rows: Tensor, x: Tensor, history: int, history_name: str, channels: int) -> None:
    """The state of a step function: at most the last `history` rows of its earlier inputs."""
    _same_kind("state", rows, x)
    batch = x.shape[1]
    if rows.dim() != 3 or rows.shape[0] > history or rows.shape[1] != batch or rows.shape[2] != channels:
        raise ValueError(
            f"state must be None or have shape (r, B, C) = (0 to {history_name} = {history}, {batch}, {channels}), "
            f"got {_shape(rows)}"
        )


def _limit(name: str, value: int) -> None:
    """The number of rows that a window reaches to one side with an offset of 1."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {_what(value)}")
    if not 0 <= value < 2**30:  # the kernels compute with sums of a few limits, on a GPU in 32 bits
        raise ValueError(f"{name} must satisfy 0 <= {name} < 2^30, got {value}")


def _offset(name: str, offset: Tensor, x: Tensor) -> None:
    _same_kind(name, offset, x)
    steps, batch, channels = x.shape
    if offset.dim() != 3 or offset.shape[0] != steps or offset.shape[1] != batch:
        raise ValueError(f"{name} must have shape (T, B, H) with x's T = {steps} and B = {batch}, got {_shape(offset)}")
    if offset.shape[2] < 1 or channels % offset.shape[2]:
        raise ValueError(
            f"{name} must have a number of heads H >= 1 that divides C = {channels}, got H = {offset.shape[2]} "
            f"in shape {_shape(offset)}"
        )


def _sequences(lengths: Tensor | None, cu_seqlens: Tensor | None, x: Tensor) -> None:
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("lengths and cu_seqlens must not be given together: sequences are either padded or packed")
    if lengths is not None:
        _lengths(lengths, x)
    if cu_seqlens is not None:
        _cu_seqlens(cu_seqlens, x)


def _lengths(lengths: Tensor, x: Tensor) -> None:
    _tensor("lengths", lengths, (torch.int32, torch.int64))
    _same_device("lengths", lengths, x)
    if lengths.dim() != 1 or lengths.shape[0] != x.shape[1]:
        raise ValueError(f"lengths must have shape (B,) = ({x.shape[1]},), got {_shape(lengths)}")
    if _readable(lengths) and ((lengths < 0) | (lengths > x.shape[0])).any():
        raise ValueError(f"lengths must lie in 0 to T = {x.shape[0]}, got {lengths.min()} to {lengths.max()}")


def _cu_seqlens(cu_seqlens: Tensor, x: Tensor) -> None:
    _tensor("cu_seqlens", cu_seqlens, (torch.int32,))
    _same_device("cu_seqlens", cu_seqlens, x)
    if x.shape[1] != 1:
        raise ValueError(f"cu_seqlens (packed sequences) allows B = 1 only, got x of shape {_shape(x)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape (N+1,) with N >= 1 sequences, got {_shape(cu_seqlens)}")
    if _readable(cu_seqlens):
        first, last, shortest = cu_seqlens[0].item(), cu_seqlens[-1].item(), cu_seqlens.diff().min().item()
        if first != 0 or last != x.shape[0] or shortest < 0:
            raise ValueError(
                f"cu_seqlens must not decrease, from 0 to T = {x.shape[0]}, "
                f"got first {first}, last {last}, smallest difference {shortest}"
            )


def _readable(tensor: Tensor) -> bool:
    """Whether the values may be read: not if that would wait for a device, not while a graph is being traced, and not
    where there are none, or several at once (fake tensors, torch.vmap)."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and get_proxy_mode() is None
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and type(tensor) is Tensor
        and tensor.device.type == "cpu"
    )


def _tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {_what(value)}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must have one of the dtypes {', '.join(map(str, dtypes))}, got {value.dtype}")
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"one of layout {value.layout}"
        raise TypeError(f"{name} must be a dense tensor, got {kind}")


def _same_kind(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.dtype != x.dtype:
        raise TypeError(f"{name} must have x's dtype {x.dtype}, got {tensor.dtype}")
    _same_device(name, tensor, x)


def _same_device(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {tensor.device}")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _what(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
