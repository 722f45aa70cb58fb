"""The launchers in cuda/*/launchers.h behind the signatures of the registered operators (ops/registration.py)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightconv_plugin.ops.normalize import NORMALIZATIONS

from .host import Runner, Sparse

_TYPES = (torch.float32, torch.float16, torch.bfloat16)  # the order of lightconv::Type
_INPUTS = (
    *("seed", "lengths", "cu_seqlens", "x", "weight", "bias", "state", "grad", "grad_state"),
    *("offset_left", "offset_right"),
)
_ROWS = ("out", "next_state", "dx", "dstate")


class Operators:
    """The operators, run on the host. Results are NaN before a call, so what is not written shows."""

    def __init__(
        self,
        runner: Runner,
        compute_capability: int = 80,
        shared_at_most: int = 99 * 1024,
        grid_height: int = 65535,
        mistake: int = 0,
    ) -> None:
        self.runner = runner
        self.device = {
            "compute_capability": compute_capability,
            "shared_at_most": shared_at_most,
            "grid_height": grid_height,
            "mistake": mistake,
        }

    def on(self, **device: int) -> Operators:
        """The same kernels on a device that differs in this."""
        return Operators(self.runner, **(self.device | device))

    def lightconv(self, x, weight, bias, lengths, cu_seqlens, seed, padding_l, normalize, dropout, glu):
        return self.dynamicconv(x, weight, bias, lengths, cu_seqlens, seed, padding_l, normalize, dropout, False, glu)

    def dynamicconv(self, x, weight, bias, lengths, cu_seqlens, seed, padding_l, normalize, dropout, renorm, glu):
        out = unwritten(channels(x, glu))
        inputs = {"x": x, "weight": weight, "bias": bias, "lengths": lengths, "cu_seqlens": cu_seqlens, "seed": seed}
        self._call(inputs, {"out": out}, padding_l, normalize, dropout, renorm, glu)
        return out

    def lightconv_backward(
        self, grad, x, weight, lengths, cu_seqlens, seed, padding_l, normalize, dropout, glu, need_x, need_weight
    ):
        sequences = (lengths, cu_seqlens, seed)
        return self.dynamicconv_backward(
            grad, x, weight, *sequences, padding_l, normalize, dropout, False, glu, need_x, need_weight
        )

    def dynamicconv_backward(
        self,
        grad,
        x,
        weight,
        lengths,
        cu_seqlens,
        seed,
        padding_l,
        normalize,
        dropout,
        renorm,
        glu,
        need_x,
        need_weight,
    ):
        dx, dweight = gradient(x, need_x), gradient(weight, need_weight)
        inputs = {"x": x, "weight": weight, "lengths": lengths, "cu_seqlens": cu_seqlens, "seed": seed, "grad": grad}
        outputs = {"dx": dx, "dweight": dweight}
        self._call(inputs, outputs, padding_l, normalize, dropout, renorm, glu, backward=True)
        return dx, dweight

    def lightconv_step(self, x, state, weight, bias, seed, normalize, dropout, glu):
        return self.dynamicconv_step(x, state, weight, bias, seed, normalize, dropout, False, glu)

    def dynamicconv_step(self, x, state, weight, bias, seed, normalize, dropout, renorm, glu):
        history = weight.shape[-1] - 1
        out = unwritten(channels(x, glu))
        next_state = unwritten(state.new_empty(min(state.shape[0] + x.shape[0], history), *state.shape[1:]))
        inputs = {"x": x, "state": state, "weight": weight, "bias": bias, "seed": seed}
        outputs = {"out": out, "next_state": next_state}
        self._call(inputs, outputs, history, normalize, dropout, renorm, glu)
        return out, next_state

    def lightconv_step_backward(
        self, grad, grad_state, x, state, weight, seed, normalize, dropout, glu, need_x, need_state, need_weight
    ):
        options = (seed, normalize, dropout, False, glu)
        return self.dynamicconv_step_backward(
            grad, grad_state, x, state, weight, *options, need_x, need_state, need_weight
        )

    def dynamicconv_step_backward(
        self, grad, grad_state, x, state, weight, seed, normalize, dropout, renorm, glu, need_x, need_state, need_weight
    ):
        history = weight.shape[-1] - 1
        dx, dstate = gradient(x, need_x), gradient(state, need_state)
        dweight = gradient(weight, need_weight)
        inputs = {"x": x, "state": state, "weight": weight, "seed": seed, "grad": grad, "grad_state": grad_state}
        outputs = {"dx": dx, "dstate": dstate, "dweight": dweight}
        self._call(inputs, outputs, history, normalize, dropout, renorm, glu, backward=True)
        return dx, dstate, dweight

    def talkconv(self, x, offset_left, offset_right, lengths, cu_seqlens, max_left, max_right):
        out = unwritten(x)
        inputs = {"x": x, "lengths": lengths, "cu_seqlens": cu_seqlens}
        inputs |= {"offset_left": offset_left, "offset_right": offset_right}
        self._talk(inputs, {"out": out}, max_left, max_right)
        return out

    def talkconv_backward(
        self,
        grad,
        x,
        offset_left,
        offset_right,
        lengths,
        cu_seqlens,
        max_left,
        max_right,
        need_x,
        need_left,
        need_right,
    ):
        dx, dleft = gradient(x, need_x), gradient(offset_left, need_left)
        dright = values(x).new_empty(0) if offset_right is None else gradient(offset_right, need_right)
        inputs = {"x": x, "lengths": lengths, "cu_seqlens": cu_seqlens, "grad": grad}
        inputs |= {"offset_left": offset_left, "offset_right": offset_right}
        self._talk(inputs, {"dx": dx, "dleft": dleft, "dright": dright}, max_left, max_right, backward=True)
        return dx, dleft, dright

    def talkconv_step(self, x, state, offset_left, max_left):
        out = unwritten(x)
        next_state = unwritten(state.new_empty(min(state.shape[0] + x.shape[0], max_left), *state.shape[1:]))
        inputs = {"x": x, "state": state, "offset_left": offset_left}
        self._talk(inputs, {"out": out, "next_state": next_state}, max_left, 0)
        return out, next_state

    def talkconv_step_backward(self, grad, grad_state, x, state, offset_left, max_left, need_x, need_state, need_left):
        dx, dstate = gradient(x, need_x), gradient(state, need_state)
        dleft = gradient(offset_left, need_left)
        inputs = {"x": x, "state": state, "offset_left": offset_left, "grad": grad, "grad_state": grad_state}
        self._talk(inputs, {"dx": dx, "dstate": dstate, "dleft": dleft}, max_left, 0, backward=True)
        return dx, dstate, dleft

    def _talk(self, inputs, outputs, max_left, max_right, backward=False) -> None:
        heads = values(inputs["offset_left"]).shape[-1]
        numbers = {"talk": 1, "backward": backward, "max_left": max_left, "max_right": max_right}
        self._run(inputs, outputs, numbers, {}, values(inputs["x"]).shape[-1], heads)

    def _call(self, inputs, outputs, padding_l, normalize, dropout, renorm, glu, backward=False) -> None:
        width, filters = values(inputs["x"]).shape[-1], values(inputs["weight"]).shape
        numbers = {
            "talk": 0,
            "backward": backward,
            "dynamic": len(filters) == 4,
            "kernel_size": filters[-1],
            "padding_l": padding_l,
            "normalize": NORMALIZATIONS.index(normalize),
            "glu": glu,
            "renorm_padding": renorm,
            "drop_below": math.ceil(dropout * 2**32),
        }
        fractions = {"keep_scale": 1 / (1 - dropout)}
        self._run(inputs, outputs, numbers, fractions, width // 2 if glu else width, filters[-2])

    def _run(self, inputs, outputs, numbers, fractions, channels, heads) -> None:
        lengths, cu_seqlens = inputs.get("lengths"), inputs.get("cu_seqlens")
        x = values(inputs["x"])
        numbers = numbers | {
            "type": _TYPES.index(x.dtype),
            "steps": x.shape[0],
            "batch": x.shape[1],
            "channels": channels,
            "heads": heads,
            "state_rows": 0 if inputs.get("state") is None else inputs["state"].shape[0],
            "lengths_int64": lengths is not None and lengths.dtype == torch.int64,
            "sequences": 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
            **self.device,
        }
        # A tensor without elements has no memory: a state without rows, a gradient nobody wants are null pointers.
        given = {name: inputs[name] for name in _INPUTS if inputs.get(name) is not None}
        given = {name: tensor for name, tensor in given.items() if values(tensor).numel() or name in ("x", "weight")}
        if "bias" in given:
            given["bias"] = given["bias"].contiguous()  # as the binding does
        wanted = {name: tensor for name, tensor in outputs.items() if values(tensor).numel()}
        # As Result in cuda/common/binding.h: channels that are not contiguous are written somewhere else, and copied.
        apart = {
            name: unwritten(tensor.contiguous())
            for name, tensor in wanted.items()
            if name in _ROWS and isinstance(tensor, Tensor) and tensor.shape[2] > 1 and tensor.stride(2) != 1
        }
        self.runner.call(numbers, fractions, given, wanted | apart)
        for name, tensor in apart.items():
            wanted[name].copy_(tensor)


def values(tensor: Tensor | Sparse) -> Tensor:
    return tensor.values if isinstance(tensor, Sparse) else tensor


def channels(x: Tensor | Sparse, glu: bool) -> Tensor | Sparse:
    return x[..., : x.shape[-1] // 2] if glu else x


def unwritten(like: Tensor | Sparse) -> Tensor | Sparse:
    """Memory for a result shaped and laid out as the registered operators do it, all NaN."""
    if isinstance(like, Sparse):
        return Sparse(torch.full_like(like.values, math.nan), like.strides)
    return torch.empty_like(like).fill_(math.nan)


def gradient(tensor: Tensor | Sparse, needed: bool) -> Tensor | Sparse:
    return unwritten(tensor) if needed else values(tensor).new_empty(0)
