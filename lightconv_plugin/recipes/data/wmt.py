"""WMT's parallel corpora from their archives to fairseq's binary data, in resumable steps.

    text/      train, valid and test out of the archives, one sentence a line: train.en train.fr valid.en …
    tok/       tokenised: English, German, French as Moses does it, Chinese divided into words by jieba
    encoded/   byte-pair encoded: training text, and validation text that was a part of it
    bpe/       `codes` (codes.zh and codes.en where the languages have their own), and what of the encoded text is used
    raw/       the raw lines of bpe/valid and bpe/test, references for sacreBLEU
    data-bin/  what fairseq-train reads
    corpus.json  languages, and where each part is from

The steps are those of fairseq's prepare-wmt14en2de.sh and prepare-wmt14en2fr.sh; the shell scripts beside this file say
what each task is made of. Every step streams: memory does not grow with the text.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightconv_plugin.recipes.data import bpe, moses
from lightconv_plugin.recipes.data.binarise import binarise_pairs
from lightconv_plugin.recipes.data.pairs import clean_pairs, iter_pairs, keep_pair, split_every
from lightconv_plugin.recipes.data.text_pool import map_file, write_lines
from lightconv_plugin.recipes.data.wmt_sources import Source, append_source, extract_sgm
from lightconv_plugin.recipes.steps import Steps, cores, exit_status, remove, say, write_text
from lightconv_plugin.text.chinese import segmenter
from lightconv_plugin.text.recipe import Recipe

_VERBS = {"tok": "tokenise", "encoded": "apply BPE to", "bpe": "apply BPE to"}
RATIO, MIN_LEN, MAX_LEN = 1.5, 1, 250  # of the pairs kept, in pieces


@dataclass(frozen=True)
class Task:
    """What is published, and what becomes of it."""

    src: str
    tgt: str
    train: tuple[Source, ...]  # one after the other in this order
    valid: int | Source  # every N-th pair of the training text, or a set of its own
    test: Source
    merges: int
    joint: bool  # merges, and a dictionary, for both languages together


def _pair(archive: str, name: str, stem: str, langs: str, gib: int, pairs: int | None = None) -> Source:
    """A source whose two files differ in their ending."""
    return Source(name, archive, tuple(f"{stem}.{lang}" for lang in langs.split()), gib, pairs)


def _sgm(archive: str, name: str, stem: str, src: str, tgt: str, pairs: int | None) -> Source:
    return Source(name, archive, (f"{stem}-src.{src}.sgm", f"{stem}-ref.{tgt}.sgm"), 1, pairs)


_EUROPARL, _CRAWL, _UN = (f"training-parallel-{name}.tgz" for name in ("europarl-v7", "commoncrawl", "un"))
_NEWS9, _NEWS12 = "training-parallel-nc-v9.tgz", "training-parallel-nc-v12.tgz"

_EN_DE = Task(
    src="en",
    tgt="de",
    train=(
        _pair(_EUROPARL, "europarl-v7", "training/europarl-v7.de-en", "en de", 2, 1_920_209),
        _pair(_CRAWL, "commoncrawl", "commoncrawl.de-en", "en de", 2, 2_399_123),
        _pair(_NEWS12, "news-commentary-v12", "training/news-commentary-v12.de-en", "en de", 1),
    ),
    valid=100,
    test=_sgm("test-full.tgz", "newstest2014", "test-full/newstest2014-deen", "en", "de", 3003),
    merges=40_000,
    joint=True,
)
_EN_FR = Task(
    src="en",
    tgt="fr",
    train=(
        _pair(_EUROPARL, "europarl-v7", "training/europarl-v7.fr-en", "en fr", 2, 2_007_723),
        _pair(_CRAWL, "commoncrawl", "commoncrawl.fr-en", "en fr", 3, 3_244_152),
        _pair(_UN, "undoc.2000", "un/undoc.2000.fr-en", "en fr", 16, 12_886_831),
        _pair(_NEWS9, "news-commentary-v9", "training/news-commentary-v9.fr-en", "en fr", 1, 183_251),
        _pair("training-giga-fren.tar", "giga-fren", "giga-fren.release2.fixed", "en.gz fr.gz", 4),
    ),
    valid=1333,
    test=_sgm("test-full.tgz", "newstest2014", "test-full/newstest2014-fren", "en", "fr", 3003),
    merges=40_000,
    joint=True,
)
_CWMT = {
    "casia2015": 1_050_000,
    "casict2011": None,
    "casict2015": 2_036_833,
    "datum2015": 1_000_003,
    "datum2017": 999_984,
    "neu2017": 2_000_000,
}
_ZH_EN = Task(
    src="zh",
    tgt="en",
    train=(
        _pair(_NEWS12, "news-commentary-v12", "training/news-commentary-v12.zh-en", "zh en", 1),
        _pair("UNv1.0.en-zh.tar.gz", "UNv1.0", "en-zh/UNv1.0.en-zh", "zh en", 16, 15_886_041),
        *(Source(name, f"{name}.zip", (f"{name}/*_c[hn].txt", f"{name}/*_en.txt"), 2, _CWMT[name]) for name in _CWMT),
    ),
    valid=_sgm("dev.tgz", "newsdev2017", "dev/newsdev2017-zhen", "zh", "en", None),
    test=_sgm("test.tgz", "newstest2017", "test/newstest2017-zhen", "zh", "en", 2001),
    merges=32_000,
    joint=False,
)
_NEWS9_DE = _pair(_NEWS9, "news-commentary-v9", "training/news-commentary-v9.de-en", "en de", 1, 201_288)
TASKS = {
    "wmt14_en_de": _EN_DE,
    "wmt14_en_de_icml17": replace(_EN_DE, train=(*_EN_DE.train[:2], _NEWS9_DE)),
    "wmt14_en_fr": _EN_FR,
    "wmt17_zh_en": _ZH_EN,
    "wmt17_zh_en_without_cwmt": replace(_ZH_EN, train=_ZH_EN.train[:2]),
}


def training_tokeniser(lang: str) -> Callable[[str], str]:
    """For training text, and validation text that was a part of it."""
    return moses.tokeniser(lang, normalise=True, remove_non_printing=True, aggressive=True)


def evaluation_tokeniser(lang: str) -> Callable[[str], str]:
    """For validation and test sets of their own: their text is not normalised, but for the typographic apostrophe."""
    tokenise = moses.tokeniser(lang, aggressive=True)
    return lambda line: tokenise(line.replace("’", "'"))


def _recipe(lang: str) -> Recipe:
    """What has been done with the text of the test set, for others to repeat."""
    return Recipe("jieba", lang) if lang == "zh" else Recipe("moses", lang, aggressive=True, plain_apostrophe=True)


def _tokenising(lang: str, training: bool) -> tuple[Callable[..., Callable[[str], str]], tuple, dict[str, object]]:
    """What makes the function, its arguments, and what its results depend on."""
    if lang == "zh":
        try:
            return segmenter, (), {"jieba": version("jieba")}
        except PackageNotFoundError:
            raise RuntimeError("Chinese is divided into words by jieba, which is missing: pip install jieba") from None
    params = {**moses.versions(), "lang": lang, "training": training}
    return (training_tokeniser if training else evaluation_tokeniser), (lang,), params


def keep_raw(encoded: Sequence[Path], text: Sequence[Path], outputs: Sequence[Path]) -> None:
    """The raw lines of the pairs that cleaning keeps."""
    rows = zip(iter_pairs(*encoded), iter_pairs(*text), strict=True)
    kept = [raw for pair, raw in rows if keep_pair(*pair, MAX_LEN, RATIO, MIN_LEN)]
    for output, lines in zip(outputs, zip(*kept, strict=True), strict=True):
        write_lines(output, lines)


class Preparation:
    """The steps of one task in one folder."""

    def __init__(self, task: Task, steps: Steps, args: argparse.Namespace) -> None:
        self.task, self.steps, self.args = task, steps, args
        self.out: Path = steps.root
        self.langs = task.src, task.tgt
        self.merges: int = args.bpe or task.merges

    def files(self, kind: str, split: str) -> list[Path]:
        return [self.out / kind / f"{split}.{lang}" for lang in self.langs]

    def codes(self, lang: str) -> Path:
        return self.out / "bpe" / ("codes" if self.task.joint else f"codes.{lang}")

    def texts(self) -> None:
        """text/: the sources of the training text one after the other, then divided; the test sets."""
        data, scratch = self.args.data, self.out / ".unpacked"
        splits = ["train", "valid"] if isinstance(self.task.valid, int) else ["train"]

        def train(*outputs: Path) -> None:
            whole = [self.out / f".whole.{lang}" for lang in self.langs] if len(splits) == 2 else outputs
            for path in whole:
                remove(path)
            counts = {}
            for source in self.task.train:
                counts[source.name] = append_source(source, data, scratch, whole, self.args.any_size)
                say(f"  {source.name}: {counts[source.name]:,} pairs")
            if len(splits) == 2:
                split_every(whole, self.task.valid, outputs[:2], outputs[2:])
                for path in whole:
                    remove(path)

        self.steps.run(
            "text-train",
            "training text",
            train,
            inputs=[data / source.archive for source in self.task.train],
            outputs=[path for split in splits for path in self.files("text", split)],
            params={
                "members": [source.members for source in self.task.train],
                "every": self.task.valid if len(splits) == 2 else None,
            },
        )
        sets = {"test": self.task.test}
        if isinstance(self.task.valid, Source):
            sets["valid"] = self.task.valid
        for split, source in sets.items():
            self.steps.run(
                f"text-{split}",
                f"{split} text, {source.name}",
                lambda *outputs, source=source: extract_sgm(source, data, scratch, outputs, self.args.any_size),
                inputs=[data / source.archive],
                outputs=self.files("text", split),
                params={"members": source.members},
            )

    def map(self, kind: str, split: str, source: str, making: Callable[[str], tuple], inputs: Callable) -> None:
        """A step for each language that maps source/SPLIT.LANG to kind/SPLIT.LANG line by line."""
        for lang, path, output in zip(self.langs, self.files(source, split), self.files(kind, split), strict=True):
            factory, arguments, params = making(lang)
            title = f"{split}.{lang}"
            self.steps.run(
                f"{kind}-{title}",
                f"{_VERBS[kind]} {title}",
                lambda out, path=path, title=title, factory=factory, arguments=arguments: map_file(
                    factory, arguments, path, out, title, self.args.workers
                ),
                inputs=[path, *inputs(lang)],
                outputs=[output],
                params=params,
            )

    def run(self) -> None:
        args, task, own_valid = self.args, self.task, isinstance(self.task.valid, Source)
        self.texts()
        for split in ("train", "valid", "test"):
            training = split == "train" or (split == "valid" and not own_valid)
            self.map("tok", split, "text", lambda lang, t=training: _tokenising(lang, t), lambda lang: [])
        params = {**bpe.versions(), "merges": self.merges}
        tok = dict(zip(self.langs, self.files("tok", "train"), strict=True))
        for lang in self.langs[:1] if task.joint else self.langs:
            texts = list(tok.values()) if task.joint else [tok[lang]]
            self.steps.run(
                self.codes(lang).name,
                f"learn {self.merges} BPE merges" + ("" if task.joint else f", {lang}"),
                lambda output, texts=texts: bpe.learn_codes(texts, self.merges, output),
                inputs=texts,
                outputs=[self.codes(lang)],
                params=params,
            )
        whole = ("valid", "test") if own_valid else ("test",)  # sets of their own are used as they are
        for split in ("train", "valid", "test"):
            self.map(
                "bpe" if split in whole else "encoded",
                split,
                "tok",
                lambda lang: (bpe.encoder, (self.codes(lang),), params),
                lambda lang: [self.codes(lang)],
            )
        self.used(whole)
        joined = task.joint and not args.separate_dictionaries
        self.steps.run(
            "data-bin",
            "binarise",
            lambda output: binarise_pairs(
                self.out, *self.langs, ("train", "valid", "test"), joined, args.workers, output
            ),
            inputs=[path for split in ("train", "valid", "test") for path in self.files("bpe", split)],
            outputs=[self.out / "data-bin"],
            params={"joined": joined, "langs": self.langs},
        )
        self.about(joined)

    def used(self, whole: Sequence[str]) -> None:
        """bpe/ and raw/: what training, validation and test use."""
        bounds = {"ratio": RATIO, "min_len": MIN_LEN, "max_len": MAX_LEN}
        for split in ("train", "valid", "test"):
            encoded, text, raw = (self.files(kind, split) for kind in ("encoded", "text", "raw"))

            def clean(*outputs: Path, split: str = split, encoded: list[Path] = encoded) -> None:
                kept, number = clean_pairs(encoded, outputs, RATIO, MIN_LEN, MAX_LEN)
                if not kept:
                    raise RuntimeError(f"no {split} pair of {number} is left with {bounds}")
                say(f"  {split}: {kept:,} of {number:,} pairs kept")

            def copy(*outputs: Path, text: list[Path] = text) -> None:
                for path, output in zip(text, outputs, strict=True):
                    output.write_bytes(path.read_bytes())

            def keep(*outputs: Path, text: list[Path] = text, encoded: list[Path] = encoded) -> None:
                keep_raw(encoded, text, outputs)

            title = f"raw lines of {split}"
            if split in whole:
                self.steps.run(f"raw-{split}", title, copy, inputs=text, outputs=raw, params={})
                continue
            used = self.files("bpe", split)
            self.steps.run(f"bpe-{split}", f"clean {split}", clean, inputs=encoded, outputs=used, params=bounds)
            if split != "train":
                self.steps.run(f"raw-{split}", title, keep, inputs=[*encoded, *text], outputs=raw, params=bounds)

    def about(self, joined: bool) -> None:
        task = self.task
        valid = task.valid.name if isinstance(task.valid, Source) else f"one pair in {task.valid} of them"
        about = {
            "src": task.src,
            "tgt": task.tgt,
            "splits": {"train": [source.name for source in task.train], "valid": valid, "test": task.test.name},
            "lowercase": False,
            "bpe": self.merges,
            "joined_dictionary": joined,
            "text": {lang: _recipe(lang).as_json() for lang in self.langs},
        }
        write_text(self.out / "corpus.json", json.dumps(about, indent=1) + "\n")


def positive(text: str) -> int:
    """For argparse: a number of things."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return int(text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("task", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of the archives")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that is filled")
    parser.add_argument("--bpe", type=positive, metavar="N", help="merges (default: the task's)")
    parser.add_argument("--separate-dictionaries", action="store_true", help="one for each language")
    parser.add_argument("--any-size", action="store_true", help="also take other text than was published")
    parser.add_argument("--workers", type=positive, default=cores(), help="processes (default: all cores)")
    parser.add_argument("--check-options", action="store_true", help=argparse.SUPPRESS)  # before anything is downloaded
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    with Steps(args.out.resolve()) as steps:
        Preparation(TASKS[args.task], steps, args).run()


def main() -> int:
    args = parse()
    return 0 if args.check_options else exit_status("prepare_wmt.py", lambda: run(args))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
