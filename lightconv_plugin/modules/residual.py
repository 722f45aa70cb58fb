"""What follows a sublayer of a post-norm layer: dropout, the residual connection and the layer norm, at once."""

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every

from lightconv_plugin import ops
from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.modules.eager import eager
from lightconv_plugin.ops import backends

_MOST_CHANNELS = 4096  # of the CUDA kernel


def dropped_added_normed(x: Tensor, residual: Tensor, norm: nn.LayerNorm, dropout: Dropout) -> Tensor | None:
    """norm(residual + dropout(x)) by one native operator, for tensors (…,d) in training; None where there is none.

    It does not depend on whether gradients are recorded: activation checkpointing runs a layer with and without, and
    must meet the same masks.
    """
    usable = dropout.training and dropout.p < 1 and _one_operator(x, residual, norm)
    return ops.dropout_add_layer_norm(x, residual, norm.weight, norm.bias, dropout.rate, norm.eps) if usable else None


def unchanged(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module does what `kind` does and nothing else, so that something else may do it."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    shared = (
        every._global_forward_hooks,
        every._global_forward_pre_hooks,
        every._global_backward_hooks,
        every._global_backward_pre_hooks,
    )
    hooked = any(own) or any(shared)
    return type(module) is kind and not hooked and "forward" not in module.__dict__  # torch 2.6 traces no vars()


def native(x: Tensor) -> bool:
    """Whether x's device has native operators that may be used here and now; not under autocast, which decides what is
    computed in which type."""
    device = x.device.type
    if device == "meta":  # stands in for a GPU
        return eager(x)
    if device not in ("cpu", "cuda") or torch.is_autocast_enabled(device) or not eager(x):
        return False
    return backends.backend(device) == device


def _one_operator(x: Tensor, residual: Tensor, norm: nn.LayerNorm) -> bool:
    if norm.weight is None or norm.bias is None or not (x.dtype == residual.dtype == norm.weight.dtype):
        return False
    if x.shape != residual.shape or not native(x) or not eager(residual):
        return False
    return x.device.type == "cpu" or (x.dtype != torch.float64 and x.shape[-1] <= _MOST_CHANNELS)
