"""The hypotheses of a beam search in torch: what the next step reads of them, and how they came about, in tensors that
stay in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightconv_plugin.generation.beams import Beams, move
from lightconv_plugin.generation.finished import History


class Tables:
    """The sentences that are still being searched, the first `beams.live` of S = `beams.capacity`, each with `beam`
    hypotheses.

    All methods except `keep` and `history` run the same operations at any time: see Beams.

    Args:
        beams: the Beams of the first model.
        columns: maximum number of steps.
        prefix: (sentences,P) or None; there may be fewer sentences than S.
        begin, eos, pad: the symbols before the first word, at the end, and for places without a word.
        with_tokens: whether `tokens` is kept up to date, for a search that looks back at its words.

    Attributes:
        words, totals: (S, beam), the last word and the score of each hypothesis.
        tokens: (S, beam, columns + 1), all words, the beginning symbol first; None unless asked for.
        ended: (S, beam), which of the first candidates of the last step end their hypothesis.
        numbers: the index in the batch of each live sentence.
    """

    def __init__(
        self,
        beams: Beams,
        columns: int,
        prefix: Tensor | None,
        *,
        begin: int,
        eos: int,
        pad: int,
        with_tokens: bool,
    ):
        sentences, beam, device = beams.capacity, beams.width, beams.now.device
        self._beams, self._eos, self._pad = beams, eos, pad
        # Words, and the hypotheses of the previous step that they continue.
        self._chosen = torch.full((2, sentences, beam), begin, dtype=torch.int64, device=device)
        self.words = self._chosen[0]
        self.totals = torch.zeros(sentences, beam, dtype=torch.float32, device=device)
        self.tokens: Tensor | None = None
        if with_tokens:
            self.tokens = torch.full((sentences, beam, columns + 1), pad, dtype=torch.int64, device=device)
            self.tokens[:, :, 0] = begin
        # Hypotheses that only fill up the beam; as wide as the candidates, of which only the first can be such.
        self._ignored = torch.zeros(sentences, 2 * beam, dtype=torch.bool, device=device)
        self.ended = torch.zeros(sentences, beam, dtype=torch.bool, device=device)
        self.prefix = prefix
        if prefix is not None:
            self.prefix = prefix.new_full((sentences, prefix.shape[1]), pad)
            self.prefix[: len(prefix)] = prefix
        self.numbers = list(range(sentences))
        self._places = torch.arange(sentences, device=device)  # the numbers, on the device
        self._history = History(
            torch.zeros(columns, sentences, 2, 2 * beam, dtype=torch.int64, device=device),
            torch.zeros(columns, sentences, 2 * beam, dtype=torch.float32, device=device),
            torch.zeros(columns, sentences, beam, dtype=torch.int64, device=device),
        )
        self._slots = torch.arange(2 * beam, device=device)
        self._first_row = torch.arange(0, sentences * beam, beam, device=device).unsqueeze(1)

    @property
    def live(self) -> int:
        return self._beams.live

    def last(self, width: int) -> Tensor:
        """(live · width,): the last word of the first `width` hypotheses of each sentence."""
        return self.words[: self.live, :width].flatten()

    def offer(self, totals: Tensor, words: Tensor, parents: Tensor) -> Tensor:
        """Continue the first `beam` candidates that do not end. If there are fewer, others fill up the beam and are
        ignored. → (live · beam,) int64, the rows from which these descend.

        totals, words, parents: (live, n), the candidates of this step, best first: their scores, words and hypotheses.
        """
        beam, live = self._beams.width, self.live
        missing = 2 * beam - totals.shape[1]
        if missing:  # in a first step, with hardly any words
            totals, words, parents = (F.pad(tensor, (0, missing)) for tensor in (totals, words, parents))
        ignored = self._ignored[:live]
        ends = words.eq(self._eos) & totals.ne(-torch.inf)
        torch.gt(ends[:, :beam], ignored[:, :beam], out=self.ended[:live])
        barred = ends | ignored
        if missing:
            barred[:, -missing:] = True
        order, slots = torch.add(self._slots, barred, alpha=2 * beam).topk(beam, dim=1, largest=False)
        torch.ge(order, 2 * beam, out=ignored[:, :beam])
        candidates = torch.stack([words, parents])
        torch.gather(candidates, 2, slots.expand(2, -1, -1), out=self._chosen[:, :live])
        torch.gather(totals, 1, slots, out=self.totals[:live])
        self._history.write(self._beams.now, self._places[:live], candidates.transpose(0, 1), totals, slots)
        parents = self._chosen[1, :live]
        if self.tokens is not None:
            self._extend(self.tokens[:live], parents)
        return (parents + self._first_row[:live]).flatten()

    def _extend(self, tokens: Tensor, parents: Tensor) -> None:
        """Let each hypothesis's words be those of its parent, and its own last one."""
        past = tokens[:, :, : self._beams.steps]
        past.copy_(past.gather(1, parents.unsqueeze(2).expand(-1, -1, past.shape[2])))
        tokens.index_copy_(2, self._beams.now + 1, self.words[: self.live].unsqueeze(2))

    def become_the_first(self, sentences: Tensor) -> None:
        """Replace all hypotheses of these sentences, (live,) bool, with their first one."""
        for table in (self.totals, self.tokens):
            if table is not None:
                some = table[: self.live]
                some[sentences] = some[sentences][:, :1].expand_as(some[sentences])
        self._history.become_the_first(self._beams.time - 1, self._places[: self.live][sentences])

    def keep(self, order: Sequence[int], sources: Tensor, targets: Tensor) -> None:
        """Replace sentence i with sentence order[i]; sources and targets are what `Beams.keep` returned for it."""
        move(self._chosen, 1, sources, targets)
        for table in (self.totals, self.tokens, self._ignored, self.prefix, self._places):
            if table is not None:
                move(table, 0, sources, targets)
        self.numbers = [self.numbers[i] for i in order]

    def history(self, steps: int) -> History:
        """Of the first `steps` steps, on the host: the only copy, for which the host waits."""
        return self._history.on_host(steps)

    def copy_(self, other: Tables) -> None:
        """Copy the state of `other`, of the same sizes, into these tensors; the prefix is taken over uncopied."""
        for name in ("_chosen", "totals", "tokens", "_ignored", "_places"):
            if (mine := getattr(self, name)) is not None:
                mine.copy_(getattr(other, name))
        self.prefix, self.numbers = other.prefix, list(other.numbers)
