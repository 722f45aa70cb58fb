"""The launchers in cuda/*/launchers.h behind the signatures of the registered operators (ops/registration.py)."""

from __future__ import annotations

import math
from typing import Any

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

    def __getattr__(self, name: str):
        """The operator of this name, as torch's dispatcher has it."""
        schema = getattr(torch.ops.lightconv, name).default._schema
        names = [argument.name for argument in schema.arguments]
        return lambda *args: self._call(name, dict(zip(names, args, strict=True)))

    def _call(self, name: str, given: dict[str, Any]) -> Tensor | tuple[Tensor, ...]:
        talk, backward, glu = name.startswith("talk"), name.endswith("_backward"), given.get("glu", False)
        x, filters = values(given["x"]), values(given["offset_left" if talk else "weight"])
        history = given["max_left"] if talk else filters.shape[-1] - 1
        numbers = {"talk": talk, "backward": backward}
        fractions = {}
        if talk:
            numbers |= {"max_left": history, "max_right": given.get("max_right", 0)}
        else:
            numbers |= {
                "dynamic": filters.dim() == 4,
                "kernel_size": filters.shape[-1],
                "padding_l": given.get("padding_l", history),
                "normalize": NORMALIZATIONS.index(given["normalize"]),
                "glu": glu,
                "renorm_padding": given.get("renorm_padding", False),
                "drop_below": math.ceil(given["dropout"] * 2**32),
            }
            fractions["keep_scale"] = 1 / (1 - given["dropout"])
        if backward:
            outputs = gradients(given)
        else:
            outputs = {"out": unwritten(given["x"][..., : x.shape[-1] // 2] if glu else given["x"])}
            if "state" in given:
                state, rows = given["state"], given["state"].shape[0] + x.shape[0]
                outputs["next_state"] = unwritten(state.new_empty(min(rows, history), *state.shape[1:]))
        width, heads = x.shape[-1] // (1 + glu), filters.shape[-1 if talk else -2]
        self._run({key: given.get(key) for key in _INPUTS}, outputs, numbers, fractions, width, heads)
        return tuple(outputs.values()) if len(outputs) > 1 else outputs["out"]

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


def unwritten(like: Tensor | Sparse) -> Tensor | Sparse:
    """Memory for a result shaped and laid out as the registered operators do it, all NaN."""
    if isinstance(like, Sparse):
        return Sparse(torch.full_like(like.values, math.nan), like.strides)
    return torch.empty_like(like).fill_(math.nan)


def gradients(given: dict[str, Any]) -> dict[str, Tensor | Sparse]:
    """The results of a backward operator by name: those not needed have no elements."""
    found = {}
    for name, needed in given.items():
        if name.startswith("need_"):
            short = name.removeprefix("need_")
            tensor = given[short] if short in given else given[f"offset_{short}"]
            wanted = needed and tensor is not None
            found[f"d{short}"] = unwritten(tensor) if wanted else values(given["x"]).new_empty(0)
    return found
