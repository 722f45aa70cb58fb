"""From a folder of parallel raw text to fairseq's binary data, in resumable steps.

    raw/       the text as it came, decompressed: train.en train.de valid.en … test.de (then test1.en, …)
    tok/       lower-cased (unless --no-lowercase), punctuation normalised, Moses-tokenised
    bpe/       joint byte-pair encoding: `codes`, learned on both sides of the training text, and the encoded text
    data-bin/  what fairseq-train reads
    corpus.json  languages, the parts' original names, whether the text is lower-cased, how it was tokenised

Text is lower-cased before it is normalised and tokenised, as by the Multi30k authors' own script, whose tokenised files
this reproduces.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightconv_plugin.arguments import positive
from lightconv_plugin.recipes.data import bpe, moses
from lightconv_plugin.recipes.data.binarise import binarise_pairs
from lightconv_plugin.recipes.data.pairs import clean_pairs
from lightconv_plugin.recipes.data.parallel_folder import Corpus, CorpusError, find_corpus, locate
from lightconv_plugin.recipes.data.request import Request
from lightconv_plugin.recipes.data.text_pool import iter_lines, map_file, write_lines
from lightconv_plugin.recipes.steps import Steps, say, write_text
from lightconv_plugin.text.recipe import Recipe


@dataclass(frozen=True)
class Settings:
    """How parallel text is prepared.

    bpe        number of merges
    lowercase  or keep the case
    joined     one dictionary for both languages
    max_len    longest side of a training pair, in tokens
    max_ratio  largest ratio of the lengths of a training pair
    workers    processes
    """

    bpe: int = 10_000
    lowercase: bool = True
    joined: bool = True
    max_len: int = 250
    max_ratio: float = 9.0
    workers: int = 1


def copy_pair(sources: list[Path], outputs: list[Path]) -> int:
    """Copy both sides of one part, decompressed; how many pairs. They must be of equal, positive length."""
    lengths = [write_lines(output, iter_lines(source)) for source, output in zip(sources, outputs, strict=True)]
    if lengths[0] != lengths[1]:
        raise CorpusError(f"{sources[0]} has {lengths[0]} lines but {sources[1]} has {lengths[1]}")
    if not lengths[0]:
        raise CorpusError(f"{sources[0]} is empty")
    return lengths[0]


def prepare(corpus: Corpus, out: Path, settings: Settings) -> None:
    """All steps for one corpus into `out`, an absolute folder."""
    langs = corpus.src, corpus.tgt
    splits = corpus.splits()

    def files(kind: str) -> list[Path]:
        return [out / kind / f"{split}.{lang}" for split in splits for lang in langs]

    def by_name(outputs: Iterable[Path]) -> dict[tuple[str, str], Path]:
        return dict(zip([(split, lang) for split in splits for lang in langs], outputs, strict=True))

    tokeniser = partial(moses.tokeniser, normalise=True, lowercase_first=settings.lowercase, keep_last=True)

    def raw(*outputs: Path) -> None:
        target = by_name(outputs)
        for split, prefix in splits.items():
            sides = [locate(corpus.folder, prefix, lang) for lang in langs]
            say(f"  {split}: {copy_pair(sides, [target[split, lang] for lang in langs])} pairs of lines")

    def tok(*outputs: Path) -> None:
        for (split, lang), path in by_name(outputs).items():
            name = f"{split}.{lang}"
            map_file(tokeniser, (lang,), out / "raw" / name, path, name, settings.workers)

    def codes(output: Path) -> None:
        bpe.learn_codes([out / "tok" / f"train.{lang}" for lang in langs], settings.bpe, output)

    def encode(*outputs: Path) -> None:
        target = by_name(outputs)
        for (split, lang), path in target.items():
            name = f"{split}.{lang}"
            map_file(bpe.encoder, (out / "bpe" / "codes",), out / "tok" / name, path, name, settings.workers)
        encoded = [target["train", lang] for lang in langs]
        cleaned = [path.with_suffix(".clean") for path in encoded]
        kept, of = clean_pairs(encoded, cleaned, settings.max_ratio, 1, settings.max_len)
        if not kept:
            bounds = f"--max-len {settings.max_len} and --max-ratio {settings.max_ratio}"
            raise CorpusError(f"no training pair is left with {bounds}")
        for source, output in zip(cleaned, encoded, strict=True):
            source.replace(output)
        say(f"  train: {kept} of {of} pairs kept")

    def data_bin(output: Path) -> None:
        binarise_pairs(out, *langs, list(splits), settings.joined, settings.workers, output)

    with Steps(out) as steps:
        sources = [locate(corpus.folder, prefix, lang) for prefix in splits.values() for lang in langs]
        steps.run("raw", "raw text", raw, inputs=sources, outputs=files("raw"), params={})
        how = {**moses.versions(), "langs": langs, "lowercase": settings.lowercase}
        steps.run("tok", "tokenise", tok, inputs=files("raw"), outputs=files("tok"), params=how)
        train = [out / "tok" / f"train.{lang}" for lang in langs]
        code_file = out / "bpe" / "codes"
        merges = {**bpe.versions(), "merges": settings.bpe}
        steps.run("codes", f"learn {settings.bpe} BPE merges", codes, inputs=train, outputs=[code_file], params=merges)
        clean = {"max_len": settings.max_len, "max_ratio": settings.max_ratio}
        steps.run("bpe", "apply BPE", encode, inputs=[*files("tok"), code_file], outputs=files("bpe"), params=clean)
        steps.run(
            "data-bin",
            "binarise",
            data_bin,
            inputs=files("bpe"),
            outputs=[out / "data-bin"],
            params={"joined": settings.joined, "langs": langs},
        )
        about = {
            "src": corpus.src,
            "tgt": corpus.tgt,
            "splits": splits,
            "lowercase": settings.lowercase,
            "bpe": settings.bpe,
        }
        case = "first" if settings.lowercase else ""
        recipes = {lang: Recipe("moses", lang, lowercase=case, normalise=True, keep_last=True) for lang in langs}
        about["text"] = {lang: recipe.as_json() for lang, recipe in recipes.items()}
        write_text(out / "corpus.json", json.dumps(about, indent=1) + "\n")


def ratio(text: str) -> float:
    """A number of at least 1, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 1 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return number


def add_options(parser: argparse.ArgumentParser, bpe: int) -> None:
    """The options of the steps; `bpe` is the default number of merges."""
    parser.add_argument("--src", default="en", metavar="XX", help="source language (default: %(default)s)")
    parser.add_argument("--tgt", default="de", metavar="XX", help="target language (default: %(default)s)")
    parser.add_argument("--train-prefix", metavar="P", help="training text: P.SRC and P.TGT (default: by file name)")
    parser.add_argument("--valid-prefix", metavar="P", help="validation text (default: by file name)")
    parser.add_argument("--test-prefix", metavar="P[,P…]", default="", help="test sets (default: by file name)")
    parser.add_argument("--bpe", type=positive, default=bpe, metavar="N", help="merges (default: %(default)s)")
    parser.add_argument("--no-lowercase", dest="lowercase", action="store_false", help="keep the case")
    parser.add_argument(
        "--separate-dictionaries", dest="joined", action="store_false", help="one dictionary for each language"
    )
    parser.add_argument(
        "--max-len", type=positive, default=250, metavar="N", help="longest training side in tokens (default: 250)"
    )
    parser.add_argument(
        "--max-ratio", type=ratio, default=9.0, metavar="R", help="largest ratio of the two lengths (default: 9)"
    )


def run(request: Request, tests: Sequence[str] = ()) -> None:
    """All steps for the corpus in `request.data`; `tests` are its test sets, unless the options name others."""
    args = request.options
    named = tuple(filter(None, args.test_prefix.split(",")))
    corpus = find_corpus(request.data, args.src, args.tgt, args.train_prefix, args.valid_prefix, named or tests)
    say(f"{corpus.src} → {corpus.tgt}: {corpus.train}, {corpus.valid}, {', '.join(corpus.tests)} in {request.data}")
    settings = Settings(args.bpe, args.lowercase, args.joined, args.max_len, args.max_ratio, request.workers)
    prepare(corpus, request.out, settings)
