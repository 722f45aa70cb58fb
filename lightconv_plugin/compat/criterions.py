"""Patches for fairseq's criterions."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightconv_plugin import ops
from lightconv_plugin.compat.registry import patch
from lightconv_plugin.ops import backends
from lightconv_plugin.ops.filters import widen


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


def _words_of_bands_are_ignored() -> bool:
    from fairseq.criterions.adaptive_loss import AdaptiveLoss
    from fairseq.data import Dictionary
    from fairseq.modules import AdaptiveSoftmax

    class Model:
        """All words of a band are as likely; the second band is of the words 4 … 7."""

        decoder = SimpleNamespace(adaptive_softmax=AdaptiveSoftmax(8, 2, [4], 0.0, factor=1.0))

        def __call__(self) -> list[Tensor]:
            return [torch.zeros(1, 1, 2)]

        def get_targets(self, sample: dict, output: Any) -> Tensor:
            return sample["target"]

    criterion = AdaptiveLoss(SimpleNamespace(target_dictionary=Dictionary()), False)
    _, _, log = criterion(Model(), {"net_input": {}, "target": torch.tensor([[5]])})
    return log["loss"].item() < math.log(5 * 4) - 0.1


@patch(versions="all versions of fairseq", needed=_words_of_bands_are_ignored)
def adaptive_loss_words() -> None:
    """fairseq's adaptive_loss takes the second word of each later band for padding, so that it is never learned.

    It compares the number of a word within its band with the number of the pad, which only the first band has. In half
    types it also sums the losses in that type: a large batch has an infinite loss in float16, two digits in bfloat16.
    """
    from fairseq import utils
    from fairseq.criterions.adaptive_loss import AdaptiveLoss

    original = AdaptiveLoss.forward

    @functools.wraps(original)
    def forward(self: Any, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        softmax = getattr(model.decoder, "adaptive_softmax", None)
        if softmax is None or not reduce:
            return original(self, model, sample, reduce)
        output = model(**sample["net_input"])
        target = model.get_targets(sample, output)
        loss = widen(output[0].new_zeros(1))
        for i, (logits, words) in enumerate(zip(*softmax(output[0], target.reshape(-1)), strict=True)):
            if words is not None:
                pad = -100 if i else self.padding_idx
                loss += widen(F.cross_entropy(logits, words, ignore_index=pad, reduction="none")).sum()
        ntokens = utils.strip_pad(target, self.padding_idx).numel()
        size = len(sample["target"]) if self.sentence_avg else ntokens
        log = {"loss": loss.data, "ntokens": ntokens, "nsentences": len(target), "sample_size": size}
        return loss, size, log

    AdaptiveLoss.forward = forward


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
