"""Checks the arguments of a Translator."""

from __future__ import annotations

import math
from numbers import Real

import torch

from lightconv_plugin.arguments import MOST
from lightconv_plugin.errors import TranslationError
from lightconv_plugin.generation import AUTO, CHOICES, DTYPES, GPU_DTYPES

_LEAST = {  # of the options that are whole numbers
    "beam": 1, "min_len": 0, "max_len_b": 0, "no_repeat_ngram_size": 0, "batch_tokens": 1, "batch_size": 1,
    "threads": 1, "window": 1,
}  # fmt: skip
_MOST = {"threads": 1024}  # the system takes minutes to refuse more; for the others, MOST


def check_device(device: str, dtype: str, cuda_graphs: bool | None) -> None:
    """Raise TranslationError unless the device is available and supports this type, and CUDA graphs if requested."""
    if dtype not in CHOICES:
        raise TranslationError(f"`dtype` must be one of {', '.join(CHOICES)}, got {dtype!r}")
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise TranslationError(f"`device` must be cpu, cuda or cuda:N, got {device!r}") from None
    if kind.type not in ("cpu", "cuda"):
        raise TranslationError(f"`device` must be cpu, cuda or cuda:N, got {device!r}")
    if cuda_graphs and kind.type != "cuda":
        raise TranslationError(f"`cuda_graphs` needs a GPU, such as `device` 'cuda': got `device` {device!r}")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise TranslationError(f"`device` {device!r} is not available: torch sees {torch.cuda.device_count()} GPUs")
    here, place, other = (GPU_DTYPES, "a GPU", "a CPU") if kind.type == "cuda" else (DTYPES, "a CPU", "a GPU")
    if dtype not in (AUTO, *here):
        raise TranslationError(f"`dtype` {dtype!r} runs on {other} only: on {place} use one of auto, {', '.join(here)}")


def check_numbers(**numbers: float | None) -> None:
    """Raise TranslationError for a number out of range; None is the models' own."""
    for name, number in numbers.items():
        if number is None:
            continue
        if name in _LEAST:
            if not isinstance(number, int) or isinstance(number, bool) or number < _LEAST[name]:
                raise TranslationError(f"`{name}` must be a whole number of at least {_LEAST[name]}, got {number!r}")
            if number > (most := _MOST.get(name, MOST)):
                raise TranslationError(f"`{name}` must be at most {most:,}, got {number!s:.40}")
            continue
        known = isinstance(number, Real) and math.isfinite(number)
        if name == "temperature":
            if not (known and number > 0):
                raise TranslationError(f"`temperature` must be positive, got {number!r}")
        elif not known or (name == "max_len_a" and number < 0):
            least = " of at least 0" if name == "max_len_a" else ""
            raise TranslationError(f"`{name}` must be a number{least}, got {number!r}")
