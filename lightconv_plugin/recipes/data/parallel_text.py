"""From a folder of parallel raw text to fairseq's binary data, in resumable steps.

    raw/       the text as it came, decompressed: train.en train.de valid.en … test.de (then test1.en, …)
    tok/       lower-cased if requested, punctuation normalised, Moses-tokenised
    bpe/       byte-pair encoding: `codes`, learned on both sides of the training text (or `codes.en` and `codes.de`,
               each on its own side), and the encoded text
    data-bin/  what fairseq-train reads
    corpus.json  languages, the parts' original names, whether the text is lower-cased, how it was tokenised

Text is lower-cased before it is normalised and tokenised, like in the Multi30k authors' script, whose tokenised files
this reproduces (with `keep_last`). Validation and test sets without files are held out from the training text.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightconv_plugin.arguments import positive
from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.data import bpe, moses
from lightconv_plugin.recipes.data.binarise import binarise_pairs
from lightconv_plugin.recipes.data.pairs import clean_pairs, hold_out
from lightconv_plugin.recipes.data.parallel_folder import Corpus, CorpusError, find_corpus, locate
from lightconv_plugin.recipes.data.request import Request
from lightconv_plugin.recipes.data.text_pool import BLOCK, iter_lines, map_file, write_lines
from lightconv_plugin.recipes.steps import Steps, remove, say, write_text
from lightconv_plugin.text.recipe import Recipe, moses_rules

COPIES = 8  # copies of the training text with --bpe-dropout


@dataclass(frozen=True)
class Settings:
    """How parallel text is prepared.

    bpe        number of merges, per language if not joint_bpe
    lowercase  lower-case the text
    joined     one dictionary for both languages
    max_len    longest side of a training pair, in tokens
    max_ratio  largest ratio of the lengths of a training pair
    workers    number of processes
    joint_bpe  learn the merges on both languages together
    tokenizer  "moses", or "none" for text that is already tokenised
    keep_last  see `moses.tokeniser`
    bpe_dropout, bpe_copies  encode the training text bpe_copies times: once by plain BPE, the others by BPE-dropout
               with probability bpe_dropout; 0, 1 without it
    held_out   {"valid": pairs, "test": pairs}: how many pairs are taken from the training text
    seed       determines which pairs are held out
    """

    bpe: int = 10_000
    lowercase: bool = True
    joined: bool = True
    max_len: int = 250
    max_ratio: float = 9.0
    workers: int = 1
    joint_bpe: bool = True
    tokenizer: Literal["moses", "none"] = "moses"
    keep_last: bool = False
    bpe_dropout: float = 0.0
    bpe_copies: int = 1
    held_out: Mapping[str, int] = field(default_factory=dict)
    seed: int = 1

    def recipe(self, lang: str) -> Recipe:
        """The steps from a language's raw text to tokens. CorpusError if the tokeniser has no rules for it.

        A region, as in pt_BR, has the rules of its language.
        """
        case: Literal["", "first"] = "first" if self.lowercase else ""
        if self.tokenizer == "none":
            return Recipe("none", lang, lowercase=case)
        try:
            rules = moses_rules(lang)
        except ValueError as error:
            raise CorpusError(str(error)) from None
        return Recipe("moses", rules, lowercase=case, normalise=True, keep_last=self.keep_last)


def copy_pair(sources: list[Path], outputs: list[Path]) -> int:
    """Copy both sides of one part, decompressed; returns the number of pairs. Both need text and equal line counts."""
    lengths = []
    for source, output in zip(sources, outputs, strict=True):
        lengths.append(write_lines(output, iter_lines(source)))
        if not any(map(str.strip, iter_lines(output))):
            raise CorpusError(f"{source} has no text: " + (f"{lengths[-1]} empty lines" if lengths[-1] else "0 bytes"))
    if lengths[0] != lengths[1]:
        raise CorpusError(f"{sources[0]} has {lengths[0]} lines but {sources[1]} has {lengths[1]}")
    return lengths[0]


def append(source: Path, target: Path) -> None:
    """Copy the text of `source` to the end of `target`."""
    with source.open("rb") as file, target.open("ab") as end:
        shutil.copyfileobj(file, end, BLOCK)


def prepare(corpus: Corpus, out: Path, settings: Settings) -> None:
    """Run all steps for one corpus; `out` is an absolute folder."""
    langs = corpus.src, corpus.tgt
    splits = corpus.splits()
    for split, pairs in settings.held_out.items():
        splits[split] = f"{pairs} pairs of {corpus.train}, seed {settings.seed}"
    recipes = {lang: settings.recipe(lang) for lang in langs}
    # {file of merges: the languages whose training text they are learned on}
    codes_of = {"codes": langs} if settings.joint_bpe else {f"codes.{lang}": (lang,) for lang in langs}

    def files(kind: str) -> list[Path]:
        return [out / kind / f"{split}.{lang}" for split in splits for lang in langs]

    def by_name(outputs: Iterable[Path]) -> dict[tuple[str, str], Path]:
        return dict(zip([(split, lang) for split in splits for lang in langs], outputs, strict=True))

    def raw(*outputs: Path) -> None:
        target = by_name(outputs)
        for split, prefix in corpus.splits().items():
            sides = [locate(corpus.folder, prefix, lang) for lang in langs]
            say(f"  {split}: {copy_pair(sides, [target[split, lang] for lang in langs])} pairs of lines")
        if settings.held_out:
            parts = {split: [target[split, lang] for lang in langs] for split in ("train", *settings.held_out)}
            tokens = [recipes[lang].tokenise() for lang in langs]
            left, of = hold_out(parts.pop("train"), parts, settings.held_out, settings.seed, tokens)
            alike = of - left - sum(settings.held_out.values())
            held_out = ", ".join(f"{pairs} for {split}" for split, pairs in settings.held_out.items())
            say(f"  held out: {held_out}; {alike} pairs that share a side with them removed; {left} left for training")

    def tok(*outputs: Path) -> None:
        for (split, lang), path in by_name(outputs).items():
            name = f"{split}.{lang}"
            map_file(Recipe.tokenise, (recipes[lang],), out / "raw" / name, path, name, settings.workers)

    def encode(*outputs: Path) -> None:
        target = by_name(outputs)
        for (split, lang), path in target.items():
            name = f"{split}.{lang}"
            file = next(file for file, of in codes_of.items() if lang in of)
            map_file(bpe.encoder, (out / "bpe" / file,), out / "tok" / name, path, name, settings.workers)
            for copy in range(1, settings.bpe_copies if split == "train" else 1):
                how = (out / "bpe" / file, settings.bpe_dropout, copy)
                again = path.with_suffix(f"{path.suffix}.{copy}")
                try:
                    map_file(bpe.dropout_encoder, how, out / "tok" / name, again, f"{name}, {copy}", settings.workers)
                    append(again, path)
                finally:
                    again.unlink(missing_ok=True)
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
        sources = [locate(corpus.folder, prefix, lang) for prefix in corpus.splits().values() for lang in langs]
        held_out = {"held_out": dict(settings.held_out), "seed": settings.seed} if settings.held_out else {}
        steps.run("raw", "raw text", raw, inputs=sources, outputs=files("raw"), params=held_out)
        how = {**moses.versions(), "text": {lang: recipe.as_json() for lang, recipe in recipes.items()}}
        steps.run("tok", "tokenise", tok, inputs=files("raw"), outputs=files("tok"), params=how)
        for stale in set((out / "bpe").glob("codes*")) - {out / "bpe" / name for name in codes_of}:
            remove(stale)  # from a run with the other kind of merges; `lightconv translate` would use it
        for name, of in codes_of.items():
            train = [out / "tok" / f"train.{lang}" for lang in of]
            steps.run(
                name,
                f"learn {settings.bpe} BPE merges" + ("" if settings.joint_bpe else f", {of[0]}"),
                partial(bpe.learn_codes, train, settings.bpe),
                inputs=train,
                outputs=[out / "bpe" / name],
                params={**bpe.versions(), "merges": settings.bpe},
            )
        merges = [out / "bpe" / name for name in codes_of]
        clean = {"max_len": settings.max_len, "max_ratio": settings.max_ratio}
        if settings.bpe_dropout:
            clean |= {"bpe_dropout": settings.bpe_dropout, "bpe_copies": settings.bpe_copies}
        steps.run("bpe", "apply BPE", encode, inputs=[*files("tok"), *merges], outputs=files("bpe"), params=clean)
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
            "text": {lang: recipe.as_json() for lang, recipe in recipes.items()},
        }
        write_text(out / "corpus.json", json.dumps(about, indent=1) + "\n")


def number(text: str) -> float:
    """The text as a number, nan if it is not one."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def ratio(text: str) -> float:
    """A number of at least 1, for argparse."""
    if not 1 <= number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return number(text)


def probability(text: str) -> float:
    """A number above 0 and below 1, for argparse."""
    if not 0 < number(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and below 1, got {text!r}")
    return number(text)


def language(text: str) -> str:
    """The code of a language, for argparse. fairseq splits the names of binarised data at "." and "-"."""
    if not re.fullmatch(r"\w+", text):
        raise argparse.ArgumentTypeError(f"must be a language code such as de or pt_BR, without -, got {text!r}")
    return text


def add_options(
    parser: argparse.ArgumentParser,
    bpe: int,
    langs: tuple[str | None, str | None] = ("en", "de"),
    lowercase: bool = True,
) -> None:
    """The options of the steps.

    bpe, langs, lowercase: the defaults of --bpe, --src and --tgt (None: by file name), and --lowercase.
    """
    for option, side, lang in zip(("--src", "--tgt"), ("source", "target"), langs, strict=True):
        parser.add_argument(
            option,
            type=language,
            default=lang,
            metavar="XX",
            help=f"{side} language (default: {lang or 'by file name'})",
        )
    parser.add_argument("--train-prefix", metavar="P", help="training text: P.SRC and P.TGT (default: by file name)")
    parser.add_argument("--valid-prefix", metavar="P", help="validation text (default: by file name)")
    parser.add_argument("--test-prefix", metavar="P[,P…]", default="", help="test sets (default: by file name)")
    parser.add_argument("--bpe", type=positive, default=bpe, metavar="N", help="merges (default: %(default)s)")
    parser.add_argument(
        "--bpe-dropout",
        type=probability,
        metavar="P",
        help="encode the training text several times, leaving out merges with this probability in all but the first; "
        "0.1 is usual",
    )
    parser.add_argument(
        "--bpe-copies", type=positive, metavar="N", help=f"how many times, with --bpe-dropout (default: {COPIES})"
    )
    parser.add_argument(
        "--lowercase",
        action=argparse.BooleanOptionalAction,
        default=lowercase,
        help=f"lower-case the text, or keep the case (default: {'lower-case' if lowercase else 'keep'})",
    )
    parser.add_argument(
        "--separate-dictionaries", dest="joined", action="store_false", help="one dictionary for each language"
    )
    parser.add_argument(
        "--max-len", type=positive, default=250, metavar="N", help="longest training side in tokens (default: 250)"
    )
    parser.add_argument(
        "--max-ratio", type=ratio, default=9.0, metavar="R", help="largest ratio of the two lengths (default: 9)"
    )


def settings_of(request: Request, **more: Any) -> Settings:
    """The settings from the options of `add_options` and from `more`.

    Raises:
        InputError: copies without dropout, or a single copy with it.
    """
    args = request.options
    if args.bpe_copies and not args.bpe_dropout:
        raise InputError(f"--bpe-copies {args.bpe_copies} needs --bpe-dropout: the copies would all be the same")
    if args.bpe_copies == 1:
        raise InputError("--bpe-copies must be at least 2 with --bpe-dropout, got 1: the first copy has all merges")
    common = {"bpe": args.bpe, "lowercase": args.lowercase, "joined": args.joined}
    common |= {"max_len": args.max_len, "max_ratio": args.max_ratio, "workers": request.workers}
    if args.bpe_dropout:
        common |= {"bpe_dropout": args.bpe_dropout, "bpe_copies": args.bpe_copies or COPIES}
    return Settings(**common | more)


def run(request: Request, settings: Settings, tests: Sequence[str] = ()) -> None:
    """Run all steps for the corpus in `request.data`; `tests` are its test sets, unless the options name others."""
    args = request.options
    named = tuple(filter(None, args.test_prefix.split(",")))
    corpus = find_corpus(
        *(request.data, args.src, args.tgt, args.train_prefix, args.valid_prefix, named or tests),
        without=tuple(settings.held_out),
    )
    found = (corpus.train, corpus.valid, *corpus.tests)
    say(f"{corpus.src} → {corpus.tgt}: {', '.join(filter(None, found))} in {request.data}")
    prepare(corpus, request.out, settings)
