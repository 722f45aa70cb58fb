"""Consistency training: label-smoothed cross-entropy, and the divergence of two predictions for the same sentences.

Both predictions are computed in one pass over a batch that has each sentence twice, so that distributed training sees
one forward pass for each backward pass. The batch needs twice the memory.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.logging import metrics
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightconv_plugin.compat.criterions import plain_logits
from lightconv_plugin.errors import InputError

# Numbers of a block, whose copies in float32 should stay in a core's cache, or be few on a GPU.
_BLOCK = {"cpu": 2**17, "cuda": 2**25}


class ConsistencyCriterion(LabelSmoothedCrossEntropyCriterion):
    """Base of the criterions with the loss CE + `alpha` · divergence, summed over the tokens that are not padding.

    With alpha 0, and in validation, it is label_smoothed_cross_entropy. The first `ignore_prefix_size` tokens of the
    target count in neither part.

    Attributes:
        alpha: the weight of the divergence.
        reads_output_alone: models need not compute attention weights for it.
        logged_as: the divergence's name in the log. Like the loss, it is logged in bits per token (or per sentence).
        symmetric: whether the divergence is the mean of both directions, or KL(first ‖ second).
    """

    alpha: float
    reads_output_alone = True
    logged_as: ClassVar[str]
    symmetric: ClassVar[bool]

    @abstractmethod
    def passes(self, model: Any, net_input: dict[str, Any]) -> Any:
        """The model's output for a batch that has each sentence twice, in its first and in its second half."""

    @abstractmethod
    def scored(self, output: Any, sample: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The part of the output that has a cross-entropy, and a sample with the targets of this part."""

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
        logits = plain_logits(model, output)
        if logits is None:  # log-probabilities are logits, too
            logits = model.get_normalized_probs(output, log_probs=True)
        first, second = logits[:, self.ignore_prefix_size :].chunk(2)
        padding = sample["target"][:, self.ignore_prefix_size :].eq(self.padding_idx)
        divergence: Tensor = Divergence.apply(first, second, self.symmetric)  # type: ignore[no-untyped-call]
        return divergence.masked_fill(padding, 0).reshape(-1, 1)

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


class Divergence(torch.autograd.Function):
    """KL(p ‖ q), or with `symmetric` (KL(p ‖ q) + KL(q ‖ p)) / 2, of p = softmax(first) and q = softmax(second).

    Logits (…,V) twice → (…), in float32, or float64 for logits of that type. It is computed in blocks, and again for
    the gradients: the probabilities of a batch, in float32, would be several times as large as its logits.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, symmetric: bool) -> Tensor:
        ctx.save_for_backward(first, second)
        ctx.symmetric = symmetric
        found = first.new_empty(first.shape[:-1], dtype=torch.promote_types(first.dtype, torch.float32))
        for a, b, out in _blocks(first, second, found.unsqueeze(-1)):
            log_p, log_q, ratio = _logs(a, b, found.dtype)
            weights = log_p.exp_()
            if symmetric:
                weights = weights.sub_(log_q.exp_()).div_(2)
            torch.sum(weights.mul_(ratio), -1, keepdim=True, out=out)
        return found

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        first, second = ctx.saved_tensors
        of_first, of_second = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (first, second))
        for a, b, outer, to_a, to_b in _blocks(first, second, gradient.unsqueeze(-1), of_first, of_second):
            log_p, log_q, ratio = _logs(a, b, gradient.dtype)
            p, q = log_p.exp_(), log_q.exp_()
            mean = (p * ratio).sum(-1, keepdim=True)
            if ctx.symmetric:
                mean_q = (q * ratio).sum(-1, keepdim=True)
                to_a.copy_((ratio - (mean - 1)).mul_(p).sub_(q).mul_(outer / 2))
                to_b.copy_((mean_q + 1 - ratio).mul_(q).sub_(p).mul_(outer / 2))
            else:
                to_a.copy_((ratio - mean).mul_(p).mul_(outer))
                to_b.copy_(q.sub_(p).mul_(outer))
        return of_first, of_second, None


def _logs(first: Tensor, second: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """log p, log q, and their difference."""
    log_p, log_q = (F.log_softmax(logits, -1, dtype=dtype) for logits in (first, second))
    return log_p, log_q, log_p - log_q


def _blocks(first: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows (R,V) of tensors (…,V), or (…,1), that belong together."""
    cores = torch.get_num_threads() if first.device.type == "cpu" else 1
    rows = max(1, _BLOCK.get(first.device.type, _BLOCK["cuda"]) * cores // first.shape[-1])
    return zip(*(tensor.flatten(0, -2).split(rows) for tensor in (first, *others)), strict=True)
