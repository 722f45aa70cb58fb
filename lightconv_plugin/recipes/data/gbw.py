"""From the One Billion Word benchmark's archive to fairseq's binary data.

raw/       train.txt: the 99 files of training text concatenated; valid.txt, test.txt: one held-out file each
data-bin/  what fairseq-train --task language_modeling reads; every line, a sentence, ends with </s>
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from lightconv_plugin.downloads.archives import unpack
from lightconv_plugin.errors import CorpusError
from lightconv_plugin.progress import progress, say
from lightconv_plugin.recipes.data import language_model
from lightconv_plugin.recipes.data.language_model import UNPACKED_LIMIT, Size, copy_lines
from lightconv_plugin.recipes.data.options import Request
from lightconv_plugin.recipes.data.stages import Plan, scratch

ARCHIVE = "1-billion-word-language-modeling-benchmark-r13output.tar.gz"

TRAIN = [f"training-monolingual.tokenized.shuffled/news.en-{i:05}-of-00100" for i in range(1, 100)]
HELD_OUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout-{:05}-of-00050"
VALID, TEST = HELD_OUT.format(1), HELD_OUT.format(0)

# The training text's lines are TensorFlow Datasets' (lm1b). The test text's tokens are Tensor2Tensor's (its class
# LanguagemodelLm1b32k); minus its 153,583 words (faster-rnnlm's results), that is one </s> in each of 6,075 lines.
EXPECTED = {"train": Size(30_301_028, None), "test": Size(6_075, 159_658)}


def shards(files: list[Path], names: list[str], archive: Path) -> list[Path]:
    """The files with these names, in the same order. CorpusError if one is missing or exists twice."""
    paths: dict[str, Path] = {}
    for path in files:
        name = "/".join(path.parts[-2:])
        if name in paths:
            raise CorpusError(f"{archive} has {name} twice")
        paths[name] = path
    missing = [name for name in names if name not in paths]
    if missing:
        raise CorpusError(f"{archive} lacks {len(missing)} of the {len(names)} files of text, the first: {missing[0]}")
    return [paths[name] for name in names]


def join(paths: list[Path], output: Path) -> None:
    """Concatenate files, removing each one as soon as it is copied: the text is never on disk twice."""
    with output.open("wb") as file:
        for path in progress(paths, desc=f"  {output.stem}", unit=" files"):
            copy_lines(path, file)
            path.unlink()
    if not output.stat().st_size:
        raise CorpusError(f"{paths[0].name} is empty")


def from_archive(archive: Path, out: Path, *outputs: Path) -> None:
    """Write the text of the three parts; temporary files go below `out`."""
    patterns = ["*/training-monolingual.tokenized.shuffled/news.en-*-of-00100", f"*/{VALID}", f"*/{TEST}"]
    with scratch(out / "unpacked.tmp") as folder:
        say(f"  unpacking {archive.name}")
        files = unpack(archive, folder, patterns, UNPACKED_LIMIT)
        parts = [shards(files, names, archive) for names in (TRAIN, [VALID], [TEST])]
        for paths, output in zip(parts, outputs, strict=True):
            join(paths, output)


def plan(request: Request) -> Plan:
    """The stages from the archive to binary data."""
    archive = request.data / ARCHIVE
    return language_model.plan(request, partial(from_archive, archive, request.out), [archive], EXPECTED)
