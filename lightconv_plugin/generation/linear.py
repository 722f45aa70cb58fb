"""Linear layers for inference: the weight is packed once, in the arithmetic that was asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = ("float32", "bfloat16", "int8")
# Up to so many weights, and weights times rows, what oneDNN does before it begins takes longer than the product.
_SMALL, _SMALL_PRODUCT = 2**16, 2**20
_SMALLEST = 2**14


def check_dtype(dtype: str) -> str:
    """`dtype` itself; ValueError unless it is one of DTYPES."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


def round_rows(rows: int, device: torch.device) -> int:
    """The number of rows, at least this, that products should be given.

    oneDNN compiles a kernel for each new shape, which takes as long as several products. So on the CPU rows are filled
    up to one of eight numbers in each octave (16, 18, 20 … 32, 36 …): few shapes, and at most an eighth in vain.
    """
    if device.type != "cpu" or rows <= 16:
        return rows
    unit = 1 << ((rows - 1).bit_length() - 4)
    return -(-rows // unit) * unit


class PackedLinear:
    """y = x · weightᵀ + bias, without gradients.

    On the CPU oneDNN computes it from a copy of the weight in its own layout: also in float32, where torch's own
    product (MKL) would lay it out anew in every call, and reaches half of the speed on AMD processors. Small weights
    stay as they are: there the compilation of a kernel for each number of rows would take longer than it saves.

    Args:
        weight: (outputs, inputs), floating.
        bias: (outputs,) or None.
        dtype: the arithmetic of the product.
            "float32": that of the weight as it is (so also float64, or the half precision of a model on a GPU).
            "bfloat16": weight and input are rounded to bfloat16, sums are float32.
            "int8": 8-bit weights, each output channel with its own scale, and 8-bit inputs, each row with its own;
                sums are exact. CPU only.

    Raises:
        ValueError: an unknown dtype, or "int8" on another device than a CPU that has kernels for it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: str = "float32"):
        self.outputs, self.inputs = weight.shape
        self.dtype = check_dtype(dtype)
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        if dtype == "bfloat16":
            product = _product(weight.to(torch.bfloat16), None if bias is None else bias.to(torch.bfloat16))
            self._compute = lambda x: product(x.to(torch.bfloat16)).to(x.dtype)
        elif dtype == "int8":
            self._compute = _int8_product(weight, bias)
        else:
            self._compute = _product(weight, bias)

    @classmethod
    def of(cls, *linears: nn.Linear, dtype: str = "float32") -> PackedLinear:
        """One product for several layers with the same input: their outputs side by side."""
        if len(linears) == 1:
            return cls(linears[0].weight, linears[0].bias, dtype)
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.cat(
                [
                    linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
                    for linear in linears
                ]
            )
        return cls(torch.cat([linear.weight for linear in linears]), bias, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) → (rows, outputs), a new tensor in x's dtype."""
        return self._compute(x)


def _product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """F.linear with this weight, in its own precision."""
    packs = weight.device.type == "cpu" and torch.backends.mkldnn.is_available() and weight.numel() >= _SMALLEST
    if not packs or weight.dtype not in (torch.float32, torch.bfloat16):
        return lambda x: F.linear(x, weight, bias)
    # What torch.compile packs its weights with; oneDNN has no public entrance in torch that keeps a packed weight.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    product = torch.ops.mkldnn._linear_pointwise.default
    if weight.numel() > _SMALL:
        return lambda x: product(x, packed, bias, "none", [], "")
    few = _SMALL_PRODUCT // weight.numel()
    return lambda x: F.linear(x, weight, bias) if x.shape[0] < few else product(x, packed, bias, "none", [], "")


def _int8_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    engine = torch.backends.quantized.engine
    if weight.device.type != "cpu" or engine == "none":
        raise ValueError(f'dtype "int8" needs a CPU and a quantised engine, got {weight.device}, {engine!r}')
    weight = weight.float()
    # Symmetric, each channel's largest weight ↦ 127; a channel of zeros may have any scale.
    scales = (weight.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny).double()
    zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces for years that its quantised tensors will go
        quantized = torch.quantize_per_channel(weight, scales, zeros, axis=0, dtype=torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantized, None)
    # Without VNNI two products of 16 bits are added in 16 bits, which overflows unless inputs have 7 bits only.
    reduce_range = not torch.cpu._is_vnni_supported()
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias.float()
    smallest = torch.finfo(torch.float32).tiny

    def product(x: Tensor) -> Tensor:
        # torch has one scale for all rows, that of the largest number of the batch: rows are brought to one size first.
        rows = x.float()
        sizes = rows.abs().amax(dim=1, keepdim=True).clamp_min_(smallest)
        y = torch.ops.quantized.linear_dynamic(rows / sizes, packed, reduce_range)
        return torch.addcmul(bias, y, sizes).to(x.dtype)

    return product
