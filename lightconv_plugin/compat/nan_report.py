"""A patch for what fairseq reports when gradients are NaN or infinite."""

import functools
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightconv_plugin.compat.registry import patch


@patch(versions="all versions of fairseq")
def nan_report() -> None:
    """fairseq's search for the module with the first NaN gradient fails in the encoder, and hides what went wrong.

    When gradients are NaN or infinite, fairseq repeats the step with hooks. Its hooks for the backward pass are of a
    kind that torch refuses for modules whose output is a dictionary of lists, as every encoder's is: the training ends
    with StopIteration. Hooks of the outputs' own tensors receive the same gradients.
    """
    from fairseq.nan_detector import NanDetector

    def add_hooks(self: Any, module: nn.Module) -> None:
        if self.forward:
            self.fhooks.append(module.register_forward_hook(self.fhook_fn))
        if self.backward:
            self.bhooks.append(module.register_forward_hook(functools.partial(_watch, self)))

    NanDetector.add_hooks = add_hooks


def _watch(detector: Any, module: nn.Module, _: Any, output: Any) -> None:
    """Show the detector the gradients of a module's output when they are there."""

    def show(gradient: Tensor) -> None:
        detector.bhook_fn(module, (), gradient)

    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(show)
