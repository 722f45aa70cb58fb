"""Beam search over StepModels, by the rules of fairseq's SequenceGenerator.

These rules determine every result:

- Each sentence has `beam` hypotheses. The 2 · beam best of their continuations are candidates. Those among the first
  `beam` that end the sentence are finished, and the best `beam` that do not end it are continued.
- A sentence is done, and leaves the batch, once it has `beam` finished hypotheses or reaches the maximum length, where
  only the end symbol is possible.
- Finished hypotheses are compared by score / length^len_penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightconv_plugin.generation.candidates import Columns, best_continuations, block_repeated
from lightconv_plugin.generation.finished import End, Hypotheses, in_fairseqs_format
from lightconv_plugin.generation.steps import State, StepModel
from lightconv_plugin.generation.tables import Tables
from lightconv_plugin.ops.reference_decoding import log_normalisers, without_nan


@dataclass(frozen=True)
class SearchOptions:
    """All options of a search; names and meanings are those of fairseq's SequenceGenerator where it has them.

    suppress: indices of the words in its tokens_to_suppress.
    max_len_a, max_len_b, max_len: a hypothesis has at most max_len_a·T + max_len_b words, where T is the longest source
        of the batch, and fewer than max_len (None: the smallest max_positions of the decoders).
    dtype: arithmetic of the linear layers (StepModel), one of DTYPES or GPU_DTYPES, or "auto" for the fastest on this
        machine.
    threads: number of threads that share the work on a CPU; None for as many as torch has, within a container's
        quota. The results do not depend on it.
    cuda_graphs: capture the steps of the search in CUDA graphs. None: on a GPU, from the second batch of a size.
    """

    pad: int
    unk: int
    eos: int
    beam_size: int = 5
    min_len: int = 1
    max_len_a: float = 0.0
    max_len_b: int = 200
    max_len: int | None = None
    normalize_scores: bool = True
    len_penalty: float = 1.0
    unk_penalty: float = 0.0
    temperature: float = 1.0
    match_source_len: bool = False
    no_repeat_ngram_size: int = 0
    suppress: tuple[int, ...] = ()
    dtype: str = "float32"
    threads: int | None = None
    cuda_graphs: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_len_a", "len_penalty", "unk_penalty", "temperature"):  # which may be NumPy's numbers
            object.__setattr__(self, name, float(getattr(self, name)))


class Kind(NamedTuple):
    """What the operations of a step depend on: steps of one kind run the same operations on the same tensors.

    live: number of sentences. steps: how many steps are read. first, last: whether it is the first or last step of the
    search. early: whether it is before min_len. forced: whether a sentence's prefix may reach this step.
    """

    live: int
    steps: int
    first: bool
    last: bool
    early: bool
    forced: bool


def _run(kind: Kind, step: Callable[[], None]) -> None:
    step()


class Search:
    """One search: `find` may be called once, and once more after each `copy_`.

    Args:
        models, states: an ensemble, and the initial state of each model (StepModel.start with beam_size hypotheses).
        lengths: (S,) source lengths; used only for match_source_len. The states may have room for more sentences.
        max_len: maximum number of words of a hypothesis, not counting the end symbol.
        prefix: (S,P) words that hypotheses must begin with, filled up with pads.
        begin: the symbol before the first word, eos by default.
        words: (W,) int64 in ascending order, those that may be chosen, with the symbols of the options and the words of
            the prefix; None for all. Probabilities are normalised over them. The states must have been started with
            them.
        columns: number of steps that the tables have room for, max_len + 1 by default.
    """

    def __init__(
        self,
        models: Sequence[StepModel],
        states: Sequence[State],
        lengths: Tensor,
        options: SearchOptions,
        max_len: int,
        *,
        prefix: Tensor | None = None,
        begin: int | None = None,
        words: Tensor | None = None,
        columns: int | None = None,
    ):
        self._models, self._states, self._options = models, states, options
        self._sentences, self._max_len = len(lengths), max_len
        self._beams = states[0].beams
        begin = options.eos if begin is None else begin
        symbols = {"begin": begin, "eos": options.eos, "pad": options.pad}
        looks_back = options.no_repeat_ngram_size > 0
        self._tables = Tables(self._beams, columns or max_len + 1, prefix, **symbols, with_tokens=looks_back)
        self._lengths = lengths
        suppress = torch.tensor(options.suppress, dtype=torch.int64).to(lengths.device, non_blocking=True)
        self._columns = Columns(words, suppress, pad=options.pad, unk=options.unk, eos=options.eos)

    def copy_(self, other: Search) -> None:
        """Copy the state of `other`, which has tables of the same sizes, into this search's tensors."""
        self._sentences, self._max_len, self._lengths = other._sentences, other._max_len, other._lengths
        for mine, theirs in zip(self._states, other._states, strict=True):
            mine.copy_(theirs)
        self._tables.copy_(other._tables)

    @torch.no_grad()
    def find(self, run: Callable[[Kind, Callable[[], None]], object] = _run) -> Hypotheses:
        """The finished hypotheses of each sentence, best first.

        run: called with the kind of each step, and the step. It must run the step, or a recording of a step of the
            same kind.

        Returns:
            For each sentence at most beam_size dicts as fairseq's generator returns them, sorted, with tensors on the
            CPU: tokens (n,) with the end, score and positional_scores (n,) in float32; attention and alignment are
            empty. The host waits for a GPU once a step, to see which hypotheses ended, and once for the results.

        Raises:
            NoHypothesisError: a sentence without a single possible hypothesis.
        """
        tables, beam = self._tables, self._options.beam_size
        ends: list[End] = []
        # Sentences that only pad the batch count as finished.
        counts = [0 if i < self._sentences else beam for i in range(tables.live)]
        for step in range(self._max_len + 1):
            for model, state in zip(self._models, self._states, strict=True):
                # At first all hypotheses of a sentence are the same: one row is enough.
                model.advance(state, tables.live if step == 0 else tables.live * beam)
            kind = self._kind(step)
            run(kind, partial(self._step, kind))
            if new := _ends(tables.ended[: tables.live].tolist(), tables.numbers, step, counts, beam):
                ends += new
                done = [counts[number] == beam for number in tables.numbers]
                if all(done):
                    break
                if (size := self._beams.size(done.count(False))) < tables.live:
                    self._keep(_fill_holes(done, size))
        return self._hypotheses(ends)

    def _keep(self, order: list[int]) -> None:
        for model, state in zip(self._models, self._states, strict=True):
            moved = model.keep(state, order)
        self._tables.keep(order, *moved)

    def _hypotheses(self, ends: list[End]) -> Hypotheses:
        """Finished hypotheses, sorted by score; ties in the order in which they finished."""
        options = self._options
        words, cumulative = self._tables.history(self._beams.time + 1).read(ends)
        sentences, last, _ = torch.tensor(ends, dtype=torch.int64).view(-1, 3).unbind(1)
        scores = cumulative.gather(1, last.unsqueeze(1))[:, 0]
        if options.normalize_scores:
            scores /= (last + 1).double().pow(options.len_penalty).float()
        if options.match_source_len:
            scores.masked_fill_(last > self._lengths.cpu()[sentences], -torch.inf)
        positional = torch.cat([cumulative[:, :1], cumulative.diff(dim=1)], dim=1)
        ranks = [(end.sentence, -score) for end, score in zip(ends, scores.tolist(), strict=True)]
        best = sorted(range(len(ends)), key=ranks.__getitem__)
        order, sizes = torch.tensor(best, dtype=torch.int64), last + 1
        kept = (torch.arange(words.shape[1]) < sizes.unsqueeze(1))[order]
        parts = words[order][kept], positional[order][kept], sizes[order], scores[order]
        return in_fairseqs_format(*parts, sentences.bincount(minlength=self._sentences))

    def _kind(self, step: int) -> Kind:
        prefix, last = self._tables.prefix, step == self._max_len
        forced = prefix is not None and step < prefix.shape[1] and not last
        early = step < self._options.min_len
        return Kind(self._tables.live, self._beams.steps, step == 0, last, early, forced)

    def _step(self, kind: Kind) -> None:
        """One step, up to which hypotheses the next one continues."""
        tables, beam = self._tables, self._options.beam_size
        width = 1 if kind.first else beam
        logits, normalisers = self._predict(tables.last(width), self._constrains(kind))
        if normalisers is not None:  # otherwise nothing is to be changed
            self._constrain(logits, normalisers, kind)
        count = min(2 * beam, width * logits.shape[1] - 1)
        totals = None if kind.first else tables.totals[: tables.live]
        penalties = self._penalties(kind)
        scores, best, parents = best_continuations(logits, normalisers, penalties, totals, tables.live, count)
        rows = tables.offer(scores, self._columns.words(best), parents)
        for model, state in zip(self._models, self._states, strict=True):
            model.reorder(state, rows)

    def _predict(self, tokens: Tensor, constrained: bool) -> tuple[Tensor, Tensor | None]:
        """(N,W) logits and their (N,) normalisers; for an ensemble, those of the mean probabilities.

        constrained: the logits will be changed. The normalisers are None if they will not, and are their own.
        """
        if len(self._models) == 1:
            logits = self._logits(0, tokens)
            return logits, log_normalisers(logits.float()) if constrained else None
        total = F.log_softmax(self._logits(0, tokens).float(), dim=1)
        for i in range(1, len(self._models)):
            torch.logaddexp(total, F.log_softmax(self._logits(i, tokens).float(), dim=1), out=total)
        # Rows with NaN or +∞ in one model are NaN throughout, here and in fairseq.
        return without_nan(total), torch.full_like(total[:, 0], math.log(len(self._models)))

    def _logits(self, i: int, tokens: Tensor) -> Tensor:
        """The (N,W) logits of model i, divided by the temperature; float32, or half precision as they are."""
        logits = self._models[i].logits(self._states[i], tokens)
        if logits.dtype == torch.float64:
            logits = logits.float()
        return logits if self._options.temperature == 1 else logits.float().div_(self._options.temperature)

    def _penalties(self, kind: Kind) -> dict[int, float]:
        """What is subtracted from the logits of single columns: ∞ if their words are forbidden."""
        options, columns = self._options, self._columns
        penalties = {columns.unk: options.unk_penalty} if options.unk_penalty else {}
        penalties[columns.pad] = math.inf
        if kind.early and not kind.forced:
            penalties[columns.eos] = math.inf
        return penalties

    def _constrains(self, kind: Kind) -> bool:
        """Whether `_constrain` changes the logits of this step."""
        looks_back = self._tables.tokens is not None and not kind.first
        return kind.last or kind.forced or looks_back or len(self._columns.suppress) > 0

    def _constrain(self, logits: Tensor, normalisers: Tensor, kind: Kind) -> None:
        """Set the logits of words that are forbidden besides those with penalties to −∞, in place, and force the words
        of a prefix."""
        options, tables, columns = self._options, self._tables, self._columns
        if kind.last:
            logits[:, : columns.eos].fill_(-torch.inf)
            logits[:, columns.eos + 1 :].fill_(-torch.inf)
        if kind.forced:
            _force_prefix(logits, normalisers, tables, self._beams.time, options, columns)
        elif len(columns.suppress):
            logits.index_fill_(1, columns.suppress, -torch.inf)
        if tables.tokens is not None and not kind.first:
            tokens = tables.tokens[: tables.live, :, : kind.steps].flatten(0, 1)
            block_repeated(tokens, logits, self._beams.now, options.no_repeat_ngram_size, columns)


def _force_prefix(
    logits: Tensor, normalisers: Tensor, tables: Tables, step: int, options: SearchOptions, columns: Columns
) -> None:
    """Allow only the prefix's next word, if there is one. If it is the end symbol, all hypotheses become the first one,
    as in fairseq: the n-best list of that sentence contains one hypothesis several times."""
    assert tables.prefix is not None
    words = tables.prefix[: tables.live, step]
    width = logits.shape[0] // tables.live
    forced = words.ne(options.pad)
    if bool(forced.any()):
        rows = forced.repeat_interleave(width)
        target = columns.of(words.repeat_interleave(width)[rows]).unsqueeze(1)
        given = logits[rows]
        logits[rows] = torch.full_like(given, -torch.inf).scatter_(1, target, given.gather(1, target))
    over = words.eq(options.eos)
    if width > 1 and bool(over.any()):
        tables.become_the_first(over)
        for tensor in (logits.view(tables.live, width, -1), normalisers.view(-1, width)):
            tensor[over] = tensor[over][:, :1].expand_as(tensor[over])


def _ends(ended: list[list[bool]], numbers: list[int], step: int, counts: list[int], beam: int) -> list[End]:
    """The hypotheses that end in this step, at most `beam` of each sentence in all: `counts` are how many it has."""
    found = []
    for number, slots in zip(numbers, ended, strict=True):
        for slot, ends in enumerate(slots):
            if ends and counts[number] < beam:
                counts[number] += 1
                found.append(End(number, step, slot))
    return found


def _fill_holes(done: list[bool], size: int) -> list[int]:
    """The unfinished sentences, and finished ones up to `size`, in an order in which most keep their places: the last
    unfinished ones fill the holes."""
    movers = [i for i in range(size, len(done)) if not done[i]]
    return [movers.pop() if done[i] and movers else i for i in range(size)]
