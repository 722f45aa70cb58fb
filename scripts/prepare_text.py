"""From a folder of parallel raw text to fairseq's binary data, in resumable steps.

    raw/       the text as it came, decompressed: train.en train.de valid.en … test.de (then test1.en, …)
    tok/       lower-cased (unless --no-lowercase), punctuation normalised, Moses-tokenised
    bpe/       joint byte-pair encoding: `codes`, learned on both sides of the training text, and the encoded text
    data-bin/  what fairseq-train reads
    corpus.json  languages, the parts' original names, whether the text is lower-cased

Lower-casing comes before normalisation and tokenisation, the order of the Multi30k authors' own script, whose tokenised
files this reproduces.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

from parallel_folder import Corpus, CorpusError, find_corpus, locate, read_lines, read_pair
from steps import Steps, cores, exit_status, say, write_text
from tqdm import tqdm

_work: Callable[[str], str]  # what the pool's processes apply to a line; set by their initialiser


def _tokeniser(lang: str, lowercase: bool) -> Callable[[str], str]:
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normaliser, tokeniser = MosesPunctNormalizer(lang=lang), MosesTokenizer(lang=lang)

    def tokenise(line: str) -> str:
        line = normaliser.normalize(line.lower() if lowercase else line)
        # split() also removes white space that other programs might take for the end of a line
        return " ".join(tokeniser.tokenize(line, return_str=True).split())

    return tokenise


def _encoder(codes: Path) -> Callable[[str], str]:
    from subword_nmt.apply_bpe import BPE

    with codes.open(encoding="utf-8") as file:
        return BPE(file).process_line


def _start_worker(factory: Callable[..., Callable[[str], str]], arguments: tuple) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    _work = factory(*arguments)


def _apply(line: str) -> str:
    return _work(line)


def map_lines(
    factory: Callable[..., Callable[[str], str]], arguments: tuple, lines: list[str], title: str, workers: int
) -> list[str]:
    """`factory(*arguments)` made once in each process and applied to every line, in order, with a progress bar."""
    often = 0.2 if sys.stderr.isatty() else 10
    bar = {"total": len(lines), "desc": f"  {title}", "unit": " lines", "mininterval": often, "leave": False}
    with multiprocessing.Pool(workers, _start_worker, (factory, arguments)) as pool:
        return list(tqdm(pool.imap(_apply, lines, chunksize=256), **bar))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(line + "\n" for line in lines)


def learn_codes(texts: Iterable[Path], merges: int, output: Path) -> None:
    """Joint BPE: the merges are learned on the words of all texts together (as `cat texts | subword-nmt learn-bpe`)."""
    from subword_nmt import learn_bpe

    words: Counter[str] = Counter()
    for path in texts:
        for line in read_lines(path):
            words.update(line.split())
    vocabulary = io.StringIO("".join(f"{word} {count}\n" for word, count in words.items()))
    with output.open("w", encoding="utf-8") as file:
        learn_bpe.learn_bpe(vocabulary, file, merges, is_dict=True)


def keep_pair(source: str, target: str, max_len: int, max_ratio: float) -> bool:
    """Whether a training pair is usable: both sides 1 … max_len tokens, neither more than max_ratio times the other."""
    n, m = len(source.split()), len(target.split())
    return min(n, m) > 0 and max(n, m) <= max_len and max(n, m) <= max_ratio * min(n, m)


def binarise(root: Path, corpus: Corpus, joined: bool, workers: int, output: Path) -> None:
    """fairseq-preprocess, its own messages to preprocess.log and its counts to the terminal."""
    command = [sys.executable, "-m", "fairseq_cli.preprocess", "--source-lang", corpus.src, "--target-lang", corpus.tgt]
    tests = ",".join(f"bpe/{name}" for name in corpus.splits() if name.startswith("test"))
    command += ["--trainpref", "bpe/train", "--validpref", "bpe/valid", "--testpref", tests]
    command += ["--destdir", str(output.relative_to(root)), "--workers", str(workers)]
    command += ["--joined-dictionary"] if joined else []
    # Started in the folder, with relative names: fairseq divides --testpref at commas, and the folder may have one.
    with (root / "preprocess.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        tail: list[str] = []
        for line in process.stdout:
            log.write(line)
            tail = [*tail[-15:], line]
            if "Dictionary:" in line or " sents, " in line:
                say("  " + re.sub(r".*(?=\[)", "", line.rstrip()))
    if process.wait() != 0:
        raise RuntimeError(f"fairseq-preprocess failed with status {process.returncode}:\n{''.join(tail)}")


def prepare(corpus: Corpus, out: Path, args: argparse.Namespace) -> None:
    """All steps for one corpus into `out`."""
    langs = corpus.src, corpus.tgt
    splits = corpus.splits()

    def files(kind: str) -> list[Path]:
        return [out / kind / f"{split}.{lang}" for split in splits for lang in langs]

    def by_name(outputs: Iterable[Path]) -> dict[tuple[str, str], Path]:
        return dict(zip([(split, lang) for split in splits for lang in langs], outputs, strict=True))

    def raw(*outputs: Path) -> None:
        target = by_name(outputs)
        for split, prefix in splits.items():
            for lang, lines in zip(langs, read_pair(corpus.folder, prefix, *langs), strict=True):
                write_lines(target[split, lang], lines)
            say(f"  {split}: {len(lines)} pairs of lines")

    def tok(*outputs: Path) -> None:
        for (split, lang), path in by_name(outputs).items():
            lines = read_lines(out / "raw" / f"{split}.{lang}")
            write_lines(path, map_lines(_tokeniser, (lang, args.lowercase), lines, f"{split}.{lang}", args.workers))

    def codes(output: Path) -> None:
        learn_codes([out / "tok" / f"train.{lang}" for lang in langs], args.bpe, output)

    def bpe(*outputs: Path) -> None:
        target = by_name(outputs)
        for split in splits:
            pair = []
            for lang in langs:
                lines = read_lines(out / "tok" / f"{split}.{lang}")
                pair.append(map_lines(_encoder, (out / "bpe" / "codes",), lines, f"{split}.{lang}", args.workers))
            rows = list(zip(*pair, strict=True))
            if split == "train":
                kept = [row for row in rows if keep_pair(*row, args.max_len, args.max_ratio)]
                if not kept:
                    raise CorpusError(
                        f"no training pair is left after --max-len {args.max_len} --max-ratio {args.max_ratio}"
                    )
                say(f"  train: {len(kept)} of {len(rows)} pairs kept")
                rows = kept
            for lang, lines in zip(langs, zip(*rows, strict=True), strict=True):
                write_lines(target[split, lang], lines)

    with Steps(out) as steps:
        sources = [locate(corpus.folder, prefix, lang) for prefix in splits.values() for lang in langs]
        steps.run("raw", "raw text", raw, inputs=sources, outputs=files("raw"), params={})
        moses = {"sacremoses": version("sacremoses"), "langs": langs, "lowercase": args.lowercase}
        steps.run("tok", "tokenise", tok, inputs=files("raw"), outputs=files("tok"), params=moses)
        train = [out / "tok" / f"train.{lang}" for lang in langs]
        code_file = out / "bpe" / "codes"
        merges = {"subword-nmt": version("subword-nmt"), "merges": args.bpe}
        steps.run("codes", f"learn {args.bpe} BPE merges", codes, inputs=train, outputs=[code_file], params=merges)
        clean = {"max_len": args.max_len, "max_ratio": args.max_ratio}
        steps.run("bpe", "apply BPE", bpe, inputs=[*files("tok"), code_file], outputs=files("bpe"), params=clean)
        steps.run(
            "data-bin",
            "binarise",
            lambda output: binarise(out, corpus, args.joined, args.workers, output),
            inputs=files("bpe"),
            outputs=[out / "data-bin"],
            params={"joined": args.joined, "langs": langs},
        )
        about = {"src": corpus.src, "tgt": corpus.tgt, "splits": splits, "lowercase": args.lowercase, "bpe": args.bpe}
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
