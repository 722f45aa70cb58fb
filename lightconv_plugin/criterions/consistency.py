"""Consistency training: label-smoothed cross-entropy, and the divergence of two predictions for the same sentences.

Both predictions are computed in one pass over a batch that has each sentence twice, so that distributed training sees
one forward pass for each backward pass. The batch needs twice the memory.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.logging import metrics
from torch import Tensor

from lightconv_plugin.compat.criterions import plain_logits
from lightconv_plugin.errors import InputError


class ConsistencyCriterion(LabelSmoothedCrossEntropyCriterion):
    """Base of the criterions with the loss CE + `alpha` · divergence, summed over the tokens that are not padding.

    With alpha 0, and in validation, it is label_smoothed_cross_entropy. The first `ignore_prefix_size` tokens of the
    target count in neither part.

    Attributes:
        alpha: the weight of the divergence.
        reads_output_alone: models need not compute attention weights for it.
        logged_as: the divergence's name in the log. Like the loss, it is logged in bits per token (or per sentence).
    """

    alpha: float
    reads_output_alone = True
    logged_as: ClassVar[str]

    @abstractmethod
    def passes(self, model: Any, net_input: dict[str, Any]) -> Any:
        """The model's output for a batch that has each sentence twice, in its first and in its second half."""

    @abstractmethod
    def scored(self, output: Any, sample: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The part of the output that has a cross-entropy, and a sample with the targets of this part."""

    @staticmethod
    @abstractmethod
    def divergence(first: Tensor, second: Tensor) -> Tensor:
        """Log-probabilities (…, V) of both passes → their divergence (…)."""

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """The loss, the sample size that divides its gradient, and what is logged; as in fairseq's criterions."""
        if not (self.alpha > 0 and model.training):
            return super().forward(model, sample, reduce)
        output = self.passes(model, twice(sample["net_input"]))
        scored = self.scored(output, sample)
        divergence = self._divergence_of_tokens(model, output, sample)
        # The losses of a token in both passes are added, if both have one.
        passes = len(scored[1]["target"]) // len(sample["target"])
        loss, nll_loss = (
            losses.view(passes, *divergence.shape).sum(0) for losses in self.compute_loss(model, *scored, reduce=False)
        )
        loss = loss + self.alpha * divergence
        if reduce:
            loss, nll_loss = loss.sum(), nll_loss.sum()
        sentences = sample["target"].size(0)
        sample_size = sentences if self.sentence_avg else sample["ntokens"]
        logged = {"loss": loss.data, "nll_loss": nll_loss.data, self.logged_as: divergence.sum().data}
        logged |= {"ntokens": sample["ntokens"], "nsentences": sentences, "sample_size": sample_size}
        if self.report_accuracy:
            logged["n_correct"], logged["total"] = self.compute_accuracy(model, *scored)
        return loss, sample_size, logged

    def _divergence_of_tokens(self, model: Any, output: Any, sample: dict[str, Any]) -> Tensor:
        """(tokens, 1), like unreduced losses; 0 for padding."""
        first, second = log_probabilities(model, output)[:, self.ignore_prefix_size :].chunk(2)
        padding = sample["target"][:, self.ignore_prefix_size :].eq(self.padding_idx)
        return self.divergence(first, second).masked_fill(padding, 0).reshape(-1, 1)

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Aggregate the logging outputs of all batches and processes."""
        super().reduce_metrics(logging_outputs)
        if any(cls.logged_as in log for log in logging_outputs):
            total = sum(log.get(cls.logged_as, 0) for log in logging_outputs)
            size = sum(log.get("sample_size", 0) for log in logging_outputs)
            metrics.log_scalar(cls.logged_as, total / size / math.log(2), size, round=3)


def checked_weight(option: str, alpha: float) -> float:
    """The weight of a divergence; InputError unless it is a number of at least 0."""
    if not 0 <= alpha < math.inf:
        raise InputError(f"{option} must be a number of at least 0, got {alpha}")
    return alpha


def twice(net_input: dict[str, Any]) -> dict[str, Any]:
    """A batch followed by itself."""
    return {
        name: torch.cat([value, value]) if isinstance(value, Tensor) else value for name, value in net_input.items()
    }


def log_probabilities(model: Any, output: Any) -> Tensor:
    """(B,T,V), in float32, or float64 for logits of that type."""
    logits = plain_logits(model, output)
    if logits is None:
        return model.get_normalized_probs(output, log_probs=True)
    return F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
