"""The operators of torch's dispatcher, in the namespace `lightconv`: schemas, kernels, fake kernels, autograd.

The kernels registered here, under CompositeExplicitAutograd, serve devices whose native kernels are not loaded. On the
first call, backends.py loads the native kernels, and the call goes to them, or to the reference if there are none. A
kernel for the key CPU or CUDA takes precedence, so later calls go straight to it. Native kernels must allocate their
results as the fake kernels below do. Only the inputs (and the dropout seed) are saved for the backward pass, of
relu_dropout the output instead; normalised weights and masks are recomputed.

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
_FLAGS = "bool renorm_padding, bool glu"
_TALK = (
    "Tensor x, Tensor offset_left, Tensor? offset_right, Tensor? lengths, Tensor? cu_seqlens, "
    "SymInt max_left, SymInt max_right"
)
_NORM = "Tensor x, Tensor residual, Tensor weight, Tensor bias, Tensor? seed, float p, float epsilon"
_CONVOLUTION = (
    f"dynamicconv(Tensor x, Tensor weight, Tensor? bias, {_FULL}, {_FLAGS}) -> Tensor",
    f"dynamicconv_backward(Tensor grad, Tensor x, Tensor weight, {_FULL}, {_FLAGS}, "
    "bool need_x, bool need_weight) -> (Tensor, Tensor)",
    f"dynamicconv_step(Tensor x, Tensor state, Tensor weight, Tensor? bias, {_STEP}, {_FLAGS}) -> (Tensor, Tensor)",
    f"dynamicconv_step_backward(Tensor? grad, Tensor? grad_state, Tensor x, Tensor state, Tensor weight, {_STEP}, "
    f"{_FLAGS}, bool need_x, bool need_state, bool need_weight) -> (Tensor, Tensor, Tensor)",
)
_SCHEMAS = (
    *_CONVOLUTION,
    *(schema.replace("dynamicconv", "lightconv").replace("bool renorm_padding, ", "") for schema in _CONVOLUTION),
    f"talkconv({_TALK}) -> Tensor",
    f"talkconv_backward(Tensor grad, {_TALK}, bool need_x, bool need_left, bool need_right) "
    "-> (Tensor, Tensor, Tensor)",
    "talkconv_step(Tensor x, Tensor state, Tensor offset_left, SymInt max_left) -> (Tensor, Tensor)",
    "talkconv_step_backward(Tensor? grad, Tensor? grad_state, Tensor x, Tensor state, Tensor offset_left, "
    "SymInt max_left, bool need_x, bool need_state, bool need_left) -> (Tensor, Tensor, Tensor)",
    "dropout(Tensor x, Tensor seed, float p) -> Tensor",
    "relu_dropout(Tensor x, Tensor seed, float p) -> Tensor",
    "relu_dropout_backward(Tensor grad, Tensor out, Tensor seed, float p) -> Tensor",
    f"dropout_add_norm({_NORM}) -> Tensor",
    f"dropout_add_norm_backward(Tensor grad, {_NORM}, bool need_x, bool need_residual, bool need_weight, "
    "bool need_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    "label_smoothed_nll(Tensor logits, Tensor target, float epsilon, int ignore_index) -> (Tensor, Tensor, Tensor)",
    "label_smoothed_nll_backward(Tensor? grad_loss, Tensor? grad_nll, Tensor logits, Tensor target, "
    "Tensor normaliser, float epsilon, int ignore_index) -> Tensor",
    "ring_step(Tensor x, Tensor(a!) ring, Tensor weight, Tensor? bias, Tensor ancestors, Tensor now, bool softmax) "
    "-> Tensor",
    "best_words(Tensor logits, Tensor? normalisers, Tensor? scores, int count, int[] penalised, float[] penalties) "
    "-> (Tensor, Tensor)",
)


# ------------------------------------------------------------------------------------------------ fake kernels


def _fake(x: Tensor, weight: Tensor, *options) -> Tensor:
    return _like_channels(x, glu=options[-1])


def _fake_step(x: Tensor, state: Tensor, weight: Tensor, *options) -> tuple[Tensor, Tensor]:
    return _like_channels(x, glu=options[-1]), _next_state(x, state, weight.shape[-1] - 1)


def _fake_talk(x: Tensor, *options) -> Tensor:
    return torch.empty_like(x)


def _fake_talk_step(x: Tensor, state: Tensor, offset_left: Tensor, max_left: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _next_state(x, state, max_left)


def _fake_contiguous(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_loss(logits: Tensor, target: Tensor, *options) -> tuple[Tensor, ...]:
    kind = torch.promote_types(logits.dtype, torch.float32)
    return tuple(logits.new_empty(logits.shape[:1], dtype=kind) for _ in range(3))


def _fake_loss_backward(grad_loss: Tensor | None, grad_nll: Tensor | None, logits: Tensor, *options) -> Tensor:
    return torch.empty_like(logits)


def _fake_best(logits: Tensor, normalisers: Tensor | None, scores: Tensor | None, count: int, *options):
    shape = (logits.shape[0], count)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _like_channels(x: Tensor, *, glu: bool) -> Tensor:
    return torch.empty_like(x[..., : x.shape[-1] // 2] if glu else x)


def _next_state(x: Tensor, state: Tensor, history: int) -> Tensor:
    return state.new_empty((torch.sym_min(state.shape[0] + x.shape[0], history), *state.shape[1:]))


def _fake_backward_of(outputs: int, gradients: int):
    def fake(*args):
        tensors, needs = args[outputs : outputs + gradients], args[-gradients:]
        return tuple(
            torch.empty_like(tensor) if tensor is not None and needed else tensors[0].new_empty(0)
            for tensor, needed in zip(tensors, needs, strict=True)
        )

    return fake


# ------------------------------------------------------------------------------------------------ autograd


def _save_of(name: str, outputs: int, gradients: int, bias: bool):
    """Saves all tensors but the bias, and the other arguments."""
    arguments = getattr(torch.ops.lightconv, name).default._schema.arguments
    tensors = sum("Tensor" in str(argument.type) for argument in arguments)

    def save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:gradients], *inputs[gradients + bias : tensors])
        ctx.options = inputs[tensors:]
        # An unused output of a step passes None to the backward pass, not a tensor of zeros.
        ctx.set_materialize_grads(outputs == 1)

    return save


def _backward_of(name: str, gradients: int, bias: bool):
    def backward(ctx, *outputs):
        needs, found = ctx.needs_input_grad[:gradients], [None] * gradients
        grads = [_contiguous_channels(grad) for grad in outputs]
        if any(needs):
            found = call(name + "_backward", *grads, *ctx.saved_tensors, *ctx.options, *needs)
        # An operator returns an empty tensor for a gradient that is not needed; autograd wants None.
        results: list[Tensor | None] = [gradient if need else None for gradient, need in zip(found, needs, strict=True)]
        if bias:
            results.append(_bias_gradient(grads[0], ctx.needs_input_grad[gradients]))
        return *results, *[None] * (len(ctx.needs_input_grad) - len(results))

    return backward


def _save_dropout(ctx, inputs, output) -> None:
    _, seed, ctx.p = inputs
    ctx.save_for_backward(seed)


def _dropout_backward(ctx, grad):
    # Dropout is linear and its own transpose: multiply by the same factors again.
    return call("dropout", grad, *ctx.saved_tensors, ctx.p), None, None


def _save_relu(ctx, inputs, output) -> None:
    _, seed, ctx.p = inputs
    ctx.save_for_backward(output, seed)


def _relu_backward(ctx, grad):
    return call("relu_dropout_backward", grad, *ctx.saved_tensors, ctx.p), None, None


def _save_loss(ctx, inputs, output) -> None:
    logits, target, *ctx.options = inputs
    ctx.save_for_backward(logits, target, output[2])
    ctx.set_materialize_grads(False)  # mostly, nll is only reported


def _loss_backward(ctx, grad_loss, grad_nll, grad_normaliser):
    return call("label_smoothed_nll_backward", grad_loss, grad_nll, *ctx.saved_tensors, *ctx.options), None, None, None


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
# Of native libraries only: the paths that a full pass on the device of `like` may take, and that of the last call.
_library.define("explain(Tensor like, str operator, bool backward, int channels, int heads, int kernel_size) -> str")
_library.define("last_path(Tensor like) -> str")

# (name, fake kernel, setup_context, backward pass)
OPERATORS: list[tuple[str, Callable[..., Any], Callable[..., Any] | None, Callable[..., Any]]] = [
    ("dropout", _fake_contiguous, _save_dropout, _dropout_backward),
    ("relu_dropout", _fake_contiguous, _save_relu, _relu_backward),
    ("relu_dropout_backward", _fake_contiguous, None, _no_second_order),
    ("label_smoothed_nll", _fake_loss, _save_loss, _loss_backward),
    ("label_smoothed_nll_backward", _fake_loss_backward, None, _no_second_order),
]
# The first tensors of an operator have gradients from its backward operator; then there may be a bias.
for _name, _kernel, _outputs, _gradients, _bias in (
    ("lightconv", _fake, 1, 2, True),
    ("dynamicconv", _fake, 1, 2, True),
    ("talkconv", _fake_talk, 1, 3, False),
    ("lightconv_step", _fake_step, 2, 3, True),
    ("dynamicconv_step", _fake_step, 2, 3, True),
    ("talkconv_step", _fake_talk_step, 2, 3, False),
    ("dropout_add_norm", _fake_contiguous, 1, 4, False),
):
    _save, _backward = _save_of(_name, _outputs, _gradients, _bias), _backward_of(_name, _gradients, _bias)
    OPERATORS += [
        (_name, _kernel, _save, _backward),
        (_name + "_backward", _fake_backward_of(_outputs, _gradients), None, _no_second_order),
    ]
# Without gradients; the functions of decoding.py refuse them.
_DECODING: list[tuple[str, Callable[..., Any]]] = [("ring_step", _fake_contiguous), ("best_words", _fake_best)]
for _operator, _fake_kernel in [*_DECODING, *(_entry[:2] for _entry in OPERATORS)]:
    _library.impl(_operator, _native_or_reference(_operator), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lightconv::{_operator}", _fake_kernel, lib=_library)
for _operator, _, _setup, _gradient in OPERATORS:
    torch.library.register_autograd(f"lightconv::{_operator}", _gradient, setup_context=_setup, lib=_library)
    transforms.register(_operator, _setup, _gradient)
