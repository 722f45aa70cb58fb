"""The candidates: our operators, our reference, and other ways to compute the same numbers or serve the same purpose.

Every candidate gets its inputs in its preferred form beforehand: its own layout and type, with filters already
predicted and in its own order of taps. Conversions that it makes itself are part of its time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.report import BenchmarkError
from benchmarks.shapes import Case
from lightconv_plugin import ops
from lightconv_plugin.ops import reference
from lightconv_plugin.quiet import quietly

OURS, REFERENCE = "ours", "our reference"
_ATTENTION_HEAD = 64
_ATTENTION_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class Candidate:
    """A prepared differentiable call.

    run: the forward pass, in (T,B,C) or another layout; inputs: its leaves; grad: the gradient of its output.
    to_tbc: converts the output to (T,B,C), where it must equal the others'; None if it computes something else.
    """

    name: str
    run: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    grad: Tensor
    to_tbc: Callable[[Tensor], Tensor] | None

    def forward(self) -> None:
        with torch.no_grad():
            self.run()

    def both(self) -> None:
        torch.autograd.grad(self.run(), self.inputs, self.grad)

    def backward(self) -> Callable[[], None]:
        """Run the forward pass; returns a function for only the backward pass."""
        out = self.run()
        return lambda: torch.autograd.grad(out, self.inputs, self.grad, retain_graph=True)


@dataclass
class Arguments:
    """The tensors of a case: x (T,B,C or 2C), weight (H,K) or (T,B,H,K), grad (T,B,C); in the case's memory layout.

    talkconv has one or two offsets (T,B,H) instead of a weight.
    """

    operator: str
    case: Case
    x: Tensor
    weight: Tensor | None
    grad: Tensor
    offsets: tuple[Tensor, ...] = ()

    @property
    def options(self) -> dict:
        return {"normalize": self.case.normalize, "dropout": self.case.dropout, "glu": self.case.glu}

    @property
    def dynamic(self) -> bool:
        return self.operator == "dynamicconv"

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The operator's other inputs with gradients."""
        return self.offsets if self.weight is None else (self.weight,)

    def normalized(self, weight: Tensor) -> Tensor:
        """The filters for a peer that takes them after normalisation and dropout."""
        if self.case.normalize == "softmax":
            weight = weight.softmax(-1)
        return F.dropout(weight, self.case.dropout) if self.case.dropout else weight


def arguments(operator: str, case: Case, device: torch.device, dtype: torch.dtype) -> Arguments:
    """Random tensors, the same in every run."""
    generator = torch.Generator(device).manual_seed(20190429)

    def normal(*shape: int) -> Tensor:
        if case.batch_first and len(shape) > 2:
            return normal_(shape[1], shape[0], *shape[2:]).transpose(0, 1)
        return normal_(*shape)

    def normal_(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    steps, batch, channels = case.steps, case.batch, case.channels
    x = normal(steps, batch, channels * (2 if case.glu else 1))
    if operator == "talkconv":
        offsets = tuple(normal(steps, batch, case.heads).sigmoid() for _ in range(2 if case.reach[1] else 1))
        return Arguments(operator, case, x, None, normal(steps, batch, channels), offsets)
    weight = normal(*(steps, batch) * (operator == "dynamicconv"), case.heads, case.kernel_size)
    return Arguments(operator, case, x, weight, normal(steps, batch, channels))


def as_it_is(out: Tensor) -> Tensor:
    """`to_tbc` for an output that already is (T,B,C)."""
    return out


def leaf(tensor: Tensor) -> Tensor:
    """A contiguous copy that requires a gradient."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_()


# ------------------------------------------------------------------------------------------------ ours


def ours(a: Arguments) -> Candidate:
    inputs = tuple(tensor.detach().requires_grad_() for tensor in (a.x, *a.parameters))
    operator = getattr(ops, a.operator)
    if a.operator == "talkconv":
        x, left, right = (*inputs, None)[:3]
        return Candidate(OURS, lambda: operator(x, left, right, *a.case.reach), inputs, a.grad, as_it_is)
    return Candidate(OURS, lambda: operator(*inputs, a.case.padding_l, **a.options), inputs, a.grad, as_it_is)


class _Reference(torch.autograd.Function):
    """The reference under autograd, even if native kernels are registered.

    `middle`: the forward pass's arguments between the tensors with gradients and the options.
    """

    @staticmethod
    def forward(ctx, name, middle, options, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.name, ctx.options = name, options
        return getattr(reference, name)(*tensors, *middle, *options)

    @staticmethod
    def backward(ctx, grad):
        needs = [True] * len(ctx.saved_tensors)
        backward = getattr(reference, ctx.name + "_backward")
        if ctx.name != "talkconv":
            return None, None, None, *backward(grad, *ctx.saved_tensors, *ctx.options, *needs)
        x, left, right = (*ctx.saved_tensors, None)[:3]
        gradients = backward(grad, x, left, right, *ctx.options, True, True, True)
        return None, None, None, *gradients[: len(needs)]


def our_reference(a: Arguments) -> Candidate:
    inputs, case = tuple(tensor.detach().requires_grad_() for tensor in (a.x, *a.parameters)), a.case
    flags = (False, case.glu) if a.dynamic else (case.glu,)

    def run() -> Tensor:
        seed = torch.randint(2**63 - 1, (1,), device=a.x.device) if case.dropout else None
        options = (None, None, seed, case.padding_l, case.normalize, case.dropout, *flags)
        return _Reference.apply(a.operator, (None,), options, *inputs)

    def run_talk() -> Tensor:
        return _Reference.apply(a.operator, (None,) * (3 - len(inputs)), (None, None, *case.reach), *inputs)

    return Candidate(REFERENCE, run_talk if a.operator == "talkconv" else run, inputs, a.grad, as_it_is)


# ------------------------------------------------------------------------------------------------ torch


def depthwise(a: Arguments) -> Iterator[Candidate]:
    """torch's own convolution, with x in its layout (B, C, T); only for lightconv, whose fixed filters it supports."""
    case = a.case
    if a.operator != "lightconv":
        return
    x, weight = leaf(a.x.permute(1, 2, 0)), leaf(a.weight)
    right = case.kernel_size - 1 - case.padding_l

    def run() -> Tensor:
        inputs = F.glu(x, 1) if case.glu else x
        taps = a.normalized(weight).repeat_interleave(case.channels // case.heads, 0).unsqueeze(1)
        if case.padding_l == right:
            return F.conv1d(inputs, taps, padding=right, groups=case.channels)
        return F.conv1d(F.pad(inputs, (case.padding_l, right)), taps, groups=case.channels)

    grad = a.grad.permute(1, 2, 0).contiguous()
    yield Candidate("conv1d depthwise", run, (x, weight), grad, lambda out: out.permute(2, 0, 1))


def prefix_sums(a: Arguments) -> Iterator[Candidate]:
    """talkconv as in its paper, in plain PyTorch: differences of prefix sums over the whole sequence."""
    if a.operator != "talkconv":
        return
    case = a.case
    inputs = x, *offsets = tuple(leaf(tensor) for tensor in (a.x, *a.offsets))
    dtype = torch.promote_types(x.dtype, torch.float32)
    steps, per_head = torch.arange(case.steps, device=x.device).view(-1, 1, 1), case.channels // case.heads

    def at(sums: Tensor, position: Tensor) -> Tensor:
        """The sum up to a position, interpolated between two rows."""
        low = position.detach().floor()
        part = (position - low).unsqueeze(-1)

        def rows(index: Tensor) -> Tensor:
            return sums.gather(0, index.long().unsqueeze(-1).expand(-1, -1, -1, per_head))

        return (1 - part) * rows(low) + part * rows((low + 1).clamp(max=case.steps))

    def run() -> Tensor:
        sums = F.pad((x.to(dtype) / case.kernel_size).cumsum(0), (0, 0, 0, 0, 1, 0)).unflatten(-1, (case.heads, -1))
        ends = [
            steps + direction * offset.to(dtype) * most
            for direction, offset, most in zip((-1, 1), offsets, case.reach, strict=False)
        ]
        first = ends[0].clamp(min=0)
        last = ends[1].clamp(max=case.steps - 1) if len(ends) > 1 else steps.expand_as(first).to(dtype)
        return (at(sums, last + 1) - at(sums, first)).flatten(-2).to(x.dtype)

    yield Candidate("prefix sums", run, inputs, a.grad.contiguous(), as_it_is)


def attention(a: Arguments) -> Iterator[Candidate]:
    """torch's scaled_dot_product_attention over the same (B, T, C), with heads of 64; on a GPU in half types, flash."""
    case = a.case
    if case.glu or case.channels % _ATTENTION_HEAD:
        return
    heads = case.channels // _ATTENTION_HEAD

    def split(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).unflatten(-1, (heads, _ATTENTION_HEAD)).transpose(1, 2).contiguous()

    query, key, value = (leaf(split(a.x)) for _ in range(3))
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    kernels = _ATTENTION_KERNELS[:1] if flash else _ATTENTION_KERNELS

    def run() -> Tensor:
        with sdpa_kernel(kernels):
            return F.scaled_dot_product_attention(query, key, value, dropout_p=case.dropout, is_causal=case.causal)

    name = "attention (flash)" if flash else "attention"
    yield Candidate(name, run, (query, key, value), split(a.grad), None)


# ------------------------------------------------------------------------------------------------ fairseq's modules


def import_fairseq() -> ModuleType | None:
    """fairseq; None if it is not installed."""
    with quietly():
        try:
            return importlib.import_module("fairseq")
        except ModuleNotFoundError as error:
            if error.name != "fairseq":
                raise BenchmarkError(f"fairseq is installed and cannot be imported: {error}") from error
            return None


class _Given(nn.Module):
    """Replaces the part of a module that predicts filters: returns given filters."""

    def __init__(self, filters: Tensor) -> None:
        super().__init__()
        self.filters, self.out_features = filters, filters.shape[2] * filters.shape[3]

    def forward(self, query: Tensor) -> Tensor:
        return self.filters


def fairseq_modules(a: Arguments) -> Iterator[Candidate]:
    """fairseq's two implementations in Python: a T×T band matrix, and unfolding (used by its dynamic models)."""
    if a.weight is None or a.case.normalize not in ("softmax", "none") or import_fairseq() is None:
        return
    from fairseq.modules.dynamic_convolution import DynamicConv1dTBC
    from fairseq.modules.lightweight_convolution import LightweightConv1dTBC

    case = a.case
    for path, unfold in (("band", False), ("unfold", True)):
        x, weight = leaf(a.x), leaf(a.weight)
        options = {
            "kernel_size": case.kernel_size,
            "padding_l": case.padding_l,
            "num_heads": case.heads,
            "weight_dropout": case.dropout,
            "weight_softmax": case.normalize == "softmax",
        }
        module = (DynamicConv1dTBC if a.dynamic else LightweightConv1dTBC)(case.channels, **options)
        if a.dynamic:
            module.weight_linear = _Given(weight)
        else:
            del module.weight
            module.weight = weight

        def run(module=module, x=x, unfold=unfold) -> Tensor:
            return module(F.glu(x, -1) if case.glu else x, unfold=unfold)

        grad = a.grad.contiguous()
        yield Candidate(f"fairseq {path}", run, (x, weight), grad, as_it_is)
