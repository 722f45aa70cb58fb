"""From running text, tokenised already, to fairseq's binary data for language models, in resumable steps.

    raw/       train.txt, valid.txt, test.txt as they came, decompressed: one sentence or paragraph a line
    data-bin/  what fairseq-train --task language_modeling reads; every line ends with </s>, also an empty one

The vocabulary is that of the training text; <unk> in the text is fairseq's own unknown word.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import re
import shutil
import subprocess
import sys
from pathlib import Path

from parallel_folder import CorpusError
from steps import Steps, cores, exit_status, say

PARTS = ("train", "valid", "test")


def find_part(folder: Path, part: str) -> Path:
    """The file of a part: train.txt, wiki.train.tokens, … plain before .gz.

    Raises:
        CorpusError: there is none, or there are several.
    """
    if not folder.is_dir():
        raise CorpusError(f"no folder {folder}")
    pattern = re.compile(rf"(.*[._-])?{part}(\.[a-z]+)?(\.gz)?")
    found = sorted(path for path in folder.iterdir() if path.is_file() and pattern.fullmatch(path.name))
    found = [path for path in found if path.suffix != ".gz" or path.with_suffix("") not in found]
    if len(found) != 1:
        wanted = f"one file {part}.txt (or wiki.{part}.tokens, …), plain or .gz"
        raise CorpusError(f"{folder}: expected {wanted}, found {', '.join(p.name for p in found) or 'none'}")
    return found[0]


def unpack(source: Path, output: Path) -> None:
    """Copy a text, decompressed where it is .gz. CorpusError where it is empty or cut short."""
    opener = gzip.open if source.suffix == ".gz" else open
    try:
        with opener(source, "rb") as file, output.open("wb") as out:
            shutil.copyfileobj(file, out)
    except (EOFError, gzip.BadGzipFile) as error:
        raise CorpusError(f"{source} cannot be decompressed: {error}") from error
    if not output.stat().st_size:
        raise CorpusError(f"{source} is empty")


def binarise(root: Path, threshold: int, workers: int, output: Path) -> None:
    """fairseq-preprocess --only-source, its own messages to preprocess.log and its counts to the terminal."""
    command = [sys.executable, "-m", "fairseq_cli.preprocess", "--only-source", "--thresholdsrc", str(threshold)]
    command += [f"--{part}pref=raw/{part}.txt" for part in PARTS]
    command += ["--destdir", output.name, "--workers", str(workers)]
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


def prepare(source: Path, out: Path, threshold: int, workers: int) -> None:
    """All steps for the texts in the folder `source` into `out`."""
    parts = [find_part(source, part) for part in PARTS]
    texts = [out / "raw" / f"{part}.txt" for part in PARTS]

    def raw(*outputs: Path) -> None:
        for path, output in zip(parts, outputs, strict=True):
            unpack(path, output)

    def data_bin(output: Path) -> None:
        binarise(out, threshold, workers, output)

    with Steps(out) as steps:
        steps.run("raw", "raw text", raw, inputs=parts, outputs=texts, params={})
        params = {"threshold": threshold}
        steps.run("data-bin", "binarise", data_bin, inputs=texts, outputs=[out / "data-bin"], params=params)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--raw", type=Path, required=True, metavar="DIR", help="folder with train, valid and test text")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where raw/ and data-bin/ go")
    parser.add_argument(
        "--threshold", type=int, default=0, metavar="N", help="words seen less than N times become <unk> (default: 0)"
    )
    parser.add_argument("--workers", type=int, default=cores(), help="processes (default: all cores, here %(default)s)")
    args = parser.parse_args(argv)
    if args.threshold < 0:
        parser.error(f"--threshold must be at least 0, got {args.threshold}")
    if args.workers < 1:
        parser.error(f"--workers must be positive, got {args.workers}")
    return args


def main() -> int:
    args = parse()
    return exit_status(
        "prepare_language_model.py", lambda: prepare(args.raw, args.out.resolve(), args.threshold, args.workers)
    )


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
