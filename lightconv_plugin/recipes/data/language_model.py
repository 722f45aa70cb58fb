"""From running text, already tokenised, to fairseq's binary data for language models, in resumable steps.

    raw/       train.txt, valid.txt, test.txt, unpacked and otherwise unchanged: one sentence or paragraph per line
    data-bin/  what fairseq-train --task language_modeling reads; every line ends with </s>, even an empty one

The vocabulary is that of the training text; <unk> in the text is fairseq's own unknown word.
"""

from __future__ import annotations

import argparse
import gzip
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightconv_plugin.arguments import natural, positive
from lightconv_plugin.recipes.data.archives import kind, unpack
from lightconv_plugin.recipes.data.binarise import binarise_text
from lightconv_plugin.recipes.data.parallel_folder import CorpusError
from lightconv_plugin.recipes.data.request import Request
from lightconv_plugin.recipes.steps import Steps, remove, say

PARTS = ("train", "valid", "test")
# Upper bound for text unpacked from an archive: a larger one is not the corpus.
UNPACKED_LIMIT = 8 << 30


class Size(NamedTuple):
    """The size of a text: lines, and tokens as language models count them, including the </s> of every line.

    In an expected size, tokens may be None for any number.
    """

    lines: int
    tokens: int | None

    def __str__(self) -> str:
        return f"{self.lines:,} lines" + ("" if self.tokens is None else f", {self.tokens:,} tokens")

    def fits(self, found: Size) -> bool:
        """Whether the size `found` matches this expected size."""
        return self.lines == found.lines and self.tokens in (None, found.tokens)


def find_part(paths: Sequence[Path], part: str, place: Path) -> Path:
    """The file of a part: train.txt, wiki.train.tokens, …; plain text is preferred to .gz.

    Raises:
        CorpusError: `place` has none or several.
    """
    pattern = re.compile(rf"(.*[._-])?{part}(\.[a-z]+)?(\.gz)?")
    found = sorted(path for path in paths if pattern.fullmatch(path.name))
    found = [path for path in found if path.suffix != ".gz" or path.with_suffix("") not in found]
    if len(found) != 1:
        wanted = f"one file {part}.txt (or wiki.{part}.tokens, …), plain or .gz"
        raise CorpusError(f"{place}: expected {wanted}, found {', '.join(p.name for p in found) or 'none'}")
    return found[0]


def is_archive(place: Path) -> bool:
    """Whether a file is a tar or zip, judged by its name."""
    return place.is_file() and kind(place.name)[0] != ""


def copy_text(source: Path, output: Path) -> None:
    """Copy a text, decompressed if it is .gz. CorpusError if it is empty or truncated."""
    opener = gzip.open if source.suffix == ".gz" else open
    try:
        with opener(source, "rb") as file, output.open("wb") as out:
            shutil.copyfileobj(file, out, 1 << 20)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorpusError(f"{source} cannot be decompressed: {error}") from error
    if not output.stat().st_size:
        raise CorpusError(f"{source} is empty")


def size(text: Path) -> Size:
    """The size as counted by `wc` and by the publishers of the corpora: words end at ASCII white space."""
    lines = words = 0
    with text.open("rb") as file:
        for line in file:
            lines += 1
            words += len(line.split())
    return Size(lines, words + lines)


def check_sizes(texts: Mapping[str, Path], expected: Mapping[str, Size], source: Path) -> None:
    """Print the sizes of the parts. CorpusError if one differs from its expected size."""
    for part, text in texts.items():
        found = size(text)
        say(f"  {part}: {found}")
        if part in expected and not expected[part].fits(found):
            raise CorpusError(f"{source}: {part} has {found}, expected {expected[part]}; --any-size accepts other text")


def entries(data: Path) -> int:
    """The number of dictionary entries, including fairseq's four special ones and its padding to a multiple of 8."""
    with (data / "dict.txt").open("rb") as file:
        return 4 + sum(1 for _ in file)


def prepare(
    make_raw: Callable[..., None],
    inputs: Sequence[Path],
    out: Path,
    *,
    threshold: int,
    workers: int,
    expected: Mapping[str, Size],
    expected_entries: int | None = None,
) -> None:
    """Run all steps and write to `out`.

    Args:
        make_raw: writes the text of each of PARTS to the given paths.
        inputs: the files that `make_raw` reads.
        threshold: words seen less often become <unk>.
        expected: required sizes of the parts. expected_entries: required number of dictionary entries.
    """
    texts = [out / "raw" / f"{part}.txt" for part in PARTS]

    def raw(*outputs: Path) -> None:
        make_raw(*outputs)
        check_sizes(dict(zip(PARTS, outputs, strict=True)), expected, inputs[0])

    def data_bin(output: Path) -> None:
        binarise_text(out, PARTS, "raw/{}.txt", threshold, workers, output)
        found = entries(output)
        if expected_entries not in (None, found):
            raise CorpusError(f"{inputs[0]}: the dictionary has {found:,} entries, expected {expected_entries:,}")

    with Steps(out) as steps:
        # The step depends on the sizes, so that text accepted with --any-size is checked again without it.
        steps.run("raw", "raw text", raw, inputs=inputs, outputs=texts, params={"expected": dict(expected)})
        params = {"threshold": threshold, "entries": expected_entries}
        steps.run("data-bin", "binarise", data_bin, inputs=texts, outputs=[out / "data-bin"], params=params)


def from_place(place: Path, out: Path) -> tuple[Callable[..., None], list[Path]]:
    """(function that writes the parts' text, files that it reads) for a folder or an archive; otherwise CorpusError."""
    if is_archive(place):
        folder = out / "unpacked.tmp"

        def unpacked(*outputs: Path) -> None:
            remove(folder)
            try:
                files = unpack(place, folder, [f"*{part}*" for part in PARTS], UNPACKED_LIMIT)
                for part, output in zip(PARTS, outputs, strict=True):
                    copy_text(find_part(files, part, place), output)
            finally:
                remove(folder)

        return unpacked, [place]
    if not place.is_dir():
        raise CorpusError(f"{place} is neither a folder nor a tar or zip" if place.exists() else f"no folder {place}")
    files = [find_part([path for path in place.iterdir() if path.is_file()], part, place) for part in PARTS]

    def copied(*outputs: Path) -> None:
        for path, output in zip(files, outputs, strict=True):
            copy_text(path, output)

    return copied, files


def expected_size(text: str) -> tuple[str, Size]:
    """("train", Size(36718, 2088628)) of "train:36718:2088628"."""
    match = re.fullmatch(rf"({'|'.join(PARTS)}):(\d+):(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected PART:LINES:TOKENS with one of {', '.join(PARTS)}, got {text!r}")
    return match[1], Size(int(match[2]), int(match[3]))


def add_options(parser: argparse.ArgumentParser, threshold: int) -> None:
    """The options of the steps; `threshold` is the default of --threshold."""
    parser.add_argument(
        "--threshold",
        type=natural,
        default=threshold,
        metavar="N",
        help="words seen less often than N times in the training text become <unk> (default: %(default)s)",
    )


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The options for text of a different known size."""
    parser.add_argument(
        "--expect",
        type=expected_size,
        action="append",
        default=[],
        metavar="PART:LINES:TOKENS",
        help="the known size of a part, with one </s> per line (default: the published one)",
    )
    parser.add_argument(
        "--expect-entries", type=positive, metavar="N", help="the known size of the dictionary (default: the published)"
    )


def run(request: Request, name: str, expected: Mapping[str, Size], expected_entries: int) -> None:
    """Run all steps for the folder or archive `name` in `request.data`.

    Args:
        expected, expected_entries: the published sizes; --expect and --expect-entries replace them
    """
    options = request.options
    prepare(
        *from_place(request.data / name, request.out),
        request.out,
        threshold=options.threshold,
        workers=request.workers,
        expected={} if request.any_size else {**expected, **dict(options.expect)},
        expected_entries=None if request.any_size else options.expect_entries or expected_entries,
    )
