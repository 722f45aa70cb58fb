"""Lexical shortlists: for each source word, the target words that are likely in its translation. A search that is given
one chooses among the words of a batch's shortlists instead of the whole vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import read_lines

NULL = "NULL"  # a lexical table's source word for target words that translate none
_FREQUENT = 100  # of the most frequent target words, which are always allowed

Phrase = tuple[int, ...]


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

    A file with a single tab in its first line is a vocabulary map as CTranslate2 reads it: in each line a source
    phrase, a tab, and the target words that it allows, separated by spaces. Any other file is a lexical table as Marian
    reads it: in each line a target word, a source word and a probability. The target words of an empty phrase, or of
    the source word NULL, are always allowed. So are the symbols of the target dictionary, and its first 100 words, or
    twice the beam if that is more: dictionaries are sorted by frequency, and a step chooses that many candidates.

    Raises InputError if the file cannot be read, is empty, has a line of another form, or has words that are not in the
    dictionaries.
    """
    lines = read_lines(path)
    entries = _vocabulary_map(path, lines) if lines[0].count("\t") == 1 else _lexical_table(path, lines)
    unknown: dict[tuple[str, str], int] = {}
    lists: dict[Phrase, set[int]] = {(): {target.bos(), target.pad(), target.eos(), target.unk()}}
    lists[()].update(frequent(target, beam))
    for number, (phrase, words) in enumerate(entries, 1):
        for dictionary, side, some in ((source, "source", phrase), (target, "target", words)):
            for word in some:
                if word not in dictionary:
                    unknown.setdefault((side, word), number)
        lists.setdefault(tuple(map(source.index, phrase)), set()).update(map(target.index, words))
    if unknown:
        (side, word), number = next(iter(unknown.items()))
        raise InputError(
            f"{path} has {len(unknown):,} words that are not in the model's dictionaries, the first in line {number}: "
            f"{side} word {word[:80]!r}. It must be made with the model's own dictionaries and subwords"
        )
    return Shortlist(lists)


def frequent(target: Any, beam: int) -> range:
    """The target dictionary's frequent words, which are always allowed in searches with this beam."""
    return range(target.nspecial, min(target.nspecial + max(_FREQUENT, 2 * beam), len(target)))


def _lexical_table(path: Path, lines: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    for number, line in enumerate(lines, 1):
        fields = re.split("[ \t]+", line.strip(" \t"))  # a word may have spaces of other kinds
        if len(fields) != 3 or not _is_probability(fields[2]):
            raise InputError(
                f"{path}, line {number}: expected a target word, a source word and a probability, got {line[:80]!r}"
            )
        yield ([] if fields[1] == NULL else [fields[1]]), [fields[0]]


def _is_probability(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def _vocabulary_map(path: Path, lines: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    for number, line in enumerate(lines, 1):
        phrase, tab, words = line.partition("\t")
        if not tab or "\t" in words:
            raise InputError(
                f"{path}, line {number}: expected a source phrase, a tab and target words, got {line[:80]!r}"
            )
        yield _split(phrase), _split(words)


def _split(text: str) -> list[str]:
    return [word for word in text.split(" ") if word]
