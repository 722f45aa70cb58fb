"""From CNN/Daily Mail's stories to fairseq's binary data for summarisation; not anonymised.

    raw/       train, valid, test .article and .summary: one story per line, paragraphs or highlights separated by tabs
    tok/       Moses-tokenised, then lower-cased; the paragraphs joined

The processing is that of See, Liu & Manning (2017) except for the tokeniser: everything after a story's first
@highlight is its summary, a paragraph or highlight without final punctuation gets a full stop, and stories without text
are left out. Lists of addresses determine a story's part and its position there; a story's file is named after the
SHA-1 of its address.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path, PurePosixPath

from lightconv_plugin.downloads.archives import read_members
from lightconv_plugin.errors import CorpusError
from lightconv_plugin.progress import progress, say
from lightconv_plugin.recipes.data.options import Request
from lightconv_plugin.recipes.data.stages import Plan, Sides, Stage
from lightconv_plugin.recipes.data.text_pool import iter_lines
from lightconv_plugin.text.recipe import Recipe

ARCHIVES = ("cnn_stories.tgz", "dailymail_stories.tgz")
SIDES = ("article", "summary")
LISTS = {"train": "all_train.txt", "valid": "all_val.txt", "test": "all_test.txt"}
# Stories with text: 114 of the training part have none (the README of See et al.; TensorFlow Datasets' table).
EXPECTED = {"train": 287_113, "valid": 13_368, "test": 11_490}
SENTENCE_ENDS = tuple(".!?'`\")\u2019\u201d")
# Without Moses' escapes: ROUGE would count the "quot" of &quot; as a word. Lower-cased afterwards: Moses recognises the
# end of a sentence by the capital letter that follows.
RECIPE = Recipe("sacremoses", "en", lowercase="last")
LONGEST_STORY = 16 << 20  # bytes; the longest has a few hundred thousand


def read_addresses(path: Path) -> list[str]:
    """The file names, without suffix, of the stories in a list of addresses, in the same order."""
    names = []
    for number, line in enumerate(iter_lines(path), 1):
        address = line.strip()
        if not address.startswith(("http://", "https://")):
            raise CorpusError(f"{path}, line {number}: expected an address (http://…), got {address[:80]!r}")
        names.append(hashlib.sha1(address.encode()).hexdigest())
    if not names:
        raise CorpusError(f"{path} is empty")
    return names


def places(lists: Mapping[str, Path]) -> tuple[dict[str, int], dict[str, range]]:
    """(file name → number of the story, part → its numbers). CorpusError if an address occurs twice."""
    numbers: dict[str, int] = {}
    parts = {}
    for part, path in lists.items():
        start = len(numbers)
        for line, name in enumerate(read_addresses(path), 1):
            if numbers.setdefault(name, start + line - 1) != start + line - 1:
                raise CorpusError(f"{path}, line {line}: this address is in the lists twice")
        parts[part] = range(start, len(numbers))
    return numbers, parts


def parse_story(text: str) -> tuple[list[str], list[str]]:
    """(paragraphs of the article, highlights) of a story, with missing full stops added."""
    article: list[str] = []
    highlights: list[str] = []
    into = article
    for line in text.split("\n"):
        line = " ".join(line.split())
        if line.lower().startswith("@highlight"):
            into = highlights
        elif line:
            into.append(line if line.endswith(SENTENCE_ENDS) else f"{line} .")
    return article, highlights


def spool_stories(archives: list[Path], numbers: Mapping[str, int], spool: Path) -> array[int]:
    """Write the stories with these names to `spool`, two lines each, in the archives' order; returns their offsets."""
    offsets = array("q", [-1]) * len(numbers)
    with spool.open("wb") as file, progress(total=len(numbers), desc="  stories", unit=" stories") as bar:
        for archive in archives:
            for member, open_member in read_members(archive):
                number = numbers.get(PurePosixPath(member).stem) if member.endswith(".story") else None
                if number is None:
                    continue
                if offsets[number] != -1:
                    raise CorpusError(f"{archive}: the story {member} occurs twice")
                with open_member() as story:
                    content = story.read(LONGEST_STORY + 1)
                if len(content) > LONGEST_STORY:
                    raise CorpusError(f"{archive}: {member} has more than {LONGEST_STORY:,} bytes: not a story")
                try:
                    sides = parse_story(content.decode())
                except UnicodeDecodeError as error:
                    raise CorpusError(f"{archive}: {member} is not UTF-8: {error.reason}") from None
                offsets[number] = file.tell()
                file.writelines(("\t".join(side) + "\n").encode() for side in sides)
                bar.update()
    missing = [name for name, number in numbers.items() if offsets[number] == -1]
    if missing:
        where = " or ".join(str(archive) for archive in archives)
        raise CorpusError(f"{len(missing):,} stories of the lists are not in {where}, the first: {missing[0]}.story")
    return offsets


def write_parts(
    archives: list[Path],
    lists: Mapping[str, Path],
    expected: Mapping[str, int],
    outputs: Mapping[tuple[str, str], Path],
) -> None:
    """Write each part's articles and summaries, in the order of its list."""
    numbers, parts = places(lists)
    spool = outputs["train", "article"].with_name("stories.tmp")
    try:
        offsets = spool_stories(archives, numbers, spool)
        with spool.open("rb") as stories:
            for part, members in parts.items():
                with contextlib.ExitStack() as stack:
                    files = [stack.enter_context(outputs[part, side].open("wb")) for side in SIDES]
                    kept = 0
                    for number in members:
                        stories.seek(offsets[number])
                        sides = stories.readline(), stories.readline()
                        if b"\n" in sides:
                            continue  # no text, or no highlights
                        kept += 1
                        for file, line in zip(files, sides, strict=True):
                            file.write(line)
                say(f"  {part}: {kept:,} stories, {len(members) - kept:,} without text left out")
                if kept != expected.get(part, kept):
                    raise CorpusError(
                        f"{lists[part]}: {part} has {kept:,} stories with text, expected {expected[part]:,}; "
                        "`any_size` accepts others"
                    )
                if not kept:
                    raise CorpusError(f"{lists[part]}: no story of {part} has text")
    finally:
        spool.unlink(missing_ok=True)


def plan(request: Request) -> Plan:
    """The stages from the stories to binary data."""
    out, merges = request.out, request.options.bpe
    archives = [request.data / name for name in ARCHIVES]
    lists = {part: request.data / name for part, name in LISTS.items()}
    expected = {} if request.options.any_size else EXPECTED
    sides = Sides(out, SIDES, request.options.workers)
    raw, tok = sides.files("raw"), sides.files("tok")

    def stories(*outputs: Path) -> None:
        names = [(part, side) for part in LISTS for side in SIDES]
        write_parts(archives, lists, expected, dict(zip(names, outputs, strict=True)))

    def tokenise(*outputs: Path) -> None:
        sides.map(lambda side: (Recipe.tokenise, (RECIPE,)), raw, outputs)

    stages = [
        # The step depends on the sizes, so that stories accepted with `any_size` are checked again without it.
        Stage("raw", "stories", stories, [*archives, *lists.values()], raw, {"expected": expected}),
        Stage("tok", "tokenise", tokenise, raw, tok, {"sacremoses": version("sacremoses")}),
        *sides.learned(merges),
        sides.encoded(sides.encode, {}),
        sides.binarised(True, {}),
    ]
    return Plan(out, stages, lambda: sides.about(LISTS, True, merges, dict.fromkeys(SIDES, RECIPE)))
