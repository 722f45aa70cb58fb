"""--criterion label_smoothed_cross_entropy_with_rdrop."""

from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterionConfig

from lightconv_plugin.criterions.consistency import ConsistencyCriterion, checked_weight


@dataclass
class RDropConfig(LabelSmoothedCrossEntropyCriterionConfig):
    """fairseq's options."""

    rdrop_alpha: float = field(
        default=0.0, metadata={"help": "weight of the divergence of both passes; 0: no R-Drop. The paper has 5"}
    )


class RDropCriterion(ConsistencyCriterion):
    """R-Drop (Liang et al. 2021): two passes with different dropout masks, and for each token

        CE(p, y) + CE(q, y) + α · (KL(p ‖ q) + KL(q ‖ p)) / 2

    p and q are the probabilities in both passes. Gradients flow through both.

    The losses, the gradients and what is logged in training are those of fairseq's main branch: loss and nll_loss are
    sums over both passes, so the logged perplexity is the square of that of one pass.
    """

    logged_as = "rdrop_kl_loss"
    symmetric = True

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
        rdrop_alpha: float = 0.0,
    ) -> None:
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self.alpha = checked_weight("--rdrop-alpha", rdrop_alpha)

    def passes(self, model: Any, net_input: dict[str, Any]) -> Any:
        return model(**net_input)

    def scored(self, output: Any, sample: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return output, {**sample, "target": torch.cat([sample["target"]] * 2)}


# The name of fairseq's class, which a checkpoint has: a training that was begun with that one can be resumed.
RDropCriterion.__name__ = "RdropLabelSmoothedCrossEntropyCriterion"
