"""Learns a lexical table from binarised parallel text, with IBM Model 1 (Brown et al. 1993).

A shortlist needs the likely translations of a word, not an alignment, so the simplest model is enough. Aligners with
better ones (eflomal, fast_align) are not available without a compiler.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_write
from lightconv_plugin.scoring.measuring import languages_of, stem_of
from lightconv_plugin.text.dictionary import Dictionary
from lightconv_plugin.text.shortlist import NULL

_PAIRS = 1 << 21  # pairs of words, padding included, that are in memory at once
_PAD = -1

Batch = tuple[Tensor, Tensor]  # the words of both sides, (B,S) and (B,T)


@dataclass(frozen=True)
class ParallelText:
    """Dictionaries, and pairs of sentences as indices without their ends."""

    source: Dictionary
    target: Dictionary
    pairs: Sequence[tuple[Tensor, Tensor]]


def read_text(data: Path, source_lang: str | None, target_lang: str | None, most: int) -> ParallelText:
    """The training text in a folder of binarised data: at most `most` pairs of sentences, spread evenly over it.

    A language that is not given is that of the files' names. Raises InputError if there is no such text, or if several
    fit.
    """
    from fairseq.data import data_utils

    source_lang, target_lang = languages_of(data, "train", (source_lang, target_lang))
    files = stem_of(data, "train", source_lang, target_lang)
    dictionaries, texts = [], []
    for lang in (source_lang, target_lang):
        stem = f"{files}.{lang}"
        for path in (data / f"dict.{lang}.txt", Path(f"{stem}.idx")):
            if not path.is_file():
                raise InputError(f"{path} is missing: expected a folder of binarised {source_lang}-{target_lang} text")
        dictionaries.append(Dictionary.load(data / f"dict.{lang}.txt"))
        texts.append(data_utils.load_indexed_dataset(stem, None))
    pairs = list(_pairs(texts, dictionaries[0].eos(), most))
    if not pairs:
        raise InputError(f"{data} has no training sentences with words in both languages")
    source, target = dictionaries
    return ParallelText(source, target, pairs)


def _pairs(texts: Sequence[Any], eos: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    length = min(map(len, texts))
    for i in range(0, length, max(-(-length // most), 1)):
        source, target = (text[i].long() for text in texts)
        source, target = source[source != eos], target[target != eos]
        if len(source) and len(target):
            yield source, target


class Model1:
    """p(target word | source word) for the pairs of words that occur in a pair of sentences.

    Each source sentence has one more word, which stands for none and has the first index after the dictionary's.

    Args:
        text: what it is learned from.
        iterations: of expectation-maximisation, from uniform probabilities.

    Attributes:
        sources, targets, probabilities: of each pair of words, sorted by source word and then by target word.
    """

    def __init__(self, text: ParallelText, iterations: int):
        self._null, self._words = len(text.source), len(text.target)
        self._padding = (self._null + 1) * self._words  # larger than any other code
        batches = list(_batches(text.pairs, self._null))
        codes = _union(torch.tensor([self._padding]), (self._codes(batch).unique() for batch in batches))
        self.sources, self.targets = codes[:-1] // self._words, codes[:-1] % self._words
        self.probabilities = torch.ones(len(codes) - 1)
        places = [torch.searchsorted(codes, self._codes(batch)).int() for batch in batches]
        for _ in range(iterations):
            self._improve(places)

    def _codes(self, batch: Batch) -> Tensor:
        """(B,T,S): a number for each pair of words, in the order of source words and then of target words."""
        source, target = batch[0].unsqueeze(1), batch[1].unsqueeze(2)
        real = (source != _PAD) & (target != _PAD)
        return torch.where(real, source * self._words + target, self._padding)

    def _improve(self, places: Sequence[Tensor]) -> None:
        """One iteration; places: of each batch (B,T,S), the index of each pair of words, the last one for padding."""
        chances = torch.cat([self.probabilities, torch.zeros(1)])
        counts = torch.zeros_like(chances)
        for batch in places:
            # Each target word is shared out among the source words that may have given rise to it.
            some = chances[batch]
            some /= some.sum(dim=2, keepdim=True).clamp_min_(torch.finfo().tiny)
            counts.index_add_(0, batch.flatten(), some.flatten())
        counts = counts[:-1]
        totals = torch.zeros(self._null + 1).index_add_(0, self.sources, counts)
        self.probabilities = counts / totals[self.sources]

    def best(self, count: int, least: float) -> tuple[Tensor, Tensor, Tensor]:
        """(sources, targets, probabilities) of the `count` likeliest target words of each source word, best first,
        without those below `least`."""
        order = self.probabilities.argsort(descending=True, stable=True)
        order = order[self.sources[order].argsort(stable=True)]
        first = torch.searchsorted(self.sources, self.sources)  # of each pair's source word
        rank = torch.arange(len(order)) - first
        kept = order[(rank < count) & (self.probabilities[order] >= least) & (self.sources[order] != self._null)]
        return self.sources[kept], self.targets[kept], self.probabilities[kept]


def _union(union: Tensor, others: Iterator[Tensor]) -> Tensor:
    """The numbers in any of these tensors, sorted."""
    waiting: list[Tensor] = []
    for some in others:
        waiting.append(some)
        if sum(map(len, waiting)) > max(_PAIRS, len(union)):
            union, waiting = torch.cat([union, *waiting]).unique(), []
    return torch.cat([union, *waiting]).unique()


def _batches(pairs: Sequence[tuple[Tensor, Tensor]], null: int) -> Iterator[Batch]:
    """The pairs in the order of their lengths, as few at a time as memory needs, each source with `null` before it."""
    begin, ordered = 0, sorted(pairs, key=lambda pair: (len(pair[1]), len(pair[0])))
    while begin < len(ordered):
        end, longest = begin, 0
        while end < len(ordered):
            longest = max(longest, len(ordered[end][0]) + 1)
            if end > begin and (end + 1 - begin) * longest * len(ordered[end][1]) > _PAIRS:
                break
            end += 1
        some, begin = ordered[begin:end], end
        none = torch.tensor([null])
        yield _padded([torch.cat([none, source]) for source, _ in some]), _padded([target for _, target in some])


def _padded(sentences: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=_PAD)


def always_allowed(text: ParallelText, frequent: int) -> list[tuple[int, float]]:
    """The `frequent` most frequent target words, and all that have no letter (digits, punctuation), each with its share
    of the text."""
    counts = torch.cat([target for _, target in text.pairs]).bincount(minlength=len(text.target))
    order = counts.argsort(descending=True, stable=True).tolist()
    total = int(counts.sum())
    return [
        (word, int(counts[word]) / total)
        for rank, word in enumerate(order)
        if counts[word] and (rank < frequent or not _has_letter(text.target[word]))
    ]


def _has_letter(word: str) -> bool:
    # Moses' tokeniser writes some punctuation as an entity, such as &quot;
    return any(character.isalpha() for character in html.unescape(word))


def write_table(
    path: Path, text: ParallelText, lists: tuple[Tensor, Tensor, Tensor], always: Sequence[tuple[int, float]]
) -> None:
    """Write `Model1.best` and `always_allowed` as a lexical table: target word, source word, probability.

    Words that the format cannot hold, because they have a space or mean something else in it, are left out.
    """
    rows = [(text.target[word], NULL, share) for word, share in always]
    for source, target, probability in zip(*(column.tolist() for column in lists), strict=True):
        if text.source[source] != NULL:
            rows.append((text.target[target], text.source[source], probability))
    with atomic_write(path) as file:
        for target, source, probability in rows:
            if not any(space in source + target for space in " \t"):
                file.write(f"{target} {source} {probability:.6g}\n")
