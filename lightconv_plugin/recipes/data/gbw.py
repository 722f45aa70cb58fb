"""The One Billion Word benchmark's archive to fairseq's binary data, in resumable steps.

    raw/       train.txt: the 99 files of training text one after the other; valid.txt, test.txt: one held-out file each
    data-bin/  what fairseq-train --task language_modeling reads; every line, a sentence, ends with </s>

Words seen less often than --threshold in the training text become <unk>.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from tqdm import tqdm

from lightconv_plugin.recipes.data.archives import unpack
from lightconv_plugin.recipes.data.language_model import UNPACKED_LIMIT, Size, add_common, check_common, prepare
from lightconv_plugin.recipes.data.parallel_folder import CorpusError
from lightconv_plugin.recipes.steps import exit_status, remove, say

TRAIN = [f"training-monolingual.tokenized.shuffled/news.en-{i:05}-of-00100" for i in range(1, 100)]
HELD_OUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout-{:05}-of-00050"
VALID, TEST = HELD_OUT.format(1), HELD_OUT.format(0)

# The training text's lines are TensorFlow Datasets' (lm1b). The test text's tokens are Tensor2Tensor's (its class
# LanguagemodelLm1b32k); less its 153,583 words (faster-rnnlm's results), that is one </s> in each of 6,075 lines.
EXPECTED = {"train": Size(30_301_028, None), "test": Size(6_075, 159_658)}


def shards(files: list[Path], names: list[str], archive: Path) -> list[Path]:
    """The files of these names, in their order. CorpusError where one is missing or there twice."""
    found: dict[str, Path] = {}
    for path in files:
        name = "/".join(path.parts[-2:])
        if name in found:
            raise CorpusError(f"{archive} has {name} twice")
        found[name] = path
    missing = [name for name in names if name not in found]
    if missing:
        raise CorpusError(f"{archive} lacks {len(missing)} of the {len(names)} files of text, the first: {missing[0]}")
    return [found[name] for name in names]


def join(paths: list[Path], output: Path) -> None:
    """Write files one after the other, each removed when it is written: the text is never on the disk twice."""
    often = 0.2 if sys.stderr.isatty() else 10
    with output.open("wb") as file:
        for path in tqdm(paths, desc=f"  {output.stem}", unit=" files", mininterval=often, leave=False):
            with path.open("rb") as part:
                while block := part.read(1 << 20):
                    # A carriage return ends a line for fairseq, and for nobody else.
                    file.write(block.replace(b"\r", b" "))
            path.unlink()
    if not output.stat().st_size:
        raise CorpusError(f"{paths[0].name} is empty")


def from_archive(archive: Path, folder: Path, *outputs: Path) -> None:
    """Write the text of the three parts; `folder` holds the unpacked files meanwhile."""
    names = [TRAIN, [VALID], [TEST]]
    patterns = ["*/training-monolingual.tokenized.shuffled/news.en-*-of-00100", f"*/{VALID}", f"*/{TEST}"]
    remove(folder)
    try:
        say(f"  unpacking {archive.name}")
        files = unpack(archive, folder, patterns, UNPACKED_LIMIT)
        parts = [shards(files, part, archive) for part in names]
        for paths, output in zip(parts, outputs, strict=True):
            join(paths, output)
    finally:
        remove(folder)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archive", type=Path, required=True, metavar="FILE", help="the benchmark's tar.gz")
    parser.add_argument(
        "--threshold", type=int, default=3, metavar="N", help="words seen less than N times become <unk> (default: 3)"
    )
    add_common(parser)
    args = parser.parse_args(argv)
    check_common(parser, args)
    return args


def main() -> int:
    args = parse()

    def action() -> None:
        out = args.out.resolve()
        prepare(
            lambda *outputs: from_archive(args.archive, out / "unpacked.tmp", *outputs),
            [args.archive],
            out,
            threshold=args.threshold,
            workers=args.workers,
            expected={} if args.any_size else EXPECTED,
        )

    return exit_status("prepare_gbw.py", action)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
