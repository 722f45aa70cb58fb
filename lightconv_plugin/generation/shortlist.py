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
        self._lists = {phrase: frozenset(words) for phrase, words in lists.items()}
        self._always = self._lists.pop((), frozenset())
        self._lengths = sorted({len(phrase) for phrase in self._lists})

    def words(self, source: Tensor, prefix: Tensor | None = None) -> Tensor:
        """(W,) int64 in ascending order, on the CPU: the words that the sentences of source (S,T) allow together, and
        those of prefix (S,P), which are forced."""
        phrases = {phrase for sentence in source.tolist() for phrase in self._phrases(sentence)}
        allowed = self._always.union(*(self._lists[phrase] for phrase in phrases))
        if prefix is not None:
            allowed = allowed.union(prefix.flatten().tolist())
        return torch.tensor(sorted(allowed), dtype=torch.int64)

    def _phrases(self, sentence: Sequence[int]) -> Iterator[Phrase]:
        """Those of the sentence's phrases that have a list."""
        for length in self._lengths:
            for begin in range(len(sentence) - length + 1):
                phrase = tuple(sentence[begin : begin + length])
                if phrase in self._lists:
                    yield phrase


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
