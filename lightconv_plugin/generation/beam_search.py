"""Beam search over StepModels, by the rules of fairseq's SequenceGenerator.

Its rules, which decide about every result:

- Each sentence has `beam` hypotheses. Of their continuations the 2 · beam best are candidates; those among the first
  `beam` that end the sentence are finished, and the best `beam` that do not end it go on.
- A sentence is done, and leaves the batch, once it has `beam` finished hypotheses or reaches the maximum length, where
  only the end symbol is possible.
- Finished hypotheses are compared by score / length^len_penalty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightconv_plugin.generation.candidates import best_continuations, log_normalisers
from lightconv_plugin.generation.ngrams import block_repeated
from lightconv_plugin.generation.steps import State, StepModel


@dataclass(frozen=True)
class SearchOptions:
    """What fairseq's SequenceGenerator calls by the same names; suppress: indices of tokens_to_suppress."""

    pad: int
    unk: int
    eos: int
    beam_size: int = 5
    min_len: int = 1
    normalize_scores: bool = True
    len_penalty: float = 1.0
    unk_penalty: float = 0.0
    temperature: float = 1.0
    match_source_len: bool = False
    no_repeat_ngram_size: int = 0
    suppress: tuple[int, ...] = ()


@dataclass
class _Live:
    """The sentences that are still searched, S of them, each with `beam` hypotheses.

    tokens: (S, beam, max_len + 2), the beginning symbol first. scores: (S, beam, max_len + 1), cumulative.
    ignored: (S, beam), hypotheses that are only there to fill the beam.
    numbers: which sentence of the batch each is.
    """

    tokens: Tensor
    scores: Tensor
    ignored: Tensor
    lengths: Tensor
    prefix: Tensor | None
    numbers: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.numbers)

    def keep(self, order: list[int]) -> Tensor:
        """Sentence i becomes sentence order[i]; the order as a tensor."""
        index = torch.tensor(order, device=self.tokens.device)
        for name in ("tokens", "scores", "ignored", "lengths", "prefix"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name)[index])
        self.numbers = [self.numbers[i] for i in order]
        return index


@torch.no_grad()
def beam_search(
    models: Sequence[StepModel],
    states: Sequence[State],
    lengths: Tensor,
    options: SearchOptions,
    max_len: int,
    *,
    prefix: Tensor | None = None,
    begin: int | None = None,
) -> list[list[dict[str, Tensor]]]:
    """The finished hypotheses of each sentence, best first.

    Args:
        models, states: an ensemble, and the state in which each starts (StepModel.start with beam_size hypotheses).
        lengths: (S,) source lengths; read for match_source_len only.
        max_len: words of a hypothesis, the end not counted.
        prefix: (S,P) words that hypotheses must begin with, pads where a sentence has fewer.
        begin: the symbol before the first word, eos unless given.

    Returns:
        For each sentence at most beam_size dicts as fairseq's generator returns them, sorted: tokens (n,) with the end,
        score and positional_scores (n,) in float32; attention and alignment are empty.

    Raises:
        RuntimeError: a sentence without a single possible hypothesis (weights with NaN, a forbidden prefix).
    """
    sentences, beam, device = lengths.shape[0], options.beam_size, lengths.device
    live = _Live(
        tokens=torch.full((sentences, beam, max_len + 2), options.pad, dtype=torch.int64, device=device),
        scores=torch.zeros(sentences, beam, max_len + 1, device=device),
        ignored=torch.zeros(sentences, beam, dtype=torch.bool, device=device),
        lengths=lengths,
        prefix=prefix,
        numbers=list(range(sentences)),
    )
    live.tokens[:, :, 0] = options.eos if begin is None else begin
    finished: list[list[dict[str, Tensor]]] = [[] for _ in range(sentences)]
    slots = torch.arange(2 * beam, device=device)

    for step in range(max_len + 1):
        # At first all hypotheses of a sentence are the same: one row is enough.
        width = 1 if step == 0 else beam
        logits, normalisers = _predict(models, states, live.tokens[:, :width, step].flatten(), options)
        _constrain(logits, normalisers, live, step, max_len, options)
        count = min(2 * beam, width * logits.shape[1] - 1)
        scores, words, parents = best_continuations(
            logits, normalisers, live.scores[:, :, step - 1] if step else None, len(live), count
        )

        ends = words.eq(options.eos) & scores.ne(-torch.inf)
        ends[:, :beam] &= ~live.ignored
        complete = ends[:, :beam]
        if bool(complete.any()):
            _finish(complete, scores, parents, live, finished, step, options)
            enough = beam if step < max_len else 1
            done = [len(finished[number]) >= enough for number in live.numbers]
            if all(done):
                return [_ranked(hypotheses) for hypotheses in finished]
            if any(done):
                index = live.keep(_fill_holes(done))
                for model, state in zip(models, states, strict=True):
                    model.keep(state, index)
                ends, scores, words, parents = ends[index], scores[index], words[index], parents[index]
        if step == max_len:
            break

        # The first `beam` candidates that do not end go on; where there are fewer, others fill up and are ignored.
        ends[:, :beam] |= live.ignored
        order, chosen = (slots[: ends.shape[1]] + ends * (2 * beam)).topk(beam, dim=1, largest=False)
        live.ignored = order.ge(2 * beam)
        parents = parents.gather(1, chosen)
        before = slice(step + 1)
        live.tokens[:, :, before] = live.tokens[:, :, before].gather(1, parents.unsqueeze(2).expand(-1, -1, step + 1))
        live.tokens[:, :, step + 1] = words.gather(1, chosen)
        if step:
            live.scores[:, :, :step] = live.scores[:, :, :step].gather(1, parents.unsqueeze(2).expand(-1, -1, step))
        live.scores[:, :, step] = scores.gather(1, chosen)
        rows = (parents + torch.arange(0, len(live) * beam, beam, device=device).unsqueeze(1)).flatten()
        for model, state in zip(models, states, strict=True):
            model.reorder(state, rows)

    # Sentences that found fewer than `beam`, none of them in the last step.
    if lost := [number for number in live.numbers if not finished[number]]:
        raise RuntimeError(f"no hypothesis of sentences {lost} of the batch has a probability above 0")
    return [_ranked(hypotheses) for hypotheses in finished]


def _predict(
    models: Sequence[StepModel], states: Sequence[State], tokens: Tensor, options: SearchOptions
) -> tuple[Tensor, Tensor]:
    """(N,V) logits in float32 and their (N,) normalisers; for an ensemble the mean of probabilities."""
    total = None
    for model, state in zip(models, states, strict=True):
        logits = model.step(state, tokens).float()
        if options.temperature != 1:
            logits.div_(options.temperature)
        normalisers = log_normalisers(logits)
        if len(models) == 1:
            return logits, normalisers
        logits -= normalisers.unsqueeze(1)
        total = logits if total is None else torch.logaddexp(total, logits, out=total)
    return total, torch.full_like(normalisers, math.log(len(models)))


def _constrain(
    logits: Tensor,
    normalisers: Tensor,
    live: _Live,
    step: int,
    max_len: int,
    options: SearchOptions,
) -> None:
    """Sets what may not be chosen to −∞, in place, and forces the words of a prefix."""
    logits[:, options.pad] = -torch.inf
    if options.unk_penalty:
        logits[:, options.unk] -= options.unk_penalty
    if step >= max_len:
        logits[:, : options.eos] = -torch.inf
        logits[:, options.eos + 1 :] = -torch.inf
    if live.prefix is not None and step < live.prefix.shape[1] and step < max_len:
        _force_prefix(logits, normalisers, live, step, options)
    else:
        if step < options.min_len:
            logits[:, options.eos] = -torch.inf
        if options.suppress:
            logits[:, list(options.suppress)] = -torch.inf
    if options.no_repeat_ngram_size > 0 and step > 0:
        block_repeated(live.tokens.flatten(0, 1), logits, step, options.no_repeat_ngram_size)


def _force_prefix(logits: Tensor, normalisers: Tensor, live: _Live, step: int, options: SearchOptions) -> None:
    """Only the prefix's next word stays possible, where there is one. Where it is the end, all hypotheses become the
    first, as in fairseq: the n-best list of such a sentence holds one hypothesis several times."""
    words = live.prefix[:, step]
    width = logits.shape[0] // len(live)
    forced = words.ne(options.pad)
    if bool(forced.any()):
        rows = forced.repeat_interleave(width)
        target = words.repeat_interleave(width)[rows].unsqueeze(1)
        given = logits[rows]
        logits[rows] = torch.full_like(given, -torch.inf).scatter_(1, target, given.gather(1, target))
    over = words.eq(options.eos)
    if width > 1 and bool(over.any()):
        for tensor in (live.tokens, live.scores, logits.view(len(live), width, -1), normalisers.view(-1, width)):
            tensor[over] = tensor[over][:, :1].expand_as(tensor[over])


def _finish(
    complete: Tensor,
    scores: Tensor,
    parents: Tensor,
    live: _Live,
    finished: list[list[dict[str, Tensor]]],
    step: int,
    options: SearchOptions,
) -> None:
    """Appends the hypotheses that end here, `complete` (S,beam) among the candidates, to their sentences' lists."""
    sentences, slots = complete.nonzero(as_tuple=True)
    hypotheses = parents[sentences, slots]
    totals = scores[sentences, slots]
    tokens = live.tokens[sentences, hypotheses, 1 : step + 2]
    tokens[:, step] = options.eos
    cumulative = live.scores[sentences, hypotheses, : step + 1]
    cumulative[:, step] = totals
    positional = torch.cat([cumulative[:, :1], cumulative.diff(dim=1)], dim=1)
    if options.normalize_scores:
        totals = totals / (step + 1) ** options.len_penalty
    if options.match_source_len:
        totals = totals.masked_fill(step > live.lengths[sentences], -torch.inf)
    for i, sentence in enumerate(sentences.tolist()):
        hypotheses_of_sentence = finished[live.numbers[sentence]]
        if len(hypotheses_of_sentence) < options.beam_size:
            hypotheses_of_sentence.append(
                {
                    "tokens": tokens[i],
                    "score": totals[i],
                    "attention": torch.empty(0),
                    "alignment": torch.empty(0),
                    "positional_scores": positional[i],
                }
            )


def _fill_holes(done: list[bool]) -> list[int]:
    """The unfinished sentences, in an order in which most keep their places: the last ones fill the holes."""
    remaining = done.count(False)
    movers = [i for i in range(remaining, len(done)) if not done[i]]
    return [i if not done[i] else movers.pop() for i in range(remaining)]


def _ranked(hypotheses: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Sorted by score, best first; ties in the order in which they finished."""
    scores = torch.stack([hypothesis["score"] for hypothesis in hypotheses]).tolist() if hypotheses else []
    return [hypotheses[i] for i in sorted(range(len(hypotheses)), key=lambda i: -scores[i])]
