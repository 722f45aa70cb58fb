"""--criterion label_smoothed_cross_entropy_with_simcut."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterionConfig
from torch import Tensor, nn

from lightconv_plugin.compat.criterions import unwrapped
from lightconv_plugin.criterions.consistency import ConsistencyCriterion, checked_weight
from lightconv_plugin.errors import InputError


@dataclass
class SimCutConfig(LabelSmoothedCrossEntropyCriterionConfig):
    """The defaults are the paper's."""

    simcut_alpha: float = field(
        default=3.0, metadata={"help": "weight of the divergence of the pass with cut tokens; 0: no SimCut"}
    )
    simcut_p: float = field(default=0.05, metadata={"help": "probability with which the embedding of a token is cut"})


class SimCutCriterion(ConsistencyCriterion):
    """SimCut (Gao et al. 2022): one pass as usual, one in which tokens are cut, and for each target token

        CE(p, y) + α · KL(p ‖ p_cut)

    p and p_cut are the probabilities in both passes, each with dropout masks of its own. The paper writes the second
    term as α · KL(f(x, y) ‖ f(x_cut, y_cut)), and finds that gradients must flow through both sides of it: they do.
    The rest is chosen as in the authors' code:

    - A cut token has the embedding 0; its position is not cut. Tokens of both sides are cut independently.
    - The end of the sentence, which also begins the decoder's input, is never cut.
    - KL is summed over the tokens of a batch, and divided by the same number as CE.

    Unlike there, an ignored prefix does not count in KL, as it does not in CE.
    """

    logged_as = "simcut_kl_loss"
    symmetric = False

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
        simcut_alpha: float = 3.0,
        simcut_p: float = 0.05,
    ) -> None:
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        if not 0 <= simcut_p <= 1:
            raise InputError(f"--simcut-p must be a probability, 0 … 1, got {simcut_p}")
        self.alpha, self.p = checked_weight("--simcut-alpha", simcut_alpha), simcut_p
        self.eos_idx = task.target_dictionary.eos()

    def passes(self, model: Any, net_input: dict[str, Any]) -> Any:
        with second_half_cut(model, self.p, self.eos_idx):
            return model(**net_input)

    def scored(self, output: Any, sample: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        logits, *rest = output
        return (logits[: len(sample["target"])], *rest), sample


@contextlib.contextmanager
def second_half_cut(model: Any, p: float, kept: int) -> Iterator[None]:
    """Within the block, a token in the second half of a batch has the embedding 0 with probability `p`.

    kept: a token that is never cut.
    """

    def cut(module: nn.Module, arguments: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        tokens = arguments[0].chunk(2)[1]
        chosen = torch.rand(tokens.shape, device=tokens.device).lt(p) & tokens.ne(kept)
        return embedded.masked_fill(torch.cat([torch.zeros_like(chosen), chosen]).unsqueeze(-1), 0)

    # Both sides may share one module, which is then called once for each.
    hooks = [module.register_forward_hook(cut) for module in set(embeddings(model))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def embeddings(model: Any) -> list[nn.Module]:
    """What embeds the tokens of each side of a model. ValueError if it has no such modules."""
    sides = [getattr(unwrapped(model), side, None) for side in ("encoder", "decoder")]
    modules = [getattr(side, "embed_tokens", None) for side in sides]
    found = [module for module in modules if isinstance(module, nn.Module)]
    if not found:
        raise ValueError(f"SimCut needs a model whose encoder or decoder has embed_tokens, got {type(model).__name__}")
    return found
