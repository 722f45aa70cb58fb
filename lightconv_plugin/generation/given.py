"""Scores given translations with a model, as its search would have scored them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightconv_plugin.generation.beam_search import SearchOptions
from lightconv_plugin.generation.searcher import Found, TranslationError, collate
from lightconv_plugin.generation.translation_models import TranslationModels
from lightconv_plugin.generation.translations import Hypothesis, Translation, read_line

_ROWS = 512  # number of positions whose logits over the whole vocabulary are in memory at once


class GivenScorer:
    """Scores sentences given as indices, in float32, with one pass of encoder and decoder per batch.

    Raises TranslationError if the target language cannot be split into the pieces of the dictionary.
    """

    def __init__(self, opened: TranslationModels, options: SearchOptions, device: str):
        if opened.pipeline.target is None:
            raise TranslationError(
                f"cannot split {opened.target_lang} into the pieces of the dictionary: there are no BPE merges and no "
                "sentencepiece model for it beside the data; give `bpe_codes` or `sentencepiece` for both languages"
            )
        self._models, self._options, self._device = opened.models, options, torch.device(device)
        self._words, self._encode = opened.target, opened.pipeline.target.encode()
        self._longest = min(model.config.decoder.max_positions for model in opened.models)

    def indices(self, reference: str) -> tuple[list[int], str | None]:
        """A reference as the decoder reads it, with its end symbol, and what is wrong with it, if anything."""
        words = self._words
        own = {words.pad(), words.bos(), words.eos()}
        found = [words.unk() if i in own else i for i in map(words.index, self._encode(reference))]
        if len(found) >= self._longest:
            return [], f"the reference is too long: {len(found)} pieces, the model takes {self._longest - 1}"
        return [*found, words.eos()], None

    def pieces(self, indices: Sequence[int]) -> tuple[str, ...]:
        """The pieces of the dictionary, without the end symbol."""
        return tuple(self._words[i] for i in indices[:-1])

    @torch.no_grad()
    def score(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[Found]:
        """Each target with its score; sources and targets include their end symbols."""
        options, pad = self._options, self._options.pad
        source, _ = collate(sources, pad, self._device)
        # Pads are on the right, where a causal decoder does not see them.
        target = torch.nn.utils.rnn.pad_sequence([torch.tensor(t) for t in targets], True, pad).to(self._device)
        read = torch.cat([torch.full_like(target[:, :1], options.eos), target[:, :-1]], dim=1)
        total: Tensor | None = None
        for model in self._models:
            found = self._log_probabilities(model, source, read, target)
            total = found if total is None else torch.logaddexp(total, found)
        assert total is not None
        total -= math.log(len(self._models))
        total -= options.unk_penalty * target.eq(options.unk)
        sums = total.masked_fill(target.eq(pad), 0).sum(dim=1).tolist()
        return [
            Found(list(given), value / len(given) ** options.len_penalty / math.log(2))
            for given, value in zip(targets, sums, strict=True)
        ]

    def _log_probabilities(self, model, source: Tensor, read: Tensor, target: Tensor) -> Tensor:
        """(B,T) float64: the log-probability of each word of target, given those before it."""
        decoder = model.decoder
        rows = decoder(read, model.encode(source)).transpose(0, 1).flatten(0, 1)
        wanted, found = target.flatten(), []
        for begin in range(0, len(rows), _ROWS):
            logits = decoder.logits(rows[begin : begin + _ROWS].unsqueeze(1))[0].float() / self._options.temperature
            logits = logits.log_softmax(dim=1)
            found.append(logits.gather(1, wanted[begin : begin + _ROWS, None])[:, 0].double())
        return torch.cat(found).view_as(target)


def score_given(
    scorer: GivenScorer,
    source_indices: Callable[[str], tuple[list[int], str | None]],
    make_batches: Callable[[dict[int, Sequence[int]]], list[list[int]]],
    lines: Sequence[str | bytes],
    references: Sequence[str | bytes],
    progress: Callable[[int], object] | None,
) -> list[Translation]:
    """See Translator.score; `source_indices` and `make_batches` make its sentences and batches."""
    if len(lines) != len(references):
        raise TranslationError(f"`references` must be one for each of {len(lines)} lines, got {len(references)}")
    results: list[Translation] = []
    texts: list[str] = []
    pairs: dict[int, tuple[list[int], list[int]]] = {}
    for number, (line, reference) in enumerate(zip(lines, references, strict=True)):
        source, problem = read_line(line)
        text, wrong = read_line(reference)
        problem = problem or (wrong and f"the reference is {wrong}")
        texts.append(text)
        if problem is None and not source.strip() and text.strip():
            problem = "empty, but its reference is not"
        if problem is None and source.strip():
            indices, problem = source_indices(source)
            target, wrong = scorer.indices(text)
            problem = problem or wrong
            if problem is None and indices:
                pairs[number] = indices, target
        results.append(Translation(source, problem=problem))
    if progress is not None and len(results) > len(pairs):
        progress(len(results) - len(pairs))
    for batch in make_batches({number: max(pair, key=len) for number, pair in pairs.items()}):
        found = scorer.score([pairs[number][0] for number in batch], [pairs[number][1] for number in batch])
        for number, given in zip(batch, found, strict=True):
            hypothesis = Hypothesis(texts[number], given.score, scorer.pieces(given.tokens))
            results[number] = Translation(results[number].source, (hypothesis,))
        if progress is not None:
            progress(len(batch))
    return results
