"""Patches for fairseq with later versions of numpy."""

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightconv_plugin.compat.registry import patch


@patch(versions="numpy 2 and later", needed=lambda: not hasattr(np, "compat"))
def numpy_compat() -> None:
    """numpy 2 has no `numpy.compat`, whose `long` fairseq uses (language models by sentence, batch buckets)."""
    np.compat = types.SimpleNamespace(long=int)  # type: ignore[attr-defined]


@patch(
    versions="numpy 2.4 and later",
    needed=lambda: "interpolation" not in inspect.signature(np.percentile).parameters,
)
def batch_buckets() -> None:
    """numpy 2.4 has removed percentile's argument `interpolation`, which --num-batch-buckets uses."""
    from fairseq.data import data_utils

    original = data_utils.get_buckets

    def get_buckets(sizes: np.ndarray, num_buckets: int) -> np.ndarray:
        bounds = np.percentile(sizes, np.linspace(0, 100, num_buckets + 1), method="lower")
        return np.unique(bounds[1:])

    for module in _modules_binding("get_buckets", original):
        module.get_buckets = get_buckets


@patch(versions="numpy 1.24 and later", needed=lambda: not hasattr(np, "float"))
def numpy_float() -> None:
    """numpy 1.24 has no `numpy.float`, which the training of fairseq's nacrf_transformer uses."""
    from fairseq.modules import dynamic_crf_layer

    dynamic_crf_layer.np = types.SimpleNamespace(float=float)


def _modules_binding(name: str, value: Any) -> Iterator[Any]:
    """fairseq's loaded modules in which `name` is `value`: `from … import …` copies a function's binding."""
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in {"fairseq", "fairseq_cli"} and vars(module).get(name) is value:
            yield module
