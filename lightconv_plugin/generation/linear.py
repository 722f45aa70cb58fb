"""Linear layers for inference: the weight is packed once, in the arithmetic that was asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = ("float32", "bfloat16", "int8")
# Below these sizes (weights, weights × rows) oneDNN's overhead is larger than the product.
_SMALL, _SMALL_PRODUCT = 2**16, 2**20
_SMALLEST = 2**14


def check_dtype(dtype: str) -> str:
    """`dtype` itself; ValueError unless it is one of DTYPES."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


def round_rows(rows: int, device: torch.device) -> int:
    """The number of rows to compute where `rows` are needed: at least as many.

    oneDNN compiles a kernel for each new shape, which takes as long as several products. On the CPU, rows are therefore
    padded to one of eight sizes per octave (16, 18, 20 … 32, 36 …): few shapes, and at most an eighth is wasted.
    """
    if device.type != "cpu" or rows <= 16:
        return rows
    unit = 1 << ((rows - 1).bit_length() - 4)
    return -(-rows // unit) * unit


class PackedLinear:
    """y = x · weightᵀ + bias, without gradients.

    On the CPU, oneDNN computes it from a copy of the weight in its own layout. That includes float32, where torch's own
    product (MKL) rearranges the weight in every call and runs at half the speed on AMD processors. Small weights are
    left as they are: compiling a kernel for each number of rows would take longer than it saves.

    Args:
        weight: (outputs, inputs), floating.
        bias: (outputs,) or None.
        dtype: the arithmetic of the product.
            "float32": that of the weight as it is (so also float64, or the half precision of a model on a GPU).
            "bfloat16": weight and input are rounded to bfloat16, sums are float32.
            "int8": 8-bit weights, each output channel with its own scale, and 8-bit inputs, each row with its own;
                sums are exact. CPU only.

    Raises:
        ValueError: an unknown dtype, "int8" on another device than a CPU that has kernels for it, or "bfloat16" on a
            CPU for which oneDNN has none.
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
    # torch.compile packs weights with this; torch has no public way to keep a weight packed for oneDNN.
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    except RuntimeError as error:
        if weight.dtype != torch.bfloat16 or "bf16 path needs" not in str(error):
            raise
        raise ValueError('dtype "bfloat16" needs a CPU with AVX-512: use "float32" or "int8"') from error
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
        warnings.simplefilter("ignore")  # that torch will remove its quantised tensors
        quantized = torch.quantize_per_channel(weight, scales, zeros, axis=0, dtype=torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantized, None)
    # Without VNNI, pairs of products are summed in 16 bits, which overflows unless inputs are limited to 7 bits.
    reduce_range = not torch.cpu._is_vnni_supported()
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias.float()
    smallest = torch.finfo(torch.float32).tiny

    def product(x: Tensor) -> Tensor:
        # torch uses one scale for the whole batch, so rows are first brought to the same magnitude.
        rows = x.float()
        sizes = rows.abs().amax(dim=1, keepdim=True).clamp_min_(smallest)
        y = torch.ops.quantized.linear_dynamic(rows / sizes, packed, reduce_range)
        return torch.addcmul(bias, y, sizes).to(x.dtype)

    return product
