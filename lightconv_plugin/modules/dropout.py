"""fairseq's dropout, by the plugin's own operator on a CPU."""

import torch
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor, nn

from lightconv_plugin import ops
from lightconv_plugin.ops import backends


class Dropout(FairseqDropout):
    """As FairseqDropout. On a CPU with native kernels the mask costs a fraction of torch's, which asks a generator for
    every element. Elsewhere, and in a graph that is being traced, it is torch's own.
    """

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """x of any shape → x with elements dropped, where dropout is on; `inplace` allows x to be overwritten."""
        active = self.p > 0 and (self.training or self.apply_during_inference)
        if active and self.p < 1 and self._native(x):
            return ops.dropout(x, self.p)
        return super().forward(x, inplace)

    @staticmethod
    def _native(x: Tensor) -> bool:
        return x.device.type == "cpu" and not torch.compiler.is_compiling() and backends.backend("cpu") == "cpu"


def replace_dropout(module: nn.Module) -> None:
    """Every FairseqDropout below `module` becomes a `Dropout` of the same probability and name, in place."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is FairseqDropout:
                setattr(parent, name, Dropout(child.p, child.module_name))
