"""Pairs of parallel texts, streamed: cleaned by length, divided into training and validation text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from lightconv_plugin.recipes.data.parallel_folder import CorpusError
from lightconv_plugin.recipes.data.text_pool import BLOCK, count_lines, iter_lines

_LONG_WORD = re.compile(r"\S{1001}")  # clean-corpus-n.perl drops a pair with a word of more than 1000 characters


def iter_pairs(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    """The lines of both texts side by side. CorpusError where one of them is longer."""
    for pair in zip_longest(iter_lines(source), iter_lines(target)):
        if None in pair:
            raise CorpusError(f"{source} has {count_lines(source)} lines but {target} has {count_lines(target)}")
        yield pair


def keep_pair(source: str, target: str, max_len: int, max_ratio: float, min_len: int = 1) -> bool:
    """Whether a training pair is usable, by the rules of Moses' clean-corpus-n.perl.

    Both sides have min_len … max_len tokens, neither more than max_ratio times as many as the other, none of them of
    more than 1000 characters. (That script also deletes `|`, which tokenised text has as `&#124;`.)
    """
    n, m = len(source.split()), len(target.split())
    if min(n, m) < max(min_len, 1) or max(n, m) > max_len or max(n, m) > max_ratio * min(n, m):
        return False
    return not any(len(side) > 1000 and _LONG_WORD.search(side) for side in (source, target))


def clean_pairs(
    sources: Sequence[Path], outputs: Sequence[Path], ratio: float, min_len: int, max_len: int
) -> tuple[int, int]:
    """Copy the pairs that `keep_pair` keeps, runs of white space made one space; (how many, of how many)."""
    kept = of = 0
    with (
        outputs[0].open("w", encoding="utf-8", newline="\n", buffering=BLOCK) as source_out,
        outputs[1].open("w", encoding="utf-8", newline="\n", buffering=BLOCK) as target_out,
    ):
        for source, target in iter_pairs(*sources):
            of += 1
            if keep_pair(source, target, max_len, ratio, min_len):
                kept += 1
                source_out.write(" ".join(source.split()) + "\n")
                target_out.write(" ".join(target.split()) + "\n")
    return kept, of


def split_every(
    pair: Sequence[Path], every: int, train_out: Sequence[Path], valid_out: Sequence[Path]
) -> tuple[int, int]:
    """Move every `every`-th line of both texts to the validation text; the numbers of lines (training, validation).

    Lines count from 1: with 23, the 23rd, 46th, … line is for validation, as in fairseq's preparation scripts.
    """
    counts = []
    for path, train_path, valid_path in zip(pair, train_out, valid_out, strict=True):
        train = valid = 0
        with (
            train_path.open("w", encoding="utf-8", newline="\n", buffering=BLOCK) as train_file,
            valid_path.open("w", encoding="utf-8", newline="\n", buffering=BLOCK) as valid_file,
        ):
            for number, line in enumerate(iter_lines(path), 1):
                if number % every == 0:
                    valid += 1
                    valid_file.write(line + "\n")
                else:
                    train += 1
                    train_file.write(line + "\n")
        counts.append((train, valid))
    if counts[0] != counts[1]:
        raise CorpusError(f"{pair[0]} has {sum(counts[0])} lines but {pair[1]} has {sum(counts[1])}")
    return counts[0]
