"""Byte-pair encoding by subword-nmt: learning from texts of any size, and the encoder for `text_pool.map_file`."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

from text_pool import iter_lines

_CACHED_WORDS = 1_000_000  # in each process; subword-nmt itself would keep every different word of the text


def versions() -> dict[str, str]:
    """What the results depend on besides the texts, for the parameters of a step."""
    return {"subword-nmt": version("subword-nmt")}


def learn_codes(texts: Iterable[Path], merges: int, output: Path) -> None:
    """Joint BPE: the merges are learned on the words of all texts together (as `cat texts | subword-nmt learn-bpe`).

    Only the counts of the different words are held.
    """
    from subword_nmt import learn_bpe

    words: Counter[str] = Counter()
    for path in texts:
        for line in iter_lines(path):
            words.update(line.split())
    vocabulary = io.StringIO("".join(f"{word} {count}\n" for word, count in words.items()))
    with output.open("w", encoding="utf-8") as file:
        learn_bpe.learn_bpe(vocabulary, file, merges, is_dict=True)


def encoder(codes: Path) -> Callable[[str], str]:
    """What encodes a tokenised line with the merges of `codes`, as `subword-nmt apply-bpe -c codes` does."""
    from subword_nmt.apply_bpe import BPE

    with codes.open(encoding="utf-8") as file:
        bpe = BPE(file)

    def encode(line: str) -> str:
        if len(bpe.cache) > _CACHED_WORDS:
            bpe.cache.clear()
        return bpe.process_line(line)

    return encode
