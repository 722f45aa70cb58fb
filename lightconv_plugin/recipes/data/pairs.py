"""Pairs of parallel texts, streamed: cleaned by length, and split into training, validation and test text."""

from __future__ import annotations

import contextlib
import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice, zip_longest
from pathlib import Path

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.recipes.data.text_pool import BLOCK, count_lines, iter_lines, write_lines

_LONG_WORD = re.compile(r"\S{1001}")  # clean-corpus-n.perl drops a pair with a word of more than 1000 characters


def iter_pairs(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    """The lines of both texts in pairs. CorpusError if one text is longer."""
    for pair in zip_longest(iter_lines(source), iter_lines(target)):
        if None in pair:
            raise CorpusError(f"{source} has {count_lines(source)} lines but {target} has {count_lines(target)}")
        yield pair


def keep_pair(source: str, target: str, max_len: int, max_ratio: float, min_len: int = 1) -> bool:
    """Whether a training pair is usable, by the rules of Moses' clean-corpus-n.perl.

    Both sides have min_len … max_len tokens, neither side has more than max_ratio times as many as the other, and no
    token has more than 1000 characters. (That script also deletes `|`, which tokenised text escapes as `&#124;`.)
    """
    n, m = len(source.split()), len(target.split())
    if min(n, m) < max(min_len, 1) or max(n, m) > max_len or max(n, m) / min(n, m) > max_ratio:
        return False
    return not any(len(side) > 1000 and _LONG_WORD.search(side) for side in (source, target))


@contextlib.contextmanager
def temporary(paths: Iterable[Path]) -> Iterator[None]:
    """Remove these files at the end of the block, unless it has renamed them; also if it fails."""
    try:
        yield
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


class PairWriter(contextlib.ExitStack):
    """Writes two texts, pair by pair; `count` is the number of pairs so far."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self.count = 0
        self._files = [
            self.enter_context(path.open("w", encoding="utf-8", newline="\n", buffering=BLOCK)) for path in paths
        ]

    def write(self, pair: Iterable[str]) -> None:
        for file, line in zip(self._files, pair, strict=True):
            file.write(line + "\n")
        self.count += 1


def clean_pairs(
    sources: Sequence[Path], outputs: Sequence[Path], ratio: float, min_len: int, max_len: int
) -> tuple[int, int]:
    """Copy the pairs that `keep_pair` keeps, with white space collapsed; returns (pairs kept, all pairs)."""
    of = 0
    with PairWriter(outputs) as kept:
        for pair in iter_pairs(*sources):
            of += 1
            if keep_pair(*pair, max_len, ratio, min_len):
                kept.write(" ".join(side.split()) for side in pair)
    return kept.count, of


def split_every(
    texts: Sequence[Path], every: int, train_out: Sequence[Path], valid_out: Sequence[Path]
) -> tuple[int, int]:
    """Move every `every`-th pair of both texts to the validation text; returns (training pairs, validation pairs).

    Pairs count from 1: with 23, the 23rd, 46th, … pair is for validation, as in fairseq's preparation scripts.
    """
    with PairWriter(train_out) as train, PairWriter(valid_out) as valid:
        for number, pair in enumerate(iter_pairs(*texts), 1):
            (train if number % every else valid).write(pair)
    return train.count, valid.count


class _Sentences:
    """Sentences by their tokens. Only lines with the same letters and digits are tokenised, since that takes time."""

    def __init__(self, tokens: Callable[[str], str]) -> None:
        self._tokens = tokens
        self._by_letters: dict[str, set[str]] = {}

    def add(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._by_letters.setdefault(_letters(line), set()).add(self._tokens(line))

    def __contains__(self, line: str) -> bool:
        return (similar := self._by_letters.get(_letters(line))) is not None and self._tokens(line) in similar


def _letters(line: str) -> str:
    return re.sub(r"\W+", "", line.lower())


def hold_out(
    train: Sequence[Path],
    outputs: Mapping[str, Sequence[Path]],
    sizes: Mapping[str, int],
    seed: int,
    tokens: Sequence[Callable[[str], str]] = (str.strip, str.strip),
) -> tuple[int, int]:
    """Move pairs of the training text into other parts, so that no test sentence is in the training text.

    The pairs with the smallest hashes of seed and source are chosen, so that the choice of sources depends neither on
    the order of the text nor on the version of Python. They have different sources and text on both sides: of several
    pairs with the same source, the first one. A pair that shares a side with one of an earlier part is passed over, and
    training pairs that share a side with a part are removed too. Sentences with the same tokens count as the same.

    Args:
        train: both sides of the training text, which are rewritten
        outputs: both sides of each part
        sizes: number of pairs of each part
        tokens: of each side, what the preparation makes of a line. It may change case, white space and punctuation

    Returns:
        (pairs left for training, all pairs)
    """
    most = 2 * sum(sizes.values())  # twice as many as needed, since some may be passed over
    heap: list[tuple[int, str, str]] = []  # (-hash, source, target): the largest hash comes first
    chosen: set[str] = set()
    for source, target in iter_pairs(*train):
        source, target = source.strip(), target.strip()
        if not (source and target) or source in chosen:
            continue
        rank = -int.from_bytes(blake2b(f"{seed} {source}".encode(), digest_size=8).digest(), "big")
        if len(heap) < most:
            heapq.heappush(heap, (rank, source, target))
        elif rank > heap[0][0]:
            chosen.remove(heapq.heapreplace(heap, (rank, source, target))[1])
        else:
            continue
        chosen.add(source)
    parts, taken = _divide([pair for _, *pair in sorted(heap, reverse=True)], sizes, tokens)
    rest = [path.with_name(path.name + ".rest") for path in train]
    of = 0
    with temporary(rest):
        with PairWriter(rest) as left:
            for source, target in iter_pairs(*train):
                of += 1
                if source not in taken[0] and target not in taken[1]:
                    left.write((source, target))
        if any(len(parts[part]) < size for part, size in sizes.items()) or not left.count:
            total = sum(sizes.values())
            raise CorpusError(
                f"cannot hold out {total} pairs: the training text has {of}, and {left.count} would be left that share "
                "no sentence with them or with each other"
            )
        for path, new in zip(train, rest, strict=True):
            new.replace(path)
    for part, pairs in parts.items():
        for side, path in enumerate(outputs[part]):
            write_lines(path, (pair[side] for pair in pairs))
    return left.count, of


def _divide(
    pairs: Sequence[Sequence[str]], sizes: Mapping[str, int], tokens: Sequence[Callable[[str], str]]
) -> tuple[dict[str, list[Sequence[str]]], list[_Sentences]]:
    """The pairs of each part, in order, and the sentences of all parts by side."""
    parts: dict[str, list[Sequence[str]]] = {}
    taken = [_Sentences(function) for function in tokens]
    rest = iter(pairs)

    def new() -> Iterator[Sequence[str]]:
        sources = _Sentences(tokens[0])  # of this part
        for pair in rest:
            if pair[0] not in sources and pair[0] not in taken[0] and pair[1] not in taken[1]:
                sources.add([pair[0]])
                yield pair

    for part, size in sizes.items():
        parts[part] = list(islice(new(), size))
        for side, sentences in enumerate(taken):
            sentences.add(pair[side] for pair in parts[part])
    return parts, taken
