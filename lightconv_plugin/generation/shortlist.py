"""Lexical shortlists: for each source word, the target words that are likely in its translation. A search that is given
one chooses among the words of a batch's shortlists instead of the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightconv_plugin.text.shortlist import Phrase, read_lists

_FREQUENT = 100  # of the most frequent target words, which are always allowed


class Shortlist:
    """The words that may be chosen for a batch.

    Args:
        lists: by source phrase, one or several words in a row, the target words that it allows; those of the empty
            phrase are always allowed. The symbols of the target dictionary must be among them: the search needs them.
    """

    def __init__(self, lists: Mapping[Phrase, Iterable[int]]):
        long = {phrase: frozenset(words) for phrase, words in lists.items() if len(phrase) > 1}
        self._long, self._lengths = long, sorted({len(phrase) for phrase in long})
        # The words that word w allows are _allowed[_begins[w] : _begins[w + 1]].
        single = {phrase[0]: sorted(set(words)) for phrase, words in lists.items() if len(phrase) == 1}
        sizes = [len(single.get(word, ())) for word in range(max(single, default=-1) + 1)]
        self._begins = torch.tensor([0, *sizes]).cumsum(0)
        self._allowed = torch.tensor([word for _, words in sorted(single.items()) for word in words], dtype=torch.int64)
        always = torch.tensor(sorted(set(lists.get((), ()))), dtype=torch.int64)
        last = max((int(words.max()) for words in (self._allowed, always) if len(words)), default=-1)
        self._always = torch.zeros(last + 1, dtype=torch.bool).index_fill_(0, always, True)

    def words(self, source: Tensor, prefix: Tensor | None = None) -> Tensor:
        """(W,) int64 in ascending order, on the CPU: the words that the sentences of source (S,T) allow together, and
        those of prefix (S,P), which are forced."""
        known = source.cpu().unique()
        known = known[(known >= 0) & (known < len(self._begins) - 1)]
        begins, ends = self._begins[known], self._begins[known + 1]
        # Positions in _allowed: 0, 1, 2 … shifted, for each word, to where its own begin.
        sizes = ends - begins
        places = torch.arange(int(sizes.sum())) + (begins - sizes.cumsum(0) + sizes).repeat_interleave(sizes)
        words = self._always.index_fill(0, self._allowed[places], True).nonzero()[:, 0]
        more = {word for sentence in source.tolist() for word in self._of_phrases(sentence)} if self._long else set()
        if prefix is not None:
            more.update(prefix.flatten().tolist())
        return torch.cat([words, torch.tensor(sorted(more), dtype=torch.int64)]).unique() if more else words

    def _of_phrases(self, sentence: Sequence[int]) -> Iterator[int]:
        """The words that the sentence's phrases of several words allow."""
        for length in self._lengths:
            for begin in range(len(sentence) - length + 1):
                yield from self._long.get(tuple(sentence[begin : begin + length]), ())


def read_shortlist(path: Path, source: Any, target: Any, beam: int) -> Shortlist:
    """The shortlist in a file, for models with these dictionaries (text/dictionary.py or fairseq's), and for searches
    with this beam.

    Besides the words that the file always allows, these are always allowed: the symbols of the target dictionary, and
    its first 100 words, or twice the beam if that is more. Dictionaries are sorted by frequency, and a step chooses
    that many candidates.

    Raises the errors of `read_lists`.
    """
    lists = read_lists(path, source, target)
    always = lists.setdefault((), set())
    always.update((target.bos(), target.pad(), target.eos(), target.unk()))
    always.update(frequent(target, beam))
    return Shortlist(lists)


def frequent(target: Any, beam: int) -> range:
    """The target dictionary's frequent words, which are always allowed in searches with this beam."""
    return range(target.nspecial, min(target.nspecial + max(_FREQUENT, 2 * beam), len(target)))
