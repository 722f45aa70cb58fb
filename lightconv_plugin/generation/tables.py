"""The hypotheses of a beam search in torch: their words, scores and candidates, in tensors that stay in place."""

from __future__ import annotations

import torch
from torch import Tensor

from lightconv_plugin.generation.beams import Beams, move


class Tables:
    """The sentences that are still being searched, the first `beams.live` of S = `beams.capacity`, each with `beam`
    hypotheses.

    All methods except `keep` run the same operations at any time: see Beams.

    Args:
        beams: the Beams of the first model.
        columns: maximum number of steps.
        lengths: (sentences,) source lengths; there may be fewer than S. prefix: (sentences,P) or None.
        begin, eos, pad: the symbols before the first word, at the end, and for places without a word.

    Attributes:
        tokens: (S, beam, columns + 1), the beginning symbol first. scores: (S, beam, columns), cumulative.
        ignored: (S, beam), hypotheses that only fill up the beam.
        totals, words, parents: (S, 2 · beam), the candidates, best first: their scores, words and hypotheses.
        ends: (S, 2 · beam), which candidates end their hypothesis, or are unused.
        numbers: the index in the batch of each live sentence.
    """

    def __init__(
        self,
        beams: Beams,
        columns: int,
        lengths: Tensor,
        prefix: Tensor | None,
        *,
        begin: int,
        eos: int,
        pad: int,
    ):
        sentences, beam, device = beams.capacity, beams.width, lengths.device
        self._beams, self._eos = beams, eos
        self.tokens = torch.full((sentences, beam, columns + 1), pad, dtype=torch.int64, device=device)
        self.tokens[:, :, 0] = begin
        self.scores = torch.zeros(sentences, beam, columns, device=device)
        self.ignored = torch.zeros(sentences, beam, dtype=torch.bool, device=device)
        self.totals = torch.full((sentences, 2 * beam), -torch.inf, device=device)
        self.words = torch.full((sentences, 2 * beam), pad, dtype=torch.int64, device=device)
        self.parents = torch.zeros_like(self.words)
        self.ends = torch.ones(sentences, 2 * beam, dtype=torch.bool, device=device)
        self.lengths = lengths.new_zeros(sentences)
        self.lengths[: len(lengths)] = lengths
        self.prefix = prefix
        if prefix is not None:
            self.prefix = prefix.new_full((sentences, prefix.shape[1]), pad)
            self.prefix[: len(prefix)] = prefix
        self.numbers = list(range(sentences))
        self._slots = torch.arange(2 * beam, device=device)
        self._first_row = torch.arange(0, sentences * beam, beam, device=device).unsqueeze(1)

    @property
    def live(self) -> int:
        return self._beams.live

    def _tensors(self) -> list[Tensor]:
        """All but the prefix, (S, …) each."""
        tables = [self.tokens, self.scores, self.ignored, self.lengths]
        return [*tables, self.totals, self.words, self.parents, self.ends]

    def last(self, width: int) -> Tensor:
        """(live · width,): the last word of the first `width` hypotheses of each sentence."""
        return self.tokens[: self.live, :width].index_select(2, self._beams.now).flatten()

    def past_totals(self) -> Tensor:
        """(live, beam): the scores of the hypotheses before this step."""
        return self.scores[: self.live].index_select(2, self._beams.now - 1).squeeze(2)

    def offer(self, totals: Tensor, words: Tensor, parents: Tensor) -> None:
        """Store the candidates of this step, each (live, n), best first; n is not less than before."""
        live, n = totals.shape
        ends = words.eq(self._eos) & totals.ne(-torch.inf)
        ends[:, : self._beams.width] &= ~self.ignored[:live]
        for table, new in (self.totals, totals), (self.words, words), (self.parents, parents), (self.ends, ends):
            table[:live, :n] = new

    def choose(self) -> Tensor:
        """Continue the first `beam` candidates of the previous step that do not end. If there are fewer, others fill up
        the beam and are ignored. → (live · beam,) int64, the rows from which these descend.
        """
        live, beam, steps, now = self.live, self._beams.width, self._beams.steps, self._beams.now
        ends = self.ends[:live].clone()
        ends[:, :beam] |= self.ignored[:live]
        order, chosen = (self._slots + ends * (2 * beam)).topk(beam, dim=1, largest=False)
        self.ignored[:live] = order.ge(2 * beam)
        parents = self.parents[:live].gather(1, chosen)
        history = parents.unsqueeze(2).expand(-1, -1, steps)
        for table, column, new in (self.tokens, now, self.words), (self.scores, now - 1, self.totals):
            past = table[:live, :, :steps]
            past.copy_(past.gather(1, history))
            table[:live].index_copy_(2, column, new[:live].gather(1, chosen).unsqueeze(2))
        return (parents + self._first_row[:live]).flatten()

    def keep(self, order: list[int]) -> Tensor:
        """Replace sentence i with sentence order[i]; returns the order as a tensor. The caller also moves `beams`."""
        index = torch.tensor(order, device=self.tokens.device)
        places = torch.arange(len(order), device=index.device)
        moved = index != places
        for table in (*self._tensors(), *([] if self.prefix is None else [self.prefix])):
            move(table, 0, index[moved], places[moved])
        self.numbers = [self.numbers[i] for i in order]
        return index

    def copy_(self, other: Tables) -> None:
        """Copy the state of `other`, of the same sizes, into these tensors; the prefix is taken over uncopied."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(theirs)
        self.prefix, self.numbers = other.prefix, list(other.numbers)
