"""Files of lexical shortlists: for each source word, the target words that are likely in its translation.

A file with a single tab in its first line is a vocabulary map as CTranslate2 reads it: in each line a source phrase, a
tab, and the target words that it allows, separated by spaces; of a phrase's lines, the last one counts. Any other file
is a lexical table as Marian reads it: in each line a target word, a source word and a probability. The target words of
an empty phrase, or of the source word NULL, are always allowed. The target word NULL, for source words without a
translation, allows nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import read_lines

NULL = "NULL"  # a lexical table's source word for target words that translate none, and the other way around
NO_SHORTLIST = Path("none")  # instead of a file: the whole vocabulary

Phrase = tuple[int, ...]
Entry = tuple[int, list[str], list[str]]


def read_lists(path: Path, source: Any, target: Any) -> dict[Phrase, set[int]]:
    """The target words of each source phrase in a file, as indices of these dictionaries (dictionary.py or fairseq's).

    Raises InputError if the file cannot be read, is empty, has a line of another form, or has words that are not in the
    dictionaries.
    """
    unknown: dict[tuple[str, str], int] = {}
    lists: dict[Phrase, set[int]] = {}
    for number, phrase, words in entries(path):
        if words == [NULL] and NULL not in target:
            continue
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
    return lists


def entries(path: Path) -> Iterator[Entry]:
    """Of each line of a file that counts, its number, the words of the source phrase, and target words that it allows;
    [] is the empty phrase.

    Raises InputError if the file cannot be read, is empty, or has a line of another form.
    """
    lines = read_lines(path)
    return _vocabulary_map(path, lines) if lines[0].count("\t") == 1 else _lexical_table(path, lines)


def _lexical_table(path: Path, lines: Sequence[str]) -> Iterator[Entry]:
    for number, line in enumerate(lines, 1):
        fields = re.split("[ \t]+", line.strip(" \t"), maxsplit=3)  # a word may have spaces of other kinds
        if len(fields) != 3 or not _is_probability(fields[2]):
            raise InputError(
                f"{path}, line {number}: expected a target word, a source word and a probability, got {line[:80]!r}"
            )
        yield number, ([] if fields[1] == NULL else [fields[1]]), [fields[0]]


def _is_probability(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def _vocabulary_map(path: Path, lines: Sequence[str]) -> Iterator[Entry]:
    last: dict[tuple[str, ...], Entry] = {}
    for number, line in enumerate(lines, 1):
        phrase, tab, words = line.partition("\t")
        if not tab or "\t" in words:
            raise InputError(
                f"{path}, line {number}: expected a source phrase, a tab and target words, got {line[:80]!r}"
            )
        last[tuple(_split(phrase))] = number, _split(phrase), _split(words)
    yield from last.values()


def _split(text: str) -> list[str]:
    return [word for word in text.split(" ") if word]
