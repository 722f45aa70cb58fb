"""Which library multiplies float32 matrices faster on this CPU: the one that torch uses (MKL), or oneDNN.

torch computes float32 products with MKL, which on some processors runs at half the speed of oneDNN, the library that
torch uses for other types. The CPU's vendor and model do not tell which is faster, so one product is timed with both.
This takes a tenth of a second, once per machine. The answer is stored next to the compiled kernels, so that a training
resumed on the same machine computes as before.

LIGHTCONV_PRODUCTS: `torch` or `onednn` chooses one without a measurement; unset: the faster one.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightconv_plugin.errors import VariableError
from lightconv_plugin.files import atomic_write
from lightconv_plugin.ops import artifacts, instructions

CHOICES = ("torch", "onednn")
# How much faster oneDNN has to be: calling it costs more than calling torch's product.
_MARGIN = 1.1
_SIZE, _ROUNDS = 512, 9


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """With oneDNN: x (N,I), weight (O,I), bias (O,) → x @ weightᵀ + bias, (N,O), in float32; any strides."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@lru_cache(maxsize=1)
def onednn_is_faster() -> bool:
    """Whether float32 products on this CPU use oneDNN.

    Raises VariableError for an unknown value of LIGHTCONV_PRODUCTS.
    """
    chosen = os.environ.get("LIGHTCONV_PRODUCTS", "").strip().lower()
    if chosen and chosen not in CHOICES:
        raise VariableError(f"LIGHTCONV_PRODUCTS must be one of {', '.join(CHOICES)}, or unset, got {chosen!r}")
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    if chosen:
        return chosen == "onednn"
    # A torch without MKL uses another library, for example OpenBLAS, which is then measured instead.
    return _ratio() > _MARGIN


def _ratio() -> float:
    """The time of torch's product divided by that of oneDNN's, as measured now or before."""
    file, key = artifacts.cache_folder() / "lightconv_products.json", _machine()
    ratios: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError):
        ratios = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(ratios, dict) or not isinstance(ratios.get(key), (int, float)):
        ratios = {**(ratios if isinstance(ratios, dict) else {}), key: round(measured(), 3)}
        # If the cache cannot be written, every start takes a tenth of a second longer.
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as out:
                json.dump(ratios, out, indent=1)
    return ratios[key]


def _machine() -> str:
    """What the answer depends on."""
    return f"{instructions.cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def measured() -> float:
    """The time of torch's product divided by that of oneDNN's: the best of several alternating rounds.

    It does not depend on what is in force where this is called (autocast, fake tensors, a tracer, a default device or
    dtype): all of these belong to a thread or are given here.
    """
    with ThreadPoolExecutor(max_workers=1) as alone:
        return alone.submit(_measured).result()


def _measured() -> float:
    torch.get_num_threads()  # makes this thread use as many as the others
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    x, weight = torch.full((_SIZE, _SIZE), 0.5, **kind), torch.full((_SIZE, _SIZE), 0.25, **kind)
    calls: list[Callable[[], Tensor]] = [lambda: torch.nn.functional.linear(x, weight), lambda: product(x, weight)]
    best = [float("inf")] * 2
    for _ in range(_ROUNDS):
        for number, call in enumerate(calls):
            began = time.perf_counter()
            call()
            best[number] = min(best[number], time.perf_counter() - began)
    return best[0] / best[1]
