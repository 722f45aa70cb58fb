"""A patch that computes what surrounds a layer's matrix products in fewer passes over memory."""

import functools
from typing import Any

from torch import nn

from lightconv_plugin.compat.registry import patch


@patch(versions="all versions of fairseq")
def residuals_in_one_pass() -> None:
    """fairseq's layers compute dropout, the residual connection and the layer norm one after the other.

    Each reads and writes a whole tensor, and on a GPU each is a launch, forward and backward. In a model that is
    trained, one operator computes them, another the ReLU and its dropout, and attention over the encoder takes torch's
    fused kernels. The layers of this package and fairseq's own Transformer layers are changed, if their forward pass is
    fairseq's; models that only translate are not.
    """
    from fairseq.trainer import Trainer

    original = Trainer.__init__

    @functools.wraps(original)
    def __init__(
        self: Any, cfg: Any, task: Any, model: nn.Module, criterion: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        from lightconv_plugin.models.joined import join_passes  # it defines classes of fairseq's modules

        join_passes(model, criterion)
        original(self, cfg, task, model, criterion, *args, **kwargs)

    Trainer.__init__ = __init__
