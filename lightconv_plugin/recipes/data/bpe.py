"""Byte-pair encoding by subword-nmt: learning from texts of any size, and the encoder for `text_pool.map_file`."""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

from lightconv_plugin.processes import called
from lightconv_plugin.recipes.data.text_pool import iter_lines
from lightconv_plugin.text.subwords import NO_MERGES, read_merges
from lightconv_plugin.text.subwords import bpe_encoder as encoder

__all__ = ["dropout_encoder", "encoder", "learn_codes", "versions"]


def versions() -> dict[str, str]:
    """The versions that the results depend on, for the parameters of a step."""
    return {"subword-nmt": version("subword-nmt")}


def dropout_encoder(codes: Path, dropout: float, copy: int) -> Callable[[str], str]:
    """BPE-dropout (Provilkov et al. 2020): each possible merge is left out with probability `dropout`, at each step.

    The same `copy` always encodes a line in the same way, in whichever process; other copies encode it differently.
    """
    bpe = read_merges(codes)

    def encode(line: str) -> str:
        random.seed(f"{copy} {line}")  # subword-nmt draws from the global generator
        bpe.cache.clear()  # with dropout it is never read, but grows with every word
        return bpe.process_line(line, dropout=dropout)

    return encode


def learn_codes(texts: Iterable[Path], merges: int, output: Path) -> None:
    """Joint BPE: the merges are learned on the words of all texts together (as `cat texts | subword-nmt learn-bpe`).

    Only the counts of the different words and of their symbol pairs are held in memory: several gigabytes for a large
    corpus. This runs in a separate process, so that the processes of the next step do not inherit that memory.
    """
    with called(_learn, [(tuple(texts), merges, output)]) as (learned,):
        learned()


def _learn(texts: Iterable[Path], merges: int, output: Path) -> None:
    from subword_nmt import learn_bpe

    words: Counter[str] = Counter()
    for path in texts:
        for line in iter_lines(path):
            words.update(line.split())
    vocabulary = io.StringIO("".join(f"{word} {count}\n" for word, count in words.items()))
    with output.open("w", encoding="utf-8") as file:
        if all(len(word) == 1 for word in words):  # letters, phonemes: subword-nmt fails without a pair
            file.write(NO_MERGES)
        else:
            learn_bpe.learn_bpe(vocabulary, file, merges, is_dict=True)
