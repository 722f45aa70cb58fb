"""Patches for fairseq's criterions."""

import functools
from typing import Any

import torch
from torch import Tensor

from lightconv_plugin import ops
from lightconv_plugin.compat.registry import patch
from lightconv_plugin.ops import backends


@patch(versions="all versions of fairseq")
def label_smoothing_passes() -> None:
    """fairseq's label smoothing goes over the logits of all words about ten times, each time a tensor of float32.

    Native kernels read them once in each pass and store no probabilities. Other definitions of probabilities (adaptive
    softmax) use fairseq's own code.
    """
    from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion as Criterion

    original = Criterion.compute_loss

    @functools.wraps(original)
    def compute_loss(
        self: Any, model: Any, net_output: Any, sample: dict, reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        logits = plain_logits(model, net_output)
        if logits is None or not _has_kernel(logits):
            return original(self, model, net_output, sample, reduce)
        if type(self).get_lprobs_and_target is not Criterion.get_lprobs_and_target:
            return original(self, model, net_output, sample, reduce)
        target = model.get_targets(sample, net_output)
        if self.ignore_prefix_size > 0:
            logits, target = logits[:, self.ignore_prefix_size :], target[:, self.ignore_prefix_size :]
        rows = logits.reshape(-1, logits.shape[-1])
        losses = ops.label_smoothed_nll_loss(rows, target.reshape(-1), self.eps, self.padding_idx)
        loss, nll_loss = (numbers.sum() if reduce else numbers.reshape(-1, 1) for numbers in losses)
        return loss, nll_loss

    Criterion.compute_loss = compute_loss


def unwrapped(model: Any) -> Any:
    """fairseq's model: distributed training and FSDP wrap it."""
    from fairseq.models import BaseFairseqModel

    while not isinstance(model, BaseFairseqModel) and isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model


def plain_logits(model: Any, net_output: Any) -> Tensor | None:
    """The logits, if probabilities are their softmax."""
    from fairseq.models import BaseFairseqModel, FairseqDecoder
    from fairseq.models.transformer import TransformerModelBase

    model = unwrapped(model)
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, FairseqDecoder) or getattr(decoder, "adaptive_softmax", None) is not None:
        return None
    for name in ("get_normalized_probs", "get_normalized_probs_scriptable"):
        usual = [getattr(kind, name) for kind in (BaseFairseqModel, TransformerModelBase)]
        if getattr(type(decoder), name) is not getattr(FairseqDecoder, name) or getattr(type(model), name) not in usual:
            return None
    return net_output[0]


def _has_kernel(logits: Tensor) -> bool:
    """Whether the logits' device has a native operator for their type."""
    device = logits.device.type
    return backends.backend(device) != "reference" and (device == "cpu" or logits.dtype != torch.float64)
