"""From a folder of parallel raw text to fairseq's binary data, in resumable steps.

    raw/       the text as it came, decompressed: train.en train.de valid.en … test.de (then test1.en, …)
    tok/       lower-cased (unless --no-lowercase), punctuation normalised, Moses-tokenised
    bpe/       joint byte-pair encoding: `codes`, learned on both sides of the training text, and the encoded text
    data-bin/  what fairseq-train reads
    corpus.json  languages, the parts' original names, whether the text is lower-cased, how it was tokenised

Lower-casing comes before normalisation and tokenisation, the order of the Multi30k authors' own script, whose tokenised
files this reproduces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from lightconv_plugin.recipes.data import bpe, moses
from lightconv_plugin.recipes.data.binarise import binarise_pairs
from lightconv_plugin.recipes.data.pairs import clean_pairs
from lightconv_plugin.recipes.data.parallel_folder import Corpus, CorpusError, find_corpus, locate
from lightconv_plugin.recipes.data.text_pool import iter_lines, map_file, write_lines
from lightconv_plugin.recipes.steps import Steps, cores, exit_status, say, write_text
from lightconv_plugin.text.recipe import Recipe


def copy_pair(sources: list[Path], outputs: list[Path]) -> int:
    """Copy both sides of one part, decompressed; how many pairs. They must be of equal, positive length."""
    lengths = [write_lines(output, iter_lines(source)) for source, output in zip(sources, outputs, strict=True)]
    if lengths[0] != lengths[1]:
        raise CorpusError(f"{sources[0]} has {lengths[0]} lines but {sources[1]} has {lengths[1]}")
    if not lengths[0]:
        raise CorpusError(f"{sources[0]} is empty")
    return lengths[0]


def prepare(corpus: Corpus, out: Path, args: argparse.Namespace) -> None:
    """All steps for one corpus into `out`."""
    langs = corpus.src, corpus.tgt
    splits = corpus.splits()

    def files(kind: str) -> list[Path]:
        return [out / kind / f"{split}.{lang}" for split in splits for lang in langs]

    def by_name(outputs: Iterable[Path]) -> dict[tuple[str, str], Path]:
        return dict(zip([(split, lang) for split in splits for lang in langs], outputs, strict=True))

    tokeniser = partial(moses.tokeniser, normalise=True, lowercase_first=args.lowercase, keep_last=True)

    def raw(*outputs: Path) -> None:
        target = by_name(outputs)
        for split, prefix in splits.items():
            sides = [locate(corpus.folder, prefix, lang) for lang in langs]
            say(f"  {split}: {copy_pair(sides, [target[split, lang] for lang in langs])} pairs of lines")

    def tok(*outputs: Path) -> None:
        for (split, lang), path in by_name(outputs).items():
            name = f"{split}.{lang}"
            map_file(tokeniser, (lang,), out / "raw" / name, path, name, args.workers)

    def codes(output: Path) -> None:
        bpe.learn_codes([out / "tok" / f"train.{lang}" for lang in langs], args.bpe, output)

    def encode(*outputs: Path) -> None:
        target = by_name(outputs)
        for (split, lang), path in target.items():
            name = f"{split}.{lang}"
            map_file(bpe.encoder, (out / "bpe" / "codes",), out / "tok" / name, path, name, args.workers)
        encoded = [target["train", lang] for lang in langs]
        cleaned = [path.with_suffix(".clean") for path in encoded]
        kept, of = clean_pairs(encoded, cleaned, args.max_ratio, 1, args.max_len)
        if not kept:
            raise CorpusError(f"no training pair is left after --max-len {args.max_len} --max-ratio {args.max_ratio}")
        for source, output in zip(cleaned, encoded, strict=True):
            source.replace(output)
        say(f"  train: {kept} of {of} pairs kept")

    def data_bin(output: Path) -> None:
        binarise_pairs(out, *langs, list(splits), args.joined, args.workers, output)

    with Steps(out) as steps:
        sources = [locate(corpus.folder, prefix, lang) for prefix in splits.values() for lang in langs]
        steps.run("raw", "raw text", raw, inputs=sources, outputs=files("raw"), params={})
        how = {**moses.versions(), "langs": langs, "lowercase": args.lowercase}
        steps.run("tok", "tokenise", tok, inputs=files("raw"), outputs=files("tok"), params=how)
        train = [out / "tok" / f"train.{lang}" for lang in langs]
        code_file = out / "bpe" / "codes"
        merges = {**bpe.versions(), "merges": args.bpe}
        steps.run("codes", f"learn {args.bpe} BPE merges", codes, inputs=train, outputs=[code_file], params=merges)
        clean = {"max_len": args.max_len, "max_ratio": args.max_ratio}
        steps.run("bpe", "apply BPE", encode, inputs=[*files("tok"), code_file], outputs=files("bpe"), params=clean)
        steps.run(
            "data-bin",
            "binarise",
            data_bin,
            inputs=files("bpe"),
            outputs=[out / "data-bin"],
            params={"joined": args.joined, "langs": langs},
        )
        about = {"src": corpus.src, "tgt": corpus.tgt, "splits": splits, "lowercase": args.lowercase, "bpe": args.bpe}
        case = "first" if args.lowercase else ""
        recipes = {lang: Recipe("moses", lang, lowercase=case, normalise=True, keep_last=True) for lang in langs}
        about["text"] = {lang: recipe.as_json() for lang, recipe in recipes.items()}
        write_text(out / "corpus.json", json.dumps(about, indent=1) + "\n")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--raw", type=Path, required=True, metavar="DIR", help="folder of parallel text")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where raw/ tok/ bpe/ data-bin/ go")
    parser.add_argument("--src", help="source language (default: found by the file names, English first)")
    parser.add_argument("--tgt", help="target language")
    parser.add_argument("--train-prefix", metavar="P", help="training text is P.SRC and P.TGT (default: found by name)")
    parser.add_argument("--valid-prefix", metavar="P")
    parser.add_argument("--test-prefix", metavar="P[,P…]", default="", help="one or several test sets")
    parser.add_argument("--bpe", type=int, default=10000, metavar="N", help="merges (default %(default)s)")
    parser.add_argument("--no-lowercase", dest="lowercase", action="store_false", help="keep the case")
    parser.add_argument("--separate-dictionaries", dest="joined", action="store_false")
    parser.add_argument(
        "--max-len", type=int, default=250, help="longest training side in tokens (default %(default)s)"
    )
    parser.add_argument("--max-ratio", type=float, default=9.0, help="largest ratio of lengths (default %(default)s)")
    parser.add_argument("--workers", type=int, default=cores(), help="processes (default: all cores, here %(default)s)")
    args = parser.parse_args(argv)
    for name in ("bpe", "max_len", "workers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    if args.max_ratio < 1:
        parser.error(f"--max-ratio must be at least 1, got {args.max_ratio}")
    return args


def run(args: argparse.Namespace) -> None:
    tests = tuple(filter(None, args.test_prefix.split(",")))
    corpus = find_corpus(args.raw, args.src, args.tgt, args.train_prefix, args.valid_prefix, tests)
    say(f"{corpus.src} → {corpus.tgt}: {corpus.train}, {corpus.valid}, {', '.join(corpus.tests)} in {args.raw}")
    prepare(corpus, args.out.resolve(), args)


def main() -> int:
    args = parse()
    return exit_status("prepare_text.py", lambda: run(args))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
