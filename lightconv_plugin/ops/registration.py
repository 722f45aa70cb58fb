"""The operators of torch's dispatcher, in the namespace `lightconv`: schemas, kernels, fake kernels, autograd.

The kernels registered here, under CompositeExplicitAutograd, serve devices whose native kernels are not loaded. On the
first call, backends.py loads the native kernels, and the call goes to them, or to the reference if there are none. A
kernel for the key CPU or CUDA takes precedence, so later calls go straight to it. Native kernels must allocate their
results as the fake kernels below do. Only the inputs (and the dropout seed) are saved for the backward pass; normalised
weights and masks are recomputed.

The autograd registration here is in Python. A native library registers the same in C++ for its device (autograd.h),
which takes a quarter of the host time.

`seed` is a (1,) int64 tensor with dropout > 0, else None; philox.py defines its use.
Gradients of the convolutions are first order: differentiating a backward operator raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightconv_plugin.ops import backends, reference, transforms
from lightconv_plugin.ops.transforms import call

_library = torch.library.Library("lightconv", "DEF")

_FULL = "Tensor? lengths, Tensor? cu_seqlens, Tensor? seed, SymInt padding_l, str normalize, float dropout"
_STEP = "Tensor? seed, str normalize, float dropout"
_TALK = (
    "Tensor x, Tensor offset_left, Tensor? offset_right, Tensor? lengths, Tensor? cu_seqlens, "
    "SymInt max_left, SymInt max_right"
)
_SCHEMAS = (
    f"lightconv(Tensor x, Tensor weight, Tensor? bias, {_FULL}, bool glu) -> Tensor",
    f"dynamicconv(Tensor x, Tensor weight, Tensor? bias, {_FULL}, bool renorm_padding, bool glu) -> Tensor",
    f"lightconv_backward(Tensor grad, Tensor x, Tensor weight, {_FULL}, bool glu, "
    "bool need_x, bool need_weight) -> (Tensor, Tensor)",
    f"dynamicconv_backward(Tensor grad, Tensor x, Tensor weight, {_FULL}, bool renorm_padding, bool glu, "
    "bool need_x, bool need_weight) -> (Tensor, Tensor)",
    f"lightconv_step(Tensor x, Tensor state, Tensor weight, Tensor? bias, {_STEP}, bool glu) -> (Tensor, Tensor)",
    f"dynamicconv_step(Tensor x, Tensor state, Tensor weight, Tensor? bias, {_STEP}, bool renorm_padding, bool glu) "
    "-> (Tensor, Tensor)",
    f"lightconv_step_backward(Tensor? grad, Tensor? grad_state, Tensor x, Tensor state, Tensor weight, {_STEP}, "
    "bool glu, bool need_x, bool need_state, bool need_weight) -> (Tensor, Tensor, Tensor)",
    f"dynamicconv_step_backward(Tensor? grad, Tensor? grad_state, Tensor x, Tensor state, Tensor weight, {_STEP}, "
    "bool renorm_padding, bool glu, bool need_x, bool need_state, bool need_weight) -> (Tensor, Tensor, Tensor)",
    f"talkconv({_TALK}) -> Tensor",
    f"talkconv_backward(Tensor grad, {_TALK}, bool need_x, bool need_left, bool need_right) "
    "-> (Tensor, Tensor, Tensor)",
    "talkconv_step(Tensor x, Tensor state, Tensor offset_left, SymInt max_left) -> (Tensor, Tensor)",
    "talkconv_step_backward(Tensor? grad, Tensor? grad_state, Tensor x, Tensor state, Tensor offset_left, "
    "SymInt max_left, bool need_x, bool need_state, bool need_left) -> (Tensor, Tensor, Tensor)",
    "dropout(Tensor x, Tensor seed, float p) -> Tensor",
)


# ------------------------------------------------------------------------------------------------ fake kernels


def _fake(x: Tensor, weight: Tensor, *options) -> Tensor:
    return _like_channels(x, glu=options[-1])


def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor, *options) -> tuple[Tensor, Tensor]:
    need_x, need_weight = options[-2:]
    return _gradient(x, need_x), _gradient(weight, need_weight)


def _fake_step(x: Tensor, state: Tensor, weight: Tensor, *options) -> tuple[Tensor, Tensor]:
    out = _like_channels(x, glu=options[-1])
    rows = torch.sym_min(state.shape[0] + x.shape[0], weight.shape[-1] - 1)
    return out, state.new_empty((rows, *state.shape[1:]))


def _fake_step_backward(
    grad: Tensor | None, grad_state: Tensor | None, x: Tensor, state: Tensor, weight: Tensor, *options
) -> tuple[Tensor, Tensor, Tensor]:
    need_x, need_state, need_weight = options[-3:]
    return _gradient(x, need_x), _gradient(state, need_state), _gradient(weight, need_weight)


def _fake_talk(x: Tensor, *options) -> Tensor:
    return torch.empty_like(x)


def _fake_talk_backward(
    grad: Tensor, x: Tensor, offset_left: Tensor, offset_right: Tensor | None, *options
) -> tuple[Tensor, Tensor, Tensor]:
    need_x, need_left, need_right = options[-3:]
    right = x.new_empty(0) if offset_right is None else _gradient(offset_right, need_right)
    return _gradient(x, need_x), _gradient(offset_left, need_left), right


def _fake_talk_step(x: Tensor, state: Tensor, offset_left: Tensor, max_left: int) -> tuple[Tensor, Tensor]:
    rows = torch.sym_min(state.shape[0] + x.shape[0], max_left)
    return torch.empty_like(x), state.new_empty((rows, *state.shape[1:]))


def _fake_talk_step_backward(
    grad: Tensor | None, grad_state: Tensor | None, x: Tensor, state: Tensor, offset_left: Tensor, max_left: int, *needs
) -> tuple[Tensor, Tensor, Tensor]:
    need_x, need_state, need_left = needs
    return _gradient(x, need_x), _gradient(state, need_state), _gradient(offset_left, need_left)


def _fake_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_channels(x: Tensor, *, glu: bool) -> Tensor:
    return torch.empty_like(x[..., : x.shape[-1] // 2] if glu else x)


def _gradient(tensor: Tensor, needed: bool) -> Tensor:
    return torch.empty_like(tensor) if needed else tensor.new_empty(0)


# ------------------------------------------------------------------------------------------------ autograd


def _save(ctx, inputs, output) -> None:
    x, weight, _, lengths, cu_seqlens, seed, *ctx.options = inputs
    ctx.save_for_backward(x, weight, lengths, cu_seqlens, seed)


def _save_step(ctx, inputs, output) -> None:
    x, state, weight, _, seed, *ctx.options = inputs
    ctx.save_for_backward(x, state, weight, seed)
    # An unused output passes None to the backward pass, not a tensor of zeros.
    ctx.set_materialize_grads(False)


def _save_talk(ctx, inputs, output) -> None:
    *tensors, max_left, max_right = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = (max_left, max_right)


def _save_talk_step(ctx, inputs, output) -> None:
    *tensors, ctx.max_left = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _save_dropout(ctx, inputs, output) -> None:
    _, seed, ctx.p = inputs
    ctx.save_for_backward(seed)


def _dropout_backward(ctx, grad):
    # Dropout is linear and its own transpose: multiply by the same factors again.
    return call("dropout", grad, *ctx.saved_tensors, ctx.p), None, None


def _backward_of(name: str):
    def backward(ctx, grad):
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad = _contiguous_channels(grad)
        dx = dweight = None
        if need_x or need_weight:
            dx, dweight = call(name + "_backward", grad, *ctx.saved_tensors, *ctx.options, need_x, need_weight)
        gradients = (dx if need_x else None, dweight if need_weight else None, _bias_gradient(grad, need_bias))
        return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))

    return backward


def _step_backward_of(name: str):
    def backward(ctx, grad, grad_state):
        need_x, need_state, need_weight, need_bias = ctx.needs_input_grad[:4]
        grad, grad_state = _contiguous_channels(grad), _contiguous_channels(grad_state)
        dx, dstate, dweight = call(
            name + "_backward", grad, grad_state, *ctx.saved_tensors, *ctx.options, need_x, need_state, need_weight
        )
        gradients = (
            dx if need_x else None,
            dstate if need_state else None,
            dweight if need_weight else None,
            _bias_gradient(grad, need_bias),
        )
        return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))

    return backward


def _talk_backward(ctx, grad):
    needs = ctx.needs_input_grad[:3]
    gradients = (None,) * 3
    if any(needs):
        gradients = call("talkconv_backward", _contiguous_channels(grad), *ctx.saved_tensors, *ctx.options, *needs)
    return *_needed(gradients, needs), *[None] * (len(ctx.needs_input_grad) - 3)


def _talk_step_backward(ctx, grad, grad_state):
    needs = ctx.needs_input_grad[:3]
    grad, grad_state = _contiguous_channels(grad), _contiguous_channels(grad_state)
    gradients = call("talkconv_step_backward", grad, grad_state, *ctx.saved_tensors, ctx.max_left, *needs)
    return *_needed(gradients, needs), None


def _needed(gradients: tuple, needs: tuple[bool, ...]) -> list[Tensor | None]:
    """An operator returns an empty tensor for a gradient that is not needed; autograd wants None."""
    return [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]


def _contiguous_channels(grad: Tensor | None) -> Tensor | None:
    """Gradients must meet the operators' requirements for x; autograd creates expanded and transposed ones."""
    return grad if grad is None or grad.stride(-1) == 1 else grad.contiguous()


def _bias_gradient(grad: Tensor | None, needed: bool) -> Tensor | None:
    return grad.sum((0, 1)) if needed and grad is not None else None


def _no_second_order(ctx, *grads):
    raise RuntimeError("the lightconv operators have first-order gradients only; a second order was asked for")


# ------------------------------------------------------------------------------------------------ registration


def _native_or_reference(name: str):
    operator, by_reference = getattr(torch.ops.lightconv, name), getattr(reference, name)

    def kernel(*args):
        # Other layouts have no native kernel either: the call would come back here without end.
        for argument, value in zip(operator.default._schema.arguments, args, strict=False):
            if isinstance(value, Tensor) and value.layout != torch.strided:
                raise TypeError(f"{argument.name} must be a dense tensor, got one of layout {value.layout}")
        device_type = next(arg.device.type for arg in args if isinstance(arg, Tensor))
        if backends.backend(device_type) == "reference" or not backends.has_kernel(name, device_type):
            return by_reference(*args)
        return operator(*args)  # its native kernel is registered now, so later calls do not come here

    return kernel


for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

# (name, fake kernel, setup_context, backward pass)
OPERATORS: list[tuple[str, Callable[..., Any], Callable[..., Any] | None, Callable[..., Any]]] = [
    ("dropout", _fake_dropout, _save_dropout, _dropout_backward),
    ("talkconv", _fake_talk, _save_talk, _talk_backward),
    ("talkconv_backward", _fake_talk_backward, None, _no_second_order),
    ("talkconv_step", _fake_talk_step, _save_talk_step, _talk_step_backward),
    ("talkconv_step_backward", _fake_talk_step_backward, None, _no_second_order),
]
for _name in ("lightconv", "dynamicconv"):
    OPERATORS += [
        (_name, _fake, _save, _backward_of(_name)),
        (_name + "_backward", _fake_backward, None, _no_second_order),
        (_name + "_step", _fake_step, _save_step, _step_backward_of(_name + "_step")),
        (_name + "_step_backward", _fake_step_backward, None, _no_second_order),
    ]
for _operator, _kernel, _setup, _backward in OPERATORS:
    _library.impl(_operator, _native_or_reference(_operator), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lightconv::{_operator}", _kernel, lib=_library)
    torch.library.register_autograd(f"lightconv::{_operator}", _backward, setup_context=_setup, lib=_library)
    transforms.register(_operator, _setup, _backward)
