"""The parameters of a plain model in a file of safetensors: in one floating type, or with 8-bit matrices."""

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
_SMALLEST = 2**14  # weights of a matrix from which on 8 bits are worth it
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8"}  # those of safetensors
_SCALE = "_scale"


class Int8(NamedTuple):
    """A matrix (O,I) of `weight`·`scale`: weight int8 in −127 … 127, scale float32 (O,), one for each output."""

    weight: Tensor
    scale: Tensor

    def dequantise(self) -> Tensor:
        """(O,I) float32."""
        return self.weight.float() * self.scale.unsqueeze(1)


class Kind(NamedTuple):
    """Shape and type of a tensor; the type as safetensors writes it, such as "F32"."""

    shape: tuple[int, ...]
    code: str


def read_kinds(path: Path) -> dict[str, Kind]:
    """Shape and type of each tensor of a file; no tensor is read.

    Raises:
        InputError: the file is not of safetensors, or damaged.
    """
    with _opened(path) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        return {name: Kind(tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


def quantised_names(model: PlainModel) -> set[str]:
    """The parameters that are 8-bit in a file of type "int8".

    These are the matrices of linear layers and the tables of word embeddings, which may be the output's matrix too, of
    at least 16,384 weights. All others would save little, and filters and norms are those where rounding is felt.
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
    # A row of zeros, such as a pad's, may have any scale; so has one whose weights are too small for a quotient.
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
    return Int8((weight / scale.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8), scale)


def tensors_of(model: PlainModel, weights: str) -> dict[str, Tensor]:
    """The parameters as a file of type `weights` has them, each once, under the model's names.

    Raises:
        InputError: an unknown type, or numbers that it cannot hold.
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
        if name in small:
            found[name], found[name + _SCALE] = quantise(given)
            continue
        found[name] = tensor = given.to(dtype).contiguous()
        if not _is_finite(tensor):
            largest = float(given.abs().max())
            raise InputError(f"`dtype` {weights}: {name} has values up to {largest:g}, beyond {torch.finfo(dtype).max}")
    return found


def write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file of safetensors. OSError with `path` where that fails.

    The library gives the file's name to a new one: `path` must not be a device.
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

    kinds: of each tensor of the file.
    """

    path: Path
    kinds: Mapping[str, Kind]

    @classmethod
    def check(cls, path: Path, found: Mapping[str, Kind], model: PlainModel, weights: str) -> Weights:
        """Compare a file of type `weights` with a model, whose parameters need not be in memory.

        `found` is of `read_kinds`.

        Raises:
            InputError: a tensor is missing, is not known, or has another shape or type.
        """
        wanted = _kinds(model, weights)
        for names, what in ((wanted.keys() - found.keys(), "lacks"), (found.keys() - wanted.keys(), "has unknown")):
            if names:
                some = ", ".join(map(shown, sorted(names)[:3]))
                raise InputError(f"{path} {what} tensors of the model in config.json: {some} ({len(names)} in all)")
        for name, kind in wanted.items():
            if found[name] != kind:
                raise InputError(
                    f"{path}: {name} has shape {[*found[name].shape]} and type {found[name].code}, config.json wants "
                    f"{[*kind.shape]} and {kind.code}"
                )
        return cls(path, wanted)

    def read(self) -> dict[str, Tensor | Int8]:
        """All parameters, mapped from the file: their pages are read when they are used. 8-bit ones stay 8-bit.

        Writing to a tensor changes it in this process alone.

        Raises:
            InputError: the file was changed since it was checked, or has numbers that are not finite.
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
    """What a file of this type has for the model."""
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
    """The file, mapped. InputError for one that is not of safetensors, or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a file of safetensors, or damaged: {shown(error)}") from error


def _is_finite(tensor: Tensor) -> bool:
    # A sum is one quick pass over the numbers; where it is not finite it may only have become too large.
    if tensor.dtype == torch.float64:
        return bool(torch.isfinite(tensor).all())
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())
