"""From the archive of IWSLT 2014 German–English to fairseq's binary data, in resumable steps.

    raw/       train.de train.en: the talks' lines with titles and descriptions; test.de test.en: five sets
               concatenated; all without mark-up
    tok/       Moses-tokenised, lower-cased; the training text cleaned by length, every 23rd line moved to valid
    bpe/       joint byte-pair encoding: `codes`, learned on both sides of the training text, and the encoded text
    data-bin/  what fairseq-train reads, with a dictionary for each language
    corpus.json  languages, splits, whether the text is lower-cased, how it was tokenised

The order of the steps is that of fairseq's prepare-iwslt14.sh.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from lightconv_plugin.arguments import positive
from lightconv_plugin.recipes.data import bpe, moses
from lightconv_plugin.recipes.data.archives import unpack
from lightconv_plugin.recipes.data.binarise import binarise_pairs
from lightconv_plugin.recipes.data.pairs import clean_pairs, split_every
from lightconv_plugin.recipes.data.parallel_folder import CorpusError
from lightconv_plugin.recipes.data.request import Request
from lightconv_plugin.recipes.data.text_pool import count_lines, iter_lines, map_file, write_lines
from lightconv_plugin.recipes.steps import Steps, remove, say, write_text
from lightconv_plugin.text.recipe import Recipe

ABOUT = """IWSLT14 German → English (TED talks): 160,239 training pairs

--data is a folder with de-en.tgz. Written: raw/ tok/ bpe/ data-bin/

As in fairseq's examples: Moses-tokenised, pairs of 1 to 175 tokens with a ratio of at most 1.5,
lower-cased; every 23rd pair for validation; test set: dev2010, dev2012, tst2010, tst2011 and
tst2012; joint BPE, separate dictionaries. The numbers of lines (160,239 / 7,283 / 6,750) and of
words in the dictionaries (8,844 and 6,628) are checked. Free disk space: 0.5 GiB.
"""
ARCHIVE = "de-en.tgz"
LANGS = ("de", "en")
TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
SPLITS = ("train", "valid", "test")
STEPS = (("raw", ("train", "test")), ("tok", SPLITS), ("bpe", SPLITS))
EVERY = 23
RATIO, MIN_LEN, MAX_LEN = 1.5, 1, 175
MERGES = 10_000
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


def segment_tokeniser(lang: str) -> Callable[[str], str]:
    """For `map_file`: replaces the typographic apostrophes of test sets, since the training text has plain ones."""
    tokenise = moses.tokeniser(lang, lowercase=True)
    return lambda line: tokenise(line.replace("’", "'"))


def expect(what: str, numbers: Mapping[str, int], expected: Mapping[str, int]) -> None:
    """CorpusError if numbers differ from the published ones; the message has both."""
    if numbers != expected:
        found, wanted = (", ".join(f"{name} {n:,}" for name, n in some.items()) for some in (numbers, expected))
        raise CorpusError(f"{what}: {found}; expected {wanted} (--any-size accepts another archive)")


class Preparation:
    """The steps from one archive to `out`."""

    def __init__(self, archive: Path, out: Path, merges: int, workers: int, any_size: bool) -> None:
        self.archive, self.out = archive, out
        self.merges, self.workers, self.any_size = merges, workers, any_size
        self.scratch = out / ".scratch"

    def files(self, kind: str, splits: Iterable[str]) -> list[Path]:
        return [self.out / kind / f"{split}.{lang}" for split in splits for lang in LANGS]

    def raw(self, *outputs: Path) -> None:
        """train.de train.en test.de test.en without mark-up."""
        sets = [f"de-en/IWSLT14.{name}.de-en.{lang}.xml" for name in TESTS for lang in LANGS]
        unpack(self.archive, self.scratch, [f"de-en/train.tags.de-en.{lang}" for lang in LANGS] + sets, _LIMIT)
        folder = self.scratch / "de-en"
        lengths = []
        for lang, train, test in zip(LANGS, outputs[:2], outputs[2:], strict=True):
            lines = write_lines(train, training_lines(folder / f"train.tags.de-en.{lang}"))
            segments = (segments_of(folder / f"IWSLT14.{name}.de-en.{lang}.xml") for name in TESTS)
            lengths.append((lines, write_lines(test, chain.from_iterable(segments))))
        if lengths[0] != lengths[1] or 0 in lengths[0]:
            raise CorpusError(f"{self.archive}: (training, test) lines are {lengths[0]} de, {lengths[1]} en")
        say(f"  train: {lengths[0][0]} pairs of lines, test: {lengths[0][1]}")

    def tok(self, *outputs: Path) -> None:
        """train, valid, test, each de and en."""
        whole = [self.scratch / f"whole.{lang}" for lang in LANGS]
        clean = [self.scratch / f"clean.{lang}" for lang in LANGS]
        for lang, train, test in zip(LANGS, whole, outputs[4:], strict=True):
            raw = self.out / "raw"
            map_file(
                partial(moses.tokeniser, lowercase=True), (lang,), raw / f"train.{lang}", train, lang, self.workers
            )
            map_file(segment_tokeniser, (lang,), raw / f"test.{lang}", test, f"test.{lang}", self.workers)
        kept, of = clean_pairs(whole, clean, RATIO, MIN_LEN, MAX_LEN)
        left, valid = split_every(clean, EVERY, outputs[:2], outputs[2:4])
        say(f"  train: {kept} of {of} pairs kept, {valid} of them for validation")
        lines = {"train": left, "valid": valid, "test": count_lines(outputs[4])}
        if not self.any_size:
            expect("pairs of lines", lines, LINES)
        if not (left and valid):
            raise CorpusError(f"{self.archive} has too few pairs: {left} for training, {valid} for validation")

    def codes(self, output: Path) -> None:
        bpe.learn_codes(self.files("tok", ["train"]), self.merges, output)

    def encode(self, *outputs: Path) -> None:
        for source, output in zip(self.files("tok", SPLITS), outputs, strict=True):
            map_file(bpe.encoder, (self.out / "bpe" / "codes",), source, output, source.name, self.workers)

    def data_bin(self, output: Path) -> None:
        binarise_pairs(self.out, *LANGS, SPLITS, False, self.workers, output)
        words = {lang: count_lines(output / f"dict.{lang}.txt") for lang in LANGS}
        if not self.any_size and self.merges == MERGES:
            expect("words in the dictionaries", words, WORDS)

    def run(self) -> None:
        if not self.archive.is_file():
            raise CorpusError(f"no archive {self.archive}")
        raw, tok, encoded = (self.files(kind, splits) for kind, splits in STEPS)
        codes = self.out / "bpe" / "codes"
        with Steps(self.out) as steps:
            remove(self.scratch)  # left over from a killed run
            self.scratch.mkdir()
            try:
                steps.run("raw", "raw text", self.raw, inputs=[self.archive], outputs=raw, params={})
                how = {**moses.versions(), "any_size": self.any_size}
                steps.run("tok", "tokenise", self.tok, inputs=raw, outputs=tok, params=how)
            finally:
                remove(self.scratch)
            merges = {**bpe.versions(), "merges": self.merges}
            title = f"learn {self.merges} BPE merges"
            steps.run("codes", title, self.codes, inputs=tok[:2], outputs=[codes], params=merges)
            steps.run("bpe", "apply BPE", self.encode, inputs=[*tok, codes], outputs=encoded, params=bpe.versions())
            steps.run(
                "data-bin",
                "binarise",
                self.data_bin,
                inputs=encoded,
                outputs=[self.out / "data-bin"],
                params={"any_size": self.any_size},
            )
            about: dict[str, Any] = {"src": "de", "tgt": "en", "splits": {split: split for split in SPLITS}}
            about |= {"lowercase": True, "bpe": self.merges}
            recipes = {lang: Recipe("moses", lang, lowercase="last", plain_apostrophe=True) for lang in LANGS}
            about["text"] = {lang: recipe.as_json() for lang, recipe in recipes.items()}
            write_text(self.out / "corpus.json", json.dumps(about, indent=1) + "\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bpe", type=positive, default=MERGES, metavar="N", help="merges (default: %(default)s)")


def run(request: Request) -> None:
    """Run all steps."""
    archive = request.data / ARCHIVE
    Preparation(archive, request.out, request.options.bpe, request.workers, request.any_size).run()
