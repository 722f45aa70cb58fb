"""Translates a training text in blocks: a block is written when it is done, and survives whatever ends the process."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lightconv_plugin.files import atomic_write
from lightconv_plugin.processes import map_unordered
from lightconv_plugin.progress import progress, say
from lightconv_plugin.recipes.distillation.source import Block, Source
from lightconv_plugin.recipes.distillation.teacher import Teacher, Translated, open_work, work_with

if TYPE_CHECKING:
    from lightconv_plugin.generation.translator import Translator

PAIRS = 2000  # of a block: enough for batches of similar lengths


def translate_blocks(teacher: Teacher, translator: Translator, source: Source, folder: Path, workers: int) -> None:
    """Translate the blocks that `folder` does not have. With several workers, the translator is closed.

    The text depends neither on the number of workers nor on how often they were interrupted: a block is translated by
    itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total = source.lines()
    sizes = {number: min(PAIRS, total - number * PAIRS) for number in range(-(-total // PAIRS))}
    missing = [number for number in sizes if not _place(folder, number).is_file()]
    done = total - sum(sizes[number] for number in missing)
    if done:
        say(f"  {done:,} of {total:,} pairs were translated before")
    wanted = set(missing)
    blocks = (block for block in source.blocks(PAIRS) if block.number in wanted)
    translations = _translations(teacher, translator, source, blocks, min(workers, len(missing)))
    bar = progress(total=total, initial=done, desc="  translate", unit=" pairs")
    with bar, contextlib.closing(translations):
        for number, lines in translations:
            with atomic_write(_place(folder, number)) as file:
                file.writelines(f"{line}\n" for line in lines)
            bar.update(len(lines))


def _translations(
    teacher: Teacher, translator: Translator, source: Source, blocks: Iterable[Block], workers: int
) -> Generator[Translated]:
    if workers > 1:
        translator.close()
        yield from map_unordered(open_work, [(share, source) for share in teacher.divided(workers)], blocks)
    else:
        yield from map(work_with(translator, teacher.nbest, source), blocks)


def join_blocks(folder: Path, output: Path) -> None:
    """Write the whole text."""
    with atomic_write(output, binary=True) as file:
        for path in sorted(folder.glob("[0-9]*")):
            file.write(path.read_bytes())


def _place(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}"
