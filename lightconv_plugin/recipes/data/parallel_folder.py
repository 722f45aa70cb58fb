"""Finds the parts of a parallel corpus in a folder by their file names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightconv_plugin.errors import CorpusError

# train.en, val.de.gz, test_2016_flickr.en, dev-2013.de …: a part's name begins with one of these words.
PARTS = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}
EXPECTED = (
    "expected train.XX, valid.XX (or val.XX, dev.XX) and test.XX or test_*.XX, each for two languages XX "
    "such as de or pt_BR, without -, plain or .gz, not .txt or .xz"
)
# A language may have a region: pt_BR, zh_Hans, es_419. fairseq splits its own file names at "-".
_LANGUAGE = "[a-z]{2,3}(_[A-Za-z0-9]{2,8})?"
# Extensions of other files that are as long as languages. Rare languages that share one must be given.
_NO_LANGUAGES = frozenset("csv dat idx jpg log md npy pdf png py tar tgz tmp tmx tsv txt xml xz yml zip zst".split())


@dataclass(frozen=True)
class Corpus:
    """A language pair and the name prefixes of its parts; there may be several test sets.

    valid may be "" and tests () if the folder does not need to have them.
    """

    folder: Path
    src: str
    tgt: str
    train: str
    valid: str
    tests: tuple[str, ...]

    def splits(self) -> dict[str, str]:
        """The parts that have files, under fairseq's names: train, valid, test, test1, test2, …"""
        valid = {"valid": self.valid} if self.valid else {}
        return {"train": self.train, **valid, **{f"test{i or ''}": prefix for i, prefix in enumerate(self.tests)}}


def locate(folder: Path, prefix: str, lang: str) -> Path:
    """The file of one part in one language; plain text is preferred to .gz."""
    for path in (folder / f"{prefix}.{lang}", folder / f"{prefix}.{lang}.gz"):
        if path.is_file():
            return path
    raise CorpusError(f"{folder} has neither {prefix}.{lang} nor {prefix}.{lang}.gz")


def _belongs(prefix: str, part: str) -> bool:
    return any(re.fullmatch(rf"{word}([._-].*)?", prefix) for word in PARTS[part])


def find_corpus(
    folder: Path,
    src: str | None = None,
    tgt: str | None = None,
    train: str | None = None,
    valid: str | None = None,
    tests: Sequence[str] = (),
    without: Sequence[str] = (),
) -> Corpus:
    """Determine everything not given from the file names; the parts in `without` are not looked for.

    Languages that are given may have any code. By default the source is English, or else the first language in
    alphabetical order.
    """
    if not folder.is_dir():
        raise CorpusError(f"no folder {folder}")
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    listing = f"found: {', '.join(names[:20])}{' …' if len(names) > 20 else ''}" if names else "it is empty"
    langs_of: dict[str, set[str]] = {}
    languages = "|".join([_LANGUAGE, *(re.escape(lang) for lang in (src, tgt) if lang)])
    pattern = re.compile(rf"(?P<prefix>[^.].*?)\.(?P<lang>{languages})(\.gz)?")
    for name in names:
        if (match := pattern.fullmatch(name)) and match["lang"] not in _NO_LANGUAGES - {src, tgt}:
            langs_of.setdefault(match["prefix"], set()).add(match["lang"])

    if src is None or tgt is None:
        trains = [p for p in langs_of if (p == train if train else _belongs(p, "train"))]
        if train and not trains:
            raise CorpusError(f"`train_prefix` {train}: {folder} has no text {train}.XX; {listing}")
        known = set().union(*(langs_of[p] for p in trains))
        candidates = known - {src, tgt}
        given = {lang for lang in (src, tgt) if lang is not None}
        missing = 2 - len(given)
        if len(candidates) != missing:
            found = f"the languages of its training text are {sorted(known)}"
            too_few = f"{found}; {EXPECTED}" if known else EXPECTED
            too_many = f"{found}, not {', '.join(sorted(given - known))}" if given - known else found
            what = f"{too_many}: choose with `src` and `tgt`" if len(candidates) > missing else too_few
            raise CorpusError(f"cannot tell the language pair of {folder}: {what}; {listing}")
        rest = sorted(candidates, key=lambda lang: (lang != "en", lang))
        src = src or rest.pop(0)
        tgt = tgt or rest.pop(0)
    if src == tgt:
        raise CorpusError(f"source and target language are both {src!r}")

    def choose(part: str) -> list[str]:
        prefixes = [p for p in sorted(langs_of) if _belongs(p, part) and {src, tgt} <= langs_of[p]]
        if not prefixes:
            held_out = "" if part == "train" else f" (or hold out N pairs: lightconv prepare parallel --{part}-lines N)"
            raise CorpusError(f"{folder} has no {part} text for {src}-{tgt}: {EXPECTED}{held_out}; {listing}")
        if len(prefixes) > 1 and part != "test":
            how = f"keep one, or name it to lightconv prepare parallel --{part}-prefix"
            raise CorpusError(f"{folder} has several {part} texts, {prefixes}: {how}")
        return prefixes

    return Corpus(
        folder,
        src,
        tgt,
        train or choose("train")[0],
        "" if "valid" in without else valid or choose("valid")[0],
        () if "test" in without else tuple(tests) or tuple(choose("test")),
    )
