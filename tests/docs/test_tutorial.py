"""docs/tutorial.md, in order: each file that a command reads was written before; and the commands of the pip way run.

They run from an installed wheel, in an empty folder, on a miniature corpus. Where that takes too long, as printed with
further options: `MINIATURE`.
"""

import itertools
import os
import re
from fnmatch import fnmatch
from pathlib import PurePosixPath

import pytest

from lightconv_plugin.recipes.data.tasks import TASKS
from tests import ROOT
from tests.docs.pages import blocks, commands_of
from tests.packaging.installing import copy_of_the_source, install, start
from tests.recipes.conftest import write_parts
from tests.warm_python import warm_python

TUTORIAL = ROOT / "docs" / "tutorial.md"
WAYS = ("checkout", "pip")


def steps(way, page=TUTORIAL):
    """(place, command or None, Python code or "") in the page's order, without the blocks of the other way."""
    found = [*blocks(page, "sh"), *blocks(page, "python")]
    for block in sorted(found, key=lambda block: block.line):
        if block.tab in ("", way):
            if block.language == "python":
                yield str(block), None, block.text
            else:
                yield from ((command.place, command, "") for command in commands_of(block))


def outputs(words):
    """What a command writes, as patterns."""
    program, *rest = words
    if program in ("scripts/prepare.sh", "scripts/train.sh"):
        program, rest = "lightconv", [PurePosixPath(program).stem, *rest]
    following = dict(itertools.pairwise(rest))
    if program == "scripts/average.sh":
        return {f"{rest[0]}/average{rest[1]}.pt"}
    if program != "lightconv":
        return set()
    if rest[0] == "prepare":
        assert rest[1] in TASKS
        return {f"data/{rest[1]}", f"data/{rest[1]}/data-bin"}
    if rest[0] == "train":
        name = rest[1].removeprefix("configs/").removesuffix(".yaml")
        folder = next((word.partition("=")[2] for word in rest if word.startswith("checkpoint.save_dir=")), None)
        folder = folder or f"runs/{name}"
        return {folder, f"{folder}/checkpoint*.pt"}
    return {following[option] for option in ("--output", "-o") if option in following}


def inputs(words, given):
    """The files of data/ and runs/, and the checkpoints, that a command reads."""
    writes = outputs(words)
    read = {word for word in [*words, given] if re.match(r"(runs|data)/", word) or word.endswith(".pt")}
    return read - writes


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_a_command_reads_was_written_before(way):
    written, missing = set(), []
    for place, command, text in steps(way):
        reads = set(re.findall(r'"((?:runs|data)/[^"]+)"', text)) if command is None else None
        if command is not None:
            reads = inputs(command.words, command.given)
        for path in reads:
            there = any(fnmatch(path, pattern) or fnmatch(pattern, path) for pattern in written)
            if not there:
                missing.append(f"{place}: {path}")
        if command is not None:
            written |= outputs(command.words)
    assert not missing, f"read, and written by no command before: {missing}"
    assert {PurePosixPath(path).name for path in written} >= {"data-bin", "average5.pt", "dynamicconv", "report.html"}


# ------------------------------------------------------------------------------------------------ the commands run

SMALL = (
    "model.encoder_layers=1", "model.decoder_layers=1", "model.encoder_kernel_size_list=[3]",
    "model.decoder_kernel_size_list=[3]", "optimization.max_update=14", "checkpoint.save_interval_updates=1",
    "lr_scheduler.warmup_updates=2", "lr_scheduler.total_num_update=14", "dataset.max_tokens=1000",
)  # fmt: skip
MINIATURE = {
    "prepare": ("--data", "{raw}", "--any-size", "--bpe", "200", "--workers", "1"),
    "train": SMALL,
}
# They take as long as the rest together, and are run by tests of their own.
ELSEWHERE = {"demo": "tests/recipes/demo", "reproduce": "tests/recipes/reproduce"}


def shortened(words, raw, folder):
    """The words of a `lightconv` command with those of MINIATURE; what the page sets stays. Patterns are expanded."""
    keys = {word.partition("=")[0] for word in words}
    more = [word.format(raw=raw) for word in MINIATURE.get(words[0], ())]
    more = [word for word in more if "=" not in word or word.partition("=")[0] not in keys]
    return [str(name) for word in words for name in (sorted(folder.glob(word)) if "*" in word else [word])] + more


@pytest.mark.long
def test_the_pip_way_from_a_wheel(tmp_path):
    pytest.importorskip("fairseq")
    site, empty, source = tmp_path / "site", tmp_path / "empty", tmp_path / "source"
    source.mkdir()
    empty.mkdir()
    done = install(copy_of_the_source(source), site, LIGHTCONV_PREBUILD="")
    assert done.returncode == 0, done.stderr
    raw = write_parts(tmp_path / "raw", ("train", "val", "test_2016_flickr"), (300, 20, 20))
    (empty / "in.txt").write_text("A small dog runs through the grass.\n", encoding="utf-8")
    ran = []
    for place, command, text in steps("pip"):
        if command is None:
            arguments, given = ["-c", text], ""
        elif command.words[0] == "lightconv" and command.words[1] not in ELSEWHERE:
            arguments, given = ["-m", "lightconv_plugin", *shortened(command.words[1:], raw, empty)], command.given
        else:
            assert command.words[0] in ("pip", "scripts/reproduce.sh", "lightconv"), f"{place} was not run"
            continue
        with open(empty / (given or os.devnull)) as taken:
            done = start(*arguments, path=site, cwd=empty, python=warm_python(), stdin=taken)
        assert done.returncode == 0, f"{place}: {arguments}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        ran.append(arguments[2] if command else "python")
    assert {"prepare", "train", "tune", "average", "evaluate", "translate", "python", "report", "doctor"} <= set(ran)
    assert (empty / "report.html").is_file() and not list(site.glob("data"))
