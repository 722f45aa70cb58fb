"""What a computation asks of a GPU, counted without one: launches, bytes, operations, and waits of the host.

Tensors of the device "meta" have shapes and no numbers, so a step of a large model is counted in seconds on any
machine, and code takes the branches that are not for CPUs. What torch does differently on CUDA and on "meta" is
replaced by what it does on CUDA (`as_on_cuda`).

A launch is an operator that computes something, not a view or an allocation. Most are one kernel; a few are two or
three (layer norm's gradient), and one of torch._foreach_* is one for about a hundred tensors. So the count is not the
profiler's, but it moves with it. Bytes: each operator reads its inputs and writes its outputs once.
"""

from __future__ import annotations

import collections
import contextlib
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightconv_plugin.compat import criterions

aten = torch.ops.aten
_NO_KERNEL = {
    aten._unsafe_view,  # a view, although torch does not call it one
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    torch.ops.profiler._record_function_enter_new,
    torch.ops.profiler._record_function_exit,
}
# These read as much of their first tensor as they write.
_LOOK_UPS = {aten.embedding, aten.gather, aten.index_select, aten.index}
_READING = (aten._local_scalar_dense, aten.is_nonzero)


@dataclass
class Counts:
    """What was counted.

    launches, bytes: how many, and read and written, by the operator's name. flops: multiplications and additions of
    matrix products and convolutions. product_bytes: those of `bytes` that belong to `flops`. waits: the places in
    Python, "file.py:line", at which the host waits for the device.
    """

    launches: collections.Counter[str] = field(default_factory=collections.Counter)
    bytes: collections.Counter[str] = field(default_factory=collections.Counter)
    product_bytes: int = 0
    flops: int = 0
    waits: list[str] = field(default_factory=list)


class Counter(TorchDispatchMode):
    """Counts everything that runs inside, and stands in for the numbers that "meta" does not have.

    Where the host reads a number of a tensor on "meta", it is given 1 or True. A tensor copied from there to the CPU
    becomes a tensor of ones.

    device: what runs on tensors of this device is counted; a host computes what is on the CPU alone.
    counts: what was counted since the start, or since `begin`; parts: the same by the name given to `begin`.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device = device
        self.counts = Counts()
        self.parts: dict[str, Counts] = {}

    def begin(self, part: str) -> None:
        """What follows counts for this part."""
        self.counts = self.parts.setdefault(part, Counts())

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if (answer := _read_from_meta(function, args, kwargs)) is not None:
            self.counts.waits.append(_place())
            return answer
        out = None if _is_fused_adam(function, args) else function(*args, **kwargs)
        if not function.is_view and function.overloadpacket not in _NO_KERNEL and self._on_device((args, kwargs, out)):
            flops, moved = _flops(function, args, kwargs, out), _bytes(function, (args, kwargs), out)
            self.counts.launches[str(function.overloadpacket)] += 1
            self.counts.bytes[str(function.overloadpacket)] += moved
            self.counts.flops += flops
            self.counts.product_bytes += moved if flops else 0
        return out

    def _on_device(self, things: Any) -> bool:
        return any(leaf.device.type == self.device for leaf in tree_leaves(things) if isinstance(leaf, Tensor))


def _read_from_meta(function: Any, args: tuple, kwargs: dict) -> Any:
    """What is given to a host that reads numbers of "meta"; None if it does not."""
    if not args or not isinstance(args[0], Tensor) or args[0].device.type != "meta":
        return None
    if function.overloadpacket in _READING:
        return torch.ones((), dtype=args[0].dtype).item()
    device = kwargs.get("device")
    if function.overloadpacket is aten._to_copy and device is not None and torch.device(device).type != "meta":
        return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=device)
    return None


def _place() -> str:
    """The innermost line of Python that is neither torch's nor this file's."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if "torch" not in path.parts and path != Path(__file__):
            return f"{path.name}:{frame.lineno}"
    raise AssertionError("called from nowhere")


def _is_fused_adam(function: Any, args: tuple) -> bool:
    """torch has this operator, which changes tensors in place and returns nothing, for devices with numbers only."""
    return function.overloadpacket is aten._fused_adamw_ and args[0][0].device.type == "meta"


def _bytes(function: Any, inputs: Any, out: Any) -> int:
    """Each input is read once, each output is written once; a tensor that is changed in place is both."""
    read = list({id(leaf): leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}.values())
    changed = {argument.name for argument in function._schema.arguments if argument.alias_info}
    written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    if changed and not written:
        written = [
            leaf
            for argument, given in zip(function._schema.arguments, inputs[0], strict=False)
            if argument.name in changed
            for leaf in tree_leaves(given)
        ]
    moved = sum(map(_size, written))
    if function.overloadpacket in _LOOK_UPS:
        return moved + sum(map(_size, written + read[1:]))
    return moved + sum(map(_size, read))


def _size(tensor: Tensor) -> int:
    """Bytes of the distinct elements: an expanded tensor is as large as what it was expanded from."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.itemsize if tensor.numel() else 0


def _flops(function: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Of matrix products, attention, and the two convolutions: a multiplication and an addition per element and tap,
    twice as many in the gradient. talkconv's few are left out, as are those of element-wise operators."""
    if known := flop_registry.get(function.overloadpacket):
        return known(*args, **kwargs, out_val=out)
    name, _, kind = function._opname.partition("_")
    if function.namespace != "lightconv" or name not in ("lightconv", "dynamicconv") or kind not in ("", "backward"):
        return 0
    x, weight = args[1:3] if kind else args[:2]
    return (4 if kind else 2) * x.numel() * weight.shape[-1]


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Inside, tensors on "meta" take the operators that torch and the plugin have for CUDA."""
    dropout = F.dropout

    def fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if input.device.type != "meta" or not training or not 0 < p < 1:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    with (
        mock.patch.object(criterions, "_has_kernel", lambda logits: True),
        mock.patch.object(F, "dropout", fused_dropout),
        mock.patch.object(F, "scaled_dot_product_attention", _attention(F.scaled_dot_product_attention)),
        mock.patch.object(torch, "dropout", lambda input, p, train: fused_dropout(input, p, train)),
    ):
        yield


def _attention(original: Any) -> Any:
    """F.scaled_dot_product_attention with the kernel that CUDA chooses for a mask: the memory-efficient one."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if query.device.type != "meta":
            return original(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:  # as torch converts it
                bias = torch.zeros_like(attn_mask, dtype=query.dtype)
                attn_mask = bias.masked_fill_(attn_mask.logical_not(), -torch.inf)
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        grad = torch.is_grad_enabled() and query.requires_grad
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, grad, dropout_p, is_causal, **kwargs
        )[0]

    return attention
