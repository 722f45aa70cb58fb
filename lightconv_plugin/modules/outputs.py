"""The adaptive softmax, from the decoder's last layer to the words."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightconv_plugin.modules.config import AdaptiveSoftmaxConfig, bands
from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.modules.eager import eager
from lightconv_plugin.modules.embeddings import AdaptiveInput
from lightconv_plugin.modules.linear import Linear
from lightconv_plugin.ops.filters import widen


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of words in bands (Grave et al. 2017).

    Weights tied to an adaptive input are not parameters of this module; pass that input to `forward`.

    Args:
        vocab_size, dim: V, and the channels of the input.
        config: cutoff, factor, dropout and what is tied.
        word_dim: dimension of the first band's word vectors, if they are tied.

    Parameters, under fairseq's names: head.weight (words of the first band + bands − 1, dim), or head.class_proj.weight
        (bands − 1, dim) and, if word_dim is not dim, head.word_proj.0.weight (word_dim, dim); for each other band N
        tail.N.0.weight (dim / factor^(N+1), dim) and tail.N.2.weight (words, the same).
    """

    def __init__(self, vocab_size: int, dim: int, config: AdaptiveSoftmaxConfig, word_dim: int):
        super().__init__()
        self.ends = ends = bands(config.cutoff, vocab_size)
        self.tied, self.tied_proj = config.tie_weights, config.tie_proj
        self.dropout = Dropout(config.dropout, type(self).__name__)
        first, others = ends[0], len(ends) - 1
        if not self.tied:
            self.head: nn.Module = Linear(dim, first + others, bias=False)
        else:
            self.head = nn.ModuleDict({"class_proj": Linear(dim, others, bias=False)})
            if word_dim != dim:
                self.head["word_proj"] = nn.Sequential(Linear(dim, word_dim, bias=False))
        # The keys are the indices in fairseq's Sequential; the dropout is between them.
        self.tail = nn.ModuleList()
        for (begin, end), width in zip(pairwise(ends), config.widths(vocab_size, dim), strict=True):
            parts = {} if self.tied_proj else {"0": Linear(dim, width, bias=False)}
            if not self.tied:
                parts["2"] = Linear(width, end - begin, bias=False)
            self.tail.append(nn.ModuleDict(parts))

    def forward(self, x: Tensor, inputs: AdaptiveInput | None = None) -> Tensor:
        """x (…,dim) → (…,V) log-probabilities; `inputs` is the adaptive input, needed if weights are tied to it."""
        first = self.ends[0]
        x = self.dropout(x)
        head = F.log_softmax(self._head(x, inputs), dim=-1)
        parts = [head[..., :first]]
        for i in range(len(self.tail)):
            parts.append(F.log_softmax(self._tail(i, x, inputs), dim=-1) + head[..., first + i, None])
        return torch.cat(parts, dim=-1)

    def by_band(self, x: Tensor) -> bool:
        """Whether to train on x with `losses`: not where a graph is traced or captured, which wants fixed shapes."""
        if not (self.training and eager(x)) or x.is_meta:
            return False  # in this order: torch.compile cannot trace the question below
        return not (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def losses(self, x: Tensor, labels: Tensor, inputs: AdaptiveInput | None = None) -> Tensor:
        """x (N,dim), labels (N,) → (N,) their negative log-probabilities, 0 for −100; the host waits for a GPU.

        The words of a band are scored only where the label is one of them, as in fairseq's adaptive loss.
        """
        first = self.ends[0]
        x = self.dropout(x)
        inside = [(labels >= begin) & (labels < end) for begin, end in pairwise(self.ends)]
        wanted = labels
        for i, chosen in enumerate(inside):
            wanted = wanted.masked_fill(chosen, first + i)
        losses = _cross_entropy(self._head(x, inputs), wanted)
        for i, chosen in enumerate(inside):
            rows = chosen.nonzero().squeeze(1)  # even if there are none: all processes need all gradients
            scores = self._tail(i, x.index_select(0, rows), inputs)
            losses = losses.index_add(0, rows, _cross_entropy(scores, labels.index_select(0, rows) - self.ends[i]))
        return losses

    def _tail(self, band: int, x: Tensor, inputs: AdaptiveInput | None) -> Tensor:
        tail = self.tail[band]
        inner = F.linear(x, _given(inputs).weights(band + 1)[1].t()) if self.tied_proj else _part(tail, "0")(x)
        inner = self.dropout(inner)
        return F.linear(inner, _given(inputs).weights(band + 1)[0]) if self.tied else _part(tail, "2")(inner)

    def _head(self, x: Tensor, inputs: AdaptiveInput | None) -> Tensor:
        if not self.tied:
            return self.head(x)
        inner = _part(self.head, "word_proj")(x) if "word_proj" in self.head else x  # type: ignore[operator]
        return torch.cat([F.linear(inner, _given(inputs).weights(0)[0]), _part(self.head, "class_proj")(x)], dim=-1)


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(widen(scores), labels, reduction="none")


def _part(parts: nn.Module, name: str) -> nn.Module:
    return parts[name]  # type: ignore[index]


def _given(inputs: AdaptiveInput | None) -> AdaptiveInput:
    if inputs is None:
        raise ValueError("inputs is missing: the weights are tied to those of an adaptive input")
    return inputs
