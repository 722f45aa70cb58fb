"""Dropout with the native operator on a CPU."""

import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin import ops
from lightconv_plugin.modules.eager import eager
from lightconv_plugin.ops import backends


class Dropout(nn.Module):
    """Dropout that can stay on at inference.

    On a CPU with native kernels the mask costs a fraction of torch's, which calls a generator for every element.
    Elsewhere, and where only torch's own operators are known (eager.py), torch's own dropout is used.

    Args:
        p: probability of dropping an element.
        module_name: the name that fairseq's --retain-dropout-modules selects it by.

    Attributes:
        apply_during_inference: drop in evaluation mode too.
    """

    def __init__(self, p: float, module_name: str | None = None):
        super().__init__()
        self.p = p
        self.module_name = module_name
        self.apply_during_inference = False

    @property
    def rate(self) -> float:
        """The current probability: 0 in evaluation mode, unless `apply_during_inference` is set."""
        return self.p if self.training or self.apply_during_inference else 0.0

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """x of any shape → x with elements dropped, if dropout is on; `inplace` allows x to be overwritten."""
        if not self.rate:
            return x
        if self.p < 1 and self._native(x):
            return ops.dropout(x, self.p)
        return F.dropout(x, p=self.p, training=True, inplace=inplace)

    @staticmethod
    def _native(x: Tensor) -> bool:
        return x.device.type == "cpu" and eager(x) and backends.backend("cpu") == "cpu"

    def extra_repr(self) -> str:
        return f"p={self.p}"
