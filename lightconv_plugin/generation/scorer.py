"""Scores given translations with a model, as its search would have scored them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightconv_plugin.errors import InputError, TranslationError
from lightconv_plugin.generation.batch_search import enough_memory
from lightconv_plugin.generation.beam_search import SearchOptions
from lightconv_plugin.generation.translation_models import Encoded, TranslationModels, collate, word_indices
from lightconv_plugin.generation.translations import Hypothesis, Translation, read_line
from lightconv_plugin.modules.transformer import EncoderDecoder

WHY_NAN = "are its weights NaN, or is `temperature` near 0"
_ROWS = 512  # number of positions whose logits over the whole vocabulary are in memory at once


class Scorer:
    """Scores sentences in float32, with one pass of encoder and decoder per batch.

    Raises TranslationError if the target language cannot be split into the pieces of the dictionary.
    """

    def __init__(self, opened: TranslationModels, options: SearchOptions):
        if opened.pipeline.target is None:
            raise TranslationError(
                f"cannot split {opened.target_lang} into the pieces of its dictionary: there are no BPE merges and no "
                "sentencepiece model that fit; give `bpe_codes` or `sentencepiece` of both languages with a checkpoint "
                "or at its export, or set `bpe_codes` to none for text that is already split"
            )
        self._opened, self._options = opened, options
        try:
            self._encode = opened.pipeline.target()
        except InputError as error:  # merges that are damaged, or a tokeniser that is not installed
            raise TranslationError(str(error)) from error
        self._longest = min(model.config.decoder.max_positions for model in opened.models)

    def score(
        self,
        lines: Sequence[str | bytes],
        references: Sequence[str | bytes],
        make_batches: Callable[[dict[int, Sequence[int]]], list[list[int]]],
        progress: Callable[[int], object] | None,
    ) -> list[Translation]:
        """See Translator.score; make_batches: divides sentences into batches of their keys."""
        if len(lines) != len(references):
            raise TranslationError(f"`references` must be one for each of {len(lines)} lines, got {len(references)}")
        results: list[Translation] = []
        pairs: dict[int, tuple[list[int], list[int]]] = {}
        for number, (line, reference) in enumerate(zip(lines, references, strict=True)):
            source, target = self._pair(line, reference)
            if source.problem is None and source.indices:
                pairs[number] = source.indices, target
            results.append(Translation(read_line(line)[0], problem=source.problem, cut=source.cut))
        if progress is not None and len(results) > len(pairs):
            progress(len(results) - len(pairs))
        for batch in make_batches({number: max(pair, key=len) for number, pair in pairs.items()}):
            sources, targets = zip(*(pairs[number] for number in batch), strict=True)
            width = max(map(len, (*sources, *targets)))
            with enough_memory(f"on a batch of {len(batch)} × {width} pieces: reduce `batch_tokens`"):
                scores = self._scores(sources, targets)
            if any(map(math.isnan, scores)):
                raise TranslationError(f"the model gives a reference no probability: {WHY_NAN}?")
            for number, target, score in zip(batch, targets, scores, strict=True):
                pieces = tuple(self._opened.target[i] for i in target[:-1])
                hypothesis = Hypothesis(read_line(references[number])[0], score, pieces)
                results[number] = replace(results[number], hypotheses=(hypothesis,))
            if progress is not None:
                progress(len(batch))
        return results

    def _pair(self, line: str | bytes, reference: str | bytes) -> tuple[Encoded, list[int]]:
        """Line and reference as the models read them, with their end symbols; `problem` is what is wrong with either of
        them."""
        source, problem = read_line(line)
        target, wrong = read_line(reference)
        problem = problem or (wrong and f"the reference is {wrong}")
        if problem is None and not source.strip() and target.strip():
            problem = "empty, but its reference is not"
        if problem is not None or not source.strip():
            return Encoded([], problem), []
        read = self._opened.encode(source)
        if read.problem is None and not read.indices:
            return Encoded([], "without a word, but its reference is not" if target.strip() else None), []
        words = word_indices(self._opened.target, self._encode(target))
        if read.problem is None and len(words) >= self._longest:
            long = f"the reference is too long: {len(words)} pieces, the model takes {self._longest - 1}"
            read = Encoded([], long)
        return read, [*words, self._options.eos]

    @torch.no_grad()
    def _scores(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[float]:
        """The score of each target; sources and targets include their end symbols."""
        options, models = self._options, self._opened.models
        device = next(models[0].parameters()).device
        source = collate(sources, options.pad).to(device)
        # Pads are on the right, where a causal decoder does not see them.
        rows = [torch.tensor(target) for target in targets]
        target = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=options.pad).to(device)
        read = torch.cat([torch.full_like(target[:, :1], options.eos), target[:, :-1]], dim=1)
        total: Tensor | None = None
        for model in models:
            chances = self._log_probabilities(model, source, read, target)
            total = chances if total is None else torch.logaddexp(total, chances)
        assert total is not None
        total -= math.log(len(models))
        total -= options.unk_penalty * target.eq(options.unk)
        sums = total.masked_fill(target.eq(options.pad), 0).sum(dim=1)
        lengths = torch.tensor([len(target) for target in targets], dtype=sums.dtype, device=device)
        return (sums / lengths.pow(options.len_penalty) / math.log(2)).tolist()

    def _log_probabilities(self, model: EncoderDecoder, source: Tensor, read: Tensor, target: Tensor) -> Tensor:
        """(B,T) float64: the log-probability of each word of target, given those before it."""
        decoder = model.decoder
        rows = decoder(read, model.encode(source)).transpose(0, 1).flatten(0, 1)
        words, chances = target.flatten(), []
        for begin in range(0, len(rows), _ROWS):
            logits = decoder.logits(rows[begin : begin + _ROWS].unsqueeze(1))[0].float() / self._options.temperature
            logits = logits.log_softmax(dim=1)
            chances.append(logits.gather(1, words[begin : begin + _ROWS, None])[:, 0].double())
        return torch.cat(chances).view_as(target)
