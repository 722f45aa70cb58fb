"""Cross-entropy with label smoothing as one operator, which keeps no probabilities."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import forward_ad

from lightconv_plugin.ops import checks
from lightconv_plugin.ops.transforms import call


def label_smoothed_nll_loss(
    logits: Tensor, target: Tensor, epsilon: float, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """The loss of fairseq's criterion label_smoothed_cross_entropy for each token, from the logits.

    With p = softmax(logits), V words and e = ε / (V − 1):

        nll = −log p[target],    loss = (1 − ε − e) · nll + e · Σ −log p

    so that the target has the weight 1 − ε and each other word e (Szegedy et al. 2016, section 7). The probabilities
    are recomputed for the gradient.

    Args:
        logits: (…, V), V ≥ 2, in one of the convolutions' types; sums are in float32, or float64 for float64.
        target: (…) int64, in 0 … V − 1 or `ignore_index`.
        epsilon: 0 ≤ ε < 1; with 0 the loss is nll.
        ignore_index: a token with this target has the losses 0 and no gradient; its logits are not read.

    Returns:
        loss and nll, of target's shape, in float32 or float64. Both have first-order gradients.

    Raises:
        TypeError, ValueError: wrong types, shapes or values.
        IndexError: a target is neither in 0 … V − 1 nor `ignore_index`; on a GPU, its losses and gradient are NaN.
    """
    checks.loss(logits, target, epsilon, ignore_index)
    if forward_ad._current_level >= 0:
        checks.no_tangents(logits)
    rows = logits.reshape(-1, logits.shape[-1])
    loss, nll, _ = call("label_smoothed_nll", rows, target.reshape(-1), float(epsilon), ignore_index)
    # Without smoothing, the words other than the target have no share: not 0 · ∞ for one whose logit is −∞.
    return (loss if epsilon > 0 else nll.clone()).view(target.shape), nll.view(target.shape)
