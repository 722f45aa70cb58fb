"""From running text, already tokenised, to fairseq's binary data for language models.

    raw/       train.txt, valid.txt, test.txt, unpacked, carriage returns as spaces: one sentence or paragraph per line
    data-bin/  what fairseq-train --task language_modeling reads; every line ends with </s>, even an empty one

The vocabulary is that of the training text; <unk> in the text is fairseq's own unknown word.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lightconv_plugin.downloads.archives import kind, unpack
from lightconv_plugin.errors import CorpusError
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.data.binarise import binarise, check_words
from lightconv_plugin.recipes.data.options import SPLITS, Options, Request
from lightconv_plugin.recipes.data.stages import Plan, Stage, scratch
from lightconv_plugin.recipes.data.text_pool import count_lines, iter_lines

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

    def fits(self, other: Size) -> bool:
        """Whether the size `other` matches this expected size."""
        return self.lines == other.lines and self.tokens in (None, other.tokens)


_WIKITEXT = {"valid": Size(3_760, 217_646), "test": Size(4_358, 245_569)}  # the same in both
# Published sizes, with one </s> for each line.
WIKITEXT2 = {"train": Size(36_718, 2_088_628), **_WIKITEXT}
WIKITEXT103 = {"train": Size(1_801_350, 103_227_021), **_WIKITEXT}


def find_part(paths: Sequence[Path], part: str, place: Path) -> Path:
    """The file of a part: train.txt, wiki.train.tokens, …; plain text is preferred to .gz."""
    pattern = re.compile(rf"(.*[._-])?{part}(\.[a-z]+)?(\.gz)?")
    files = sorted(path for path in paths if pattern.fullmatch(path.name))
    files = [path for path in files if path.suffix != ".gz" or path.with_suffix("") not in files]
    if len(files) != 1:
        one = f"one file {part}.txt (or wiki.{part}.tokens, …), plain or .gz"
        raise CorpusError(f"{place}: expected {one}, found {', '.join(path.name for path in files) or 'none'}")
    return files[0]


def copy_lines(source: Path, output: io.BufferedIOBase) -> None:
    """Copy a text's lines as `iter_lines` reads them, but with spaces for the carriage returns that it leaves: only
    fairseq sees ends of lines in them."""
    for line in iter_lines(source):
        output.write(line.replace("\r", " ").encode() + b"\n")


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
        counted = size(text)
        say(f"  {part}: {counted}")
        if part in expected and not expected[part].fits(counted):
            message = f"{source}: {part} has {counted}, expected {expected[part]}; `any_size` accepts other text"
            raise CorpusError(message)


def dictionary_size(data: Path) -> int:
    """The number of dictionary entries, including fairseq's four special ones and its padding to a multiple of 8."""
    return 4 + count_lines(data / "dict.txt")


def plan(
    request: Request,
    make_raw: Callable[..., None],
    inputs: Sequence[Path],
    expected: Mapping[str, Size],
    entries: int | None = None,
) -> Plan:
    """The stages from running text to binary data.

    Args:
        make_raw: writes the text of each of SPLITS to the given paths
        inputs: the files that `make_raw` reads
        expected: published sizes of the parts. entries: published number of dictionary entries, with all words. The
            options replace both, or allow any.
    """
    out, options = request.out, request.options
    sizes = {} if options.any_size else {**expected, **{part: Size(*size) for part, *size in options.expect}}
    published = entries if options.threshold == Options.threshold else None
    size_of_dictionary = None if options.any_size else options.expect_entries or published
    texts = [out / "raw" / f"{part}.txt" for part in SPLITS]

    def raw(*outputs: Path) -> None:
        make_raw(*outputs)
        check_sizes(dict(zip(SPLITS, outputs, strict=True)), sizes, inputs[0])

    def data_bin(output: Path) -> None:
        words = ["--only-source", "--thresholdsrc", str(options.threshold)]
        check_words(texts)
        binarise(out, SPLITS, "raw/{}.txt", words, options.workers, output)
        count = dictionary_size(output)
        if size_of_dictionary not in (None, count):
            raise CorpusError(
                f"{inputs[0]}: the dictionary has {count:,} entries, expected {size_of_dictionary:,}; `expect_entries` "
                "or `any_size` accepts another number"
            )

    params = {"threshold": options.threshold, "entries": size_of_dictionary}
    stages = [
        # The step depends on the sizes, so that text accepted with `any_size` is checked again without it.
        Stage("raw", "raw text", raw, inputs, texts, {"expected": sizes}),
        Stage("data-bin", "binarise", data_bin, texts, [out / "data-bin"], params),
    ]
    return Plan(out, stages)


def plan_files(request: Request, name: str, expected: Mapping[str, Size], entries: int | None = None) -> Plan:
    """The stages for the folder or archive `name` in `request.data`; the sizes are as for `plan`."""
    source = request.data / name
    if source.is_file() and kind(source.name)[0]:
        return plan(request, partial(copy_from_archive, source, request.out), [source], expected, entries)
    if not source.is_dir():
        raise CorpusError(f"{source} is neither a folder nor a tar or zip")
    files = [find_part([path for path in source.iterdir() if path.is_file()], part, source) for part in SPLITS]
    return plan(request, partial(copy_texts, files), files, expected, entries)


def copy_texts(texts: Sequence[Path], *outputs: Path) -> None:
    """Copy texts, decompressed if they are .gz. CorpusError if one is empty, truncated or not UTF-8."""
    for text, output in zip(texts, outputs, strict=True):
        with output.open("wb") as out:
            copy_lines(text, out)
        if not output.stat().st_size:
            raise CorpusError(f"{text} is empty")


def copy_from_archive(archive: Path, out: Path, *outputs: Path) -> None:
    """Copy each part's text out of an archive that has one file of it; temporary files go below `out`."""
    with scratch(out / "unpacked.tmp") as folder:
        files = unpack(archive, folder, [f"*{part}*" for part in SPLITS], UNPACKED_LIMIT)
        copy_texts([find_part(files, part, archive) for part in SPLITS], *outputs)
