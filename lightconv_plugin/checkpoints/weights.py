"""The parameters of a plain model in a safetensors file: in one floating type, or with 8-bit matrices."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightconv_plugin.checkpoints.untrusted import shown
from lightconv_plugin.errors import InputError
from lightconv_plugin.modules import EncoderDecoder, LanguageModel

PlainModel = EncoderDecoder | LanguageModel
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = (*DTYPES, "int8")
_SMALLEST = 2**14  # weights that a matrix must have for 8 bits to be worth it
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8"}  # safetensors' names
_SCALE = "_scale"


class Int8(NamedTuple):
    """A matrix (O,I), `weight`·`scale`: weight int8 in −127 … 127, scale float32 (O,), one per output."""

    weight: Tensor
    scale: Tensor

    def dequantise(self) -> Tensor:
        """(O,I) float32."""
        return self.weight.float() * self.scale.unsqueeze(1)


class Kind(NamedTuple):
    """Shape and type of a tensor; the type under its safetensors name, such as "F32"."""

    shape: tuple[int, ...]
    code: str


def read_kinds(path: Path) -> dict[str, Kind]:
    """Shape and type of each tensor in a file, without reading the tensors.

    Raises:
        InputError: the file is not a safetensors file, or is damaged.
    """
    with _opened(path) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        return {name: Kind(tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


def quantised_names(model: PlainModel) -> set[str]:
    """The parameters that are 8-bit in a file of type "int8".

    These are the matrices of linear layers and the word embeddings (which may also be the output matrix) with at least
    16,384 weights. All others would save little, and filters and norms are sensitive to rounding.
    """
    names = set()
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and module.weight.numel() >= _SMALLEST:
            names.add(f"{prefix}.weight")
    return names


def quantise(weight: Tensor) -> Int8:
    """A matrix (O,I) in 8 bits: symmetric, the largest weight of each row becomes ±127."""
    weight = weight.detach().float()
    scale = weight.abs().amax(dim=1) / 127
    # A row of zeros, such as the pad's, can have any scale, and so can one whose weights are too small to divide.
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
    return Int8((weight / scale.unsqueeze(1)).round().to(torch.int8), scale)


def tensors_of(model: PlainModel, weights: str) -> dict[str, Tensor]:
    """The parameters as stored in a file of type `weights`, each once, under the model's names.

    Raises:
        InputError: the type is unknown or cannot represent a value.
    """
    if weights not in WEIGHTS:
        raise InputError(f"`dtype` must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    small = quantised_names(model) if weights == "int8" else set()
    dtype = DTYPES.get(weights, torch.float32)
    found = {}
    for name, parameter in model.named_parameters():
        given = parameter.detach().cpu()
        if not _is_finite(given):
            raise InputError(f"{name} has NaN or infinite values: this model cannot be exported")
        tensor = given.to(dtype).contiguous()
        if not _is_finite(tensor):
            largest = float(given.abs().max())
            raise InputError(f"`dtype` {weights}: {name} has values up to {largest:g}, beyond {torch.finfo(dtype).max}")
        if name in small:
            found[name], found[name + _SCALE] = quantise(tensor)
        else:
            found[name] = tensor
    return found


def write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. OSError with `path` if that fails.

    The library renames a new file to `path`, so `path` must not be a device.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        if found := re.search(r"os error (\d+)", str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


@dataclass(frozen=True)
class Weights:
    """A checked file of parameters: names, shapes and types are those of the model.

    kinds: of each tensor in the file.
    """

    path: Path
    kinds: Mapping[str, Kind]

    @classmethod
    def check(cls, path: Path, found: Mapping[str, Kind], model: PlainModel, weights: str) -> Weights:
        """Compare a file of type `weights` with a model, whose parameters need not be in memory.

        `found` comes from `read_kinds`.

        Raises:
            InputError: a tensor is missing or unknown, or has another shape or type.
        """
        wanted = _kinds(model, weights)
        for names, what in ((wanted.keys() - found.keys(), "lacks"), (found.keys() - wanted.keys(), "has unknown")):
            if names:
                some = ", ".join(map(shown, sorted(names)[:3]))
                raise InputError(f"{path} {what} tensors of the model in config.json: {some} ({len(names)} in all)")
        for name, kind in wanted.items():
            if found[name] != kind:
                raise InputError(
                    f"{path}: {name} has shape {[*found[name].shape]} and type {found[name].code}, config.json requires"
                    f" {[*kind.shape]} and {kind.code}"
                )
        return cls(path, wanted)

    def read(self) -> dict[str, Tensor | Int8]:
        """All parameters, memory-mapped: pages are read when they are used. 8-bit parameters stay 8-bit.

        Writing to a tensor changes it only in this process.

        Raises:
            InputError: the file has changed since it was checked, or has values that are not finite.
        """
        tensors: dict[str, Tensor] = {}
        with _opened(self.path) as file:
            for name, kind in self.kinds.items():
                tensors[name] = tensor = file.get_tensor(name)
                if Kind(tuple(tensor.shape), _CODES.get(str(tensor.dtype).removeprefix("torch."), "")) != kind:
                    raise InputError(f"{self.path} was changed while it was read")
                if tensor.is_floating_point() and not _is_finite(tensor):
                    raise InputError(f"{self.path}: {name} has NaN or infinite values")
        found: dict[str, Tensor | Int8] = {}
        for name, kind in self.kinds.items():
            if kind.code == "I8":
                found[name] = matrix = Int8(tensors[name], tensors.pop(name + _SCALE))
                if bool((matrix.scale <= 0).any()) or bool((matrix.weight == -128).any()):
                    raise InputError(f"{self.path}: {name} must be in -127 … 127, and {name}{_SCALE} positive")
            elif name in tensors:
                found[name] = tensors[name]
        return found


def _kinds(model: PlainModel, weights: str) -> dict[str, Kind]:
    """The tensors that a file of this type has for the model."""
    small = quantised_names(model) if weights == "int8" else set()
    code = _CODES[weights if weights in DTYPES else "float32"]
    wanted = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        wanted[name] = Kind(shape, "I8" if name in small else code)
        if name in small:
            wanted[name + _SCALE] = Kind(shape[:1], "F32")
    return wanted


@contextmanager
def _opened(path: Path) -> Iterator:
    """The memory-mapped file. InputError if it is not a safetensors file or is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a safetensors file, or is damaged: {shown(error)}") from error


def _is_finite(tensor: Tensor) -> bool:
    # A sum is one quick pass over the numbers. If it is not finite, it may just have overflowed.
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())
