"""Patches for fairseq's optimizer, which runs one kernel per parameter and operation: on a GPU this takes most of a
step's time, and on a CPU the memory is read and written several times. The last one is for --amp.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightconv_plugin.compat.registry import patch
from lightconv_plugin.ops.backends import on_gpu


@patch(versions="all versions of fairseq")
def adam_launches() -> None:
    """fairseq's Adam launches seven or eight kernels per parameter, which takes a GPU's host longer than the model.

    torch's fused kernels update all parameters at once, each element being read and written once: on a CPU this takes a
    third of the time or less. torch adds eps to the square root after the correction of its bias, fairseq before it:
    eps / √(1 − β₂ᵗ) gives fairseq's formula, with other roundings. Half-precision parameters, AMSGrad, and parameters
    or gradients that are not contiguous, whose elements torch's kernels mix up on a CPU, use fairseq's own loop.
    """
    from fairseq.optim.adam import Adam

    original = Adam.step

    @functools.wraps(original)
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        if not all(_plain(group, parameters) for group, parameters in groups):
            original(self)
            return loss
        for group, parameters in groups:
            fused_adam(group, parameters, [_state(self.state[p], p) for p in parameters])
        return loss

    Adam.step = step


def _plain(group: dict, parameters: list[Tensor]) -> bool:
    return not group.get("amsgrad") and all(
        (p.is_cpu or on_gpu(p))
        and p.dtype == p.grad.dtype == torch.float32
        and not p.grad.is_sparse
        and p.is_contiguous()
        and p.grad.is_contiguous()
        for p in parameters
        if p.grad is not None
    )


def _state(state: dict, parameter: Tensor) -> dict:
    """The contiguous parameter's state, created as in fairseq's Adam, on the parameter's device."""
    if not state:
        state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    shape, device, dtype = parameter.shape, parameter.device, parameter.dtype
    for name in ("exp_avg", "exp_avg_sq"):
        known = state[name]
        if known.shape != shape:  # torch's kernels would write beyond it
            shapes = f"{tuple(known.shape)} must match the size of its parameter, {tuple(shape)}"
            raise RuntimeError(f"Adam's {name} of shape {shapes}")
        if known.device != device or known.dtype != dtype or not known.is_contiguous():
            state[name] = known.to(parameter).contiguous()
    return state


@torch.no_grad()
def fused_adam(group: dict, parameters: list[Tensor], states: list[dict]) -> None:
    """One step of fairseq's Adam for float32 parameters with gradients, in place; `states` are Adam's, one for each."""
    for state in states:
        state["step"] += 1
    alike: dict[Any, list[tuple[Tensor, dict]]] = {}
    for parameter, state in zip(parameters, states, strict=True):
        alike.setdefault((parameter.device, state["step"]), []).append((parameter, state))
    beta1, beta2 = group["betas"]
    for (device, number), pairs in alike.items():
        some, their_states = zip(*pairs, strict=True)
        torch._fused_adamw_(
            list(some),
            [p.grad for p in some],
            [state["exp_avg"] for state in their_states],
            [state["exp_avg_sq"] for state in their_states],
            [],
            [torch.full((), float(number), device=device)] * len(some),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"] / math.sqrt(1 - beta2**number),
            amsgrad=False,
            maximize=False,
        )


def _norms_are_taken_one_by_one() -> bool:
    from fairseq import utils

    return not utils.multi_tensor_l2norm_available


@patch(versions="all versions of fairseq, without NVIDIA's apex", needed=_norms_are_taken_one_by_one)
def gradient_norm_launches() -> None:
    """fairseq computes the norm of each parameter's gradient separately if NVIDIA's apex is not installed."""
    from fairseq import utils

    def multi_tensor_total_norm(grads: list[Tensor], chunk_size: int = 0) -> Tensor:
        norms: list[Tensor] = []
        for _, some in itertools.groupby(grads, lambda grad: grad.device):
            norms += torch._foreach_norm(list(some), 2, dtype=torch.float32)
        return torch.norm(torch.stack([norm.to(norms[0].device) for norm in norms]))

    utils.multi_tensor_total_norm = multi_tensor_total_norm
    utils.multi_tensor_l2norm_available = True


def _gradients_are_clipped_one_by_one() -> bool:
    from fairseq import utils

    return "_foreach_mul_" not in utils.clip_grad_norm_.__code__.co_names


@patch(versions="fairseq 0.12.2", needed=_gradients_are_clipped_one_by_one)
def gradient_clipping_launches() -> None:
    """fairseq scales each parameter's gradient separately with --clip-norm."""
    from fairseq import utils

    original = utils.clip_grad_norm_

    def clip_grad_norm_(
        params: Tensor | Iterable[Tensor], max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        params = [params] if isinstance(params, Tensor) else list(params)
        total_norm = original(params, 0.0, aggregate_norm_fn)
        gradients = [p.grad.detach() for p in params if p is not None and p.grad is not None]
        if max_norm > 0 and gradients:
            torch._foreach_mul_(gradients, (float(max_norm) / (total_norm + 1e-6)).clamp_(max=1))
        return total_norm

    utils.clip_grad_norm_ = clip_grad_norm_


@patch(versions="all versions of fairseq")
def half_precision_launches() -> None:
    """With --fp16 or --bf16 fairseq copies each gradient and parameter, and clears each gradient, separately."""
    from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin as Mixin

    def gradients_to_float32(self: Any) -> None:
        if not self._needs_sync:
            return
        pairs = [
            (half, full) for half, full in zip(self.fp16_params, _gradients(self), strict=True) if half.requires_grad
        ]
        copied = [(half.grad, full) for half, full in pairs if half.grad is not None]
        _copy([full for _, full in copied], [gradient for gradient, _ in copied])
        # As in fairseq: a parameter that was not used has a gradient of zeros.
        _clear([full for half, full in pairs if half.grad is None])
        self._needs_sync = False

    def parameters_to_half(self: Any) -> None:
        pairs = [pair for pair in zip(self.fp16_params, as_parameters(self), strict=True) if pair[0].requires_grad]
        _copy([half.data for half, _ in pairs], [full for _, full in pairs])

    def zero_grad(self: Any) -> None:
        for half in self.fp16_params:
            half.grad = None
        kept = self.fp32_params.values() if self.has_flat_params else self.fp32_params
        _clear([full.grad for full in kept if full.grad is not None])
        self._needs_sync = False
        if self.scaler is not None:
            self._multiply_factor = 1.0 / float(self.scaler.loss_scale)

    Mixin._sync_fp16_grads_to_fp32 = gradients_to_float32
    Mixin._sync_fp32_params_to_fp16 = parameters_to_half
    Mixin.zero_grad = zero_grad


def _gradients(optimizer: Any) -> list[Tensor]:
    """The float32 tensors that receive the parameters' gradients."""
    if not optimizer.has_flat_params:
        for full in optimizer.fp32_params:
            if full.grad is None:
                full.grad = torch.zeros_like(full)
    return as_parameters(optimizer, lambda tensor: tensor.grad)


def as_parameters(optimizer: Any, of: Callable[[Tensor], Any] = lambda tensor: tensor.data) -> list[Tensor]:
    """`of` applied to the float32 copies, one tensor per parameter, whether or not fairseq stores them flat."""
    if not optimizer.has_flat_params:
        return [of(full) for full in optimizer.fp32_params]
    pieces = {}
    for device, flat in optimizer.fp32_params.items():
        sizes = [half.numel() for half in optimizer.fp16_params if half.device.index == device]
        pieces[device] = iter(of(flat).split(sizes))
    return [next(pieces[half.device.index]).view(half.shape) for half in optimizer.fp16_params]


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)


def _clear(tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(tensors)


@patch(versions="all versions of fairseq")
def amp_scales_once() -> None:
    """With --amp on a GPU fairseq divides gradients by the loss scale twice, so that updates are too small, or vanish.

    GradScaler notes which optimizers have unscaled gradients: clip_grad_norm names torch's optimizer, and step names
    fairseq's wrapper of it, so the same gradients are divided again. fairseq also reads the value of --amp-init-scale
    where --amp-scale-window is given.
    """
    from fairseq.optim.amp_optimizer import AMPOptimizer

    original = AMPOptimizer.__init__

    @functools.wraps(original)
    def __init__(self: Any, cfg: Any, *args: Any, **kwargs: Any) -> None:
        original(self, cfg, *args, **kwargs)
        window = getattr(cfg.common, "amp_scale_window", None)
        if window is not None:
            self.scaler.set_growth_interval(window)

    def step(self: Any) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    AMPOptimizer.__init__, AMPOptimizer.step = __init__, step
