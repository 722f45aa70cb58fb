"""From the archive of IWSLT 2014 German–English to fairseq's binary data.

    raw/       train.de train.en: the talks' lines with titles and descriptions; test.de test.en: five sets
               concatenated; all without mark-up
    tok/       Moses-tokenised, lower-cased; the training text cleaned by length, every 23rd line moved to valid

The order of the steps is that of fairseq's prepare-iwslt14.sh.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

from lightconv_plugin.downloads.archives import unpack
from lightconv_plugin.errors import CorpusError
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.data import bpe
from lightconv_plugin.recipes.data.options import SPLITS, Request
from lightconv_plugin.recipes.data.pairs import clean_pairs, split_every
from lightconv_plugin.recipes.data.stages import Plan, Sides, Stage, scratch
from lightconv_plugin.recipes.data.text_pool import count_lines, iter_lines, write_lines
from lightconv_plugin.text import moses
from lightconv_plugin.text.recipe import Recipe

ARCHIVE = "de-en.tgz"
LANGS = ("de", "en")
TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
EVERY = 23
RATIO, MIN_LEN, MAX_LEN = 1.5, 1, 175
MERGES = 10_000
TRAINING = {lang: Recipe("moses", lang, lowercase="last") for lang in LANGS}
# Test sets have typographic apostrophes, the training text plain ones.
RECIPES = {lang: replace(recipe, plain_apostrophe=True) for lang, recipe in TRAINING.items()}
LINES = {"train": 160_239, "valid": 7_283, "test": 6_750}
WORDS = {"de": 8_844, "en": 6_628}  # lines of the dictionaries; fairseq's four special symbols are not in them
_LIMIT = 500 << 20  # bytes to unpack at most, several times the size of the text used

_ABOUT = re.compile("<url>|<talkid>|<keywords>")
_TITLES = re.compile("</?(?:title|description)>")
_SEGMENT = re.compile(r'<seg id="[0-9]*">\s*')
_SEGMENT_END = re.compile(r"\s*</seg>\s*")


def training_lines(tags: Path) -> Iterator[str]:
    """The text lines of train.tags.de-en.XX, without the talks' addresses, numbers and keywords."""
    return (_TITLES.sub("", line) for line in iter_lines(tags) if not _ABOUT.search(line))


def segments_of(xml: Path) -> Iterator[str]:
    """The segments of a test set."""
    for line in iter_lines(xml):
        if "<seg id" in line:
            yield _SEGMENT_END.sub("", _SEGMENT.sub("", line))


def expect(what: str, counts: Mapping[str, int], published: Mapping[str, int]) -> None:
    """CorpusError if counts differ from the published ones; the message has both."""
    if counts != published:
        ours, theirs = (", ".join(f"{name} {n:,}" for name, n in some.items()) for some in (counts, published))
        raise CorpusError(f"{what}: {ours}; expected {theirs} (`any_size` accepts another archive)")


def extract(archive: Path, folder: Path, outputs: tuple[Path, ...]) -> None:
    """Write train.de train.en test.de test.en without mark-up; `folder` is for the unpacked files."""
    sets = [f"de-en/IWSLT14.{name}.de-en.{lang}.xml" for name in TESTS for lang in LANGS]
    unpack(archive, folder, [f"de-en/train.tags.de-en.{lang}" for lang in LANGS] + sets, _LIMIT)
    lengths = []
    for lang, train, test in zip(LANGS, outputs[:2], outputs[2:], strict=True):
        lines = write_lines(train, training_lines(folder / f"de-en/train.tags.de-en.{lang}"))
        segments = (segments_of(folder / f"de-en/IWSLT14.{name}.de-en.{lang}.xml") for name in TESTS)
        lengths.append((lines, write_lines(test, chain.from_iterable(segments))))
    if lengths[0] != lengths[1] or 0 in lengths[0]:
        raise CorpusError(f"{archive}: (training, test) lines are {lengths[0]} de, {lengths[1]} en")
    say(f"  train: {lengths[0][0]} pairs of lines, test: {lengths[0][1]}")


def plan(request: Request) -> Plan:
    """The stages from the archive to binary data."""
    archive, out, merges, any_size = request.data / ARCHIVE, request.out, request.options.bpe, request.options.any_size
    if not archive.is_file():
        raise CorpusError(f"no archive {archive}")
    sides = Sides(out, LANGS, request.options.workers)

    def raw(*outputs: Path) -> None:
        with scratch(out / ".scratch") as folder:
            extract(archive, folder, outputs)

    def tokenise(*outputs: Path) -> None:
        train, valid, test = outputs[:2], outputs[2:4], outputs[4:]
        with scratch(out / ".scratch") as folder:
            whole, clean = ([folder / f"{name}.{lang}" for lang in LANGS] for name in ("whole", "clean"))
            sides.map(lambda lang: (Recipe.tokenise, (TRAINING[lang],)), sides.files("raw", "train"), whole)
            sides.map(lambda lang: (Recipe.tokenise, (RECIPES[lang],)), sides.files("raw", "test"), test)
            kept, of = clean_pairs(whole, clean, RATIO, MIN_LEN, MAX_LEN)
            left, held_out = split_every(clean, EVERY, train, valid)
        say(f"  train: {kept} of {of} pairs kept, {held_out} of them for validation")
        if not any_size:
            expect("pairs of lines", {"train": left, "valid": held_out, "test": count_lines(test[0])}, LINES)
        if not (left and held_out):
            raise CorpusError(f"{archive} has too few pairs: {left} for training, {held_out} for validation")

    def check(output: Path) -> None:
        if not any_size and merges == MERGES:
            expect("words in the dictionaries", {x: count_lines(output / f"dict.{x}.txt") for x in LANGS}, WORDS)

    texts = sides.files("raw", "train", "test")
    how = {**moses.versions(), "any_size": any_size}
    stages = [
        Stage("raw", "raw text", raw, [archive], texts),
        Stage("tok", "tokenise", tokenise, texts, sides.files("tok"), how),
        *sides.learned(merges),
        sides.encoded(sides.encode, bpe.versions()),
        sides.binarised(False, {"any_size": any_size}, check=check),
    ]
    return Plan(out, stages, lambda: sides.about({split: split for split in SPLITS}, True, merges, RECIPES))
