"""The prepared folder whose training text is distilled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.data.pairs import iter_pairs
from lightconv_plugin.recipes.data.text_pool import count_lines
from lightconv_plugin.text.dictionary import Dictionary


class Block(NamedTuple):
    """Consecutive pairs of a training text, in pieces; `number` counts the blocks from 0."""

    number: int
    sources: list[str]
    targets: list[str]


@dataclass(frozen=True)
class Source:
    """A folder that `lightconv prepare` filled.

    about: its corpus.json. langs: the names of the sides, source first. splits: train, valid, test …
    """

    folder: Path
    about: dict[str, Any]
    langs: tuple[str, str]
    splits: tuple[str, ...]

    @property
    def binarised(self) -> Path:
        return self.folder / "data-bin"

    @property
    def train(self) -> tuple[Path, Path]:
        """Both sides of the training text, in pieces."""
        source, target = (self.folder / "bpe" / f"train.{lang}" for lang in self.langs)
        return source, target

    def dictionary_file(self, lang: str) -> Path:
        return self.binarised / f"dict.{lang}.txt"

    def dictionary(self, lang: str) -> Dictionary:
        return Dictionary.load(self.dictionary_file(lang))

    @property
    def merges(self) -> list[Path]:
        """The files of merges: of both languages together, or of each."""
        return sorted((self.folder / "bpe").glob("codes*"))

    def other_texts(self) -> list[Path]:
        """The texts of the other splits, raw, in tokens and in pieces, as far as the preparation kept them."""
        names = [f"{split}.{lang}" for split in self.splits if split != "train" for lang in self.langs]
        paths = [self.folder / kind / name for kind in ("raw", "tok", "bpe") for name in names]
        return [path for path in paths if path.is_file()]

    def lines(self) -> int:
        """The number of training pairs."""
        return count_lines(self.train[0])

    def blocks(self, size: int) -> Iterator[Block]:
        """The training text, `size` pairs at a time."""
        pairs = iter_pairs(*self.train)
        number = 0
        while some := list(islice(pairs, size)):
            yield Block(number, [source for source, _ in some], [target for _, target in some])
            number += 1


def open_source(folder: Path) -> Source:
    """The prepared folder, checked as far as that is quick.

    Raises:
        InputError: the folder was not made by `lightconv prepare`, lacks a file, or has text in both directions.
    """
    about = _read_about(folder)
    langs, splits = (about["src"], about["tgt"]), tuple(about["splits"])
    source = Source(folder, about, langs, splits)
    needed = [folder / "bpe" / f"{split}.{lang}" for split in splits for lang in langs]
    needed += map(source.dictionary_file, langs)
    for path in needed:
        if not path.is_file():
            raise InputError(f"`data` {folder} has no {path.relative_to(folder)}: run lightconv prepare again")
    if about.get("bidirectional"):
        raise InputError(
            f"`data` {folder} has its training text in both directions, but a teacher translates one: prepare the text "
            "without `bidirectional`"
        )
    return source


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / "corpus.json"
    if not path.is_file():
        inside = folder.name == "data-bin" and (folder.parent / "corpus.json").is_file()
        hint = f"give {folder.parent}" if inside else "give a folder that lightconv prepare made"
        raise InputError(f"`data` {folder} has no corpus.json: {hint}")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"`data`: {path} is not the JSON that lightconv prepare writes: {error}") from error
    missing = [key for key in ("src", "tgt", "splits") if not (isinstance(about, dict) and about.get(key))]
    if missing:
        raise InputError(f"`data`: {path} has no {', '.join(missing)}: run lightconv prepare again")
    return about
