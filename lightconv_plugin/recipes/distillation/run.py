"""Fills a folder like that of a preparation, whose training text is a teacher's translation.

teacher/     the translations of the training text, in pieces, one for each line of the text that was prepared
bpe/         train: the pairs that are kept; the other parts and the merges as they were
raw/, tok/   the other parts as they were
data-bin/    with the dictionaries of the text that was prepared
corpus.json  as it was, with `distilled`: teacher, search, and numbers of pairs; `earlier` therein is that of the text
             that was translated, if it was distilled itself
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightconv_plugin.cgroups import cores
from lightconv_plugin.errors import CorpusError, InputError
from lightconv_plugin.files import write_text
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.data.binarise import check_words
from lightconv_plugin.recipes.data.options import DISTILLED, as_typed
from lightconv_plugin.recipes.data.pairs import PairWriter, iter_pairs
from lightconv_plugin.recipes.data.stages import Sides, Stage, copy_files, run_stages
from lightconv_plugin.recipes.distillation import translating
from lightconv_plugin.recipes.distillation.choosing import PROBLEMS, Limits
from lightconv_plugin.recipes.distillation.source import Source, open_source
from lightconv_plugin.recipes.distillation.teacher import Teacher, search_of
from lightconv_plugin.recipes.steps import Steps, digest, remove, shorten

if TYPE_CHECKING:
    from lightconv_plugin.generation.translator import Translator

_TRANSLATION = DISTILLED.stem  # the step that takes the time


@dataclass(frozen=True)
class Job:
    """A distillation.

    data: a prepared folder. out: the folder to fill; None for the name of `data` with _distilled.
    workers: processes that translate. force: replace what another teacher or other options left in `out`.
    """

    teacher: Teacher
    data: Path
    out: Path | None
    limits: Limits
    workers: int = 1
    force: bool = False


@dataclass(frozen=True)
class Distilled:
    """The folder that was filled, and how many of the training pairs it has."""

    out: Path
    kept: int
    pairs: int


def distill(job: Job) -> Distilled:
    """Translate the training text and make a prepared folder of it.

    After an interruption, the same call resumes, and makes the same text.

    Raises:
        InputError: a wrong argument or text, before anything is written; `out` has a text by another teacher or with
            other options, and `force` is not set; a process was killed.
    """
    source = open_source(job.data.resolve())
    named = Path(os.path.abspath(job.data))  # beside a link, not beside what it leads to
    out = (job.out or named.with_name(f"{named.name}_distilled")).resolve()
    _check_out(out, source.folder)
    # They would end the binarisation, hours later.
    check_words([source.train[0], *(path for path in source.other_texts() if path.parent.name == "bpe")])
    distillation = _Distillation(job, source, out)
    with job.teacher.open(source) as translator, Steps(out) as steps:
        say("\n".join([f"{translator.dtype}: {translator.dtype_reason}", *map(as_typed, translator.notes)]))
        settings = distillation.settings(translator, steps)
        distillation.translate(translator, steps, settings)
        translator.close()
        run_stages(steps, distillation.stages())
        counts = json.loads(distillation.counts.read_text(encoding="utf-8"))
        about = {"teachers": [str(path) for path in job.teacher.paths], **search_of(translator)}
        if translator.shortlist is not None:
            about["shortlist"] = str(translator.shortlist.absolute())
        about |= {"dtype": translator.dtype, "nbest": job.teacher.nbest, **asdict(job.limits), **counts}
        if "distilled" in source.about:
            about["earlier"] = source.about["distilled"]
        write_text(out / "corpus.json", json.dumps({**source.about, "distilled": about}, indent=1) + "\n")
    return Distilled(out, counts["kept"], counts["pairs"])


def _check_out(out: Path, data: Path) -> None:
    """Raise InputError unless a distillation may fill the folder: it is new, empty, or of an earlier distillation."""
    if out == data:
        raise InputError(f"`out` {out} is `data`: name another folder")
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"`out` {out} exists and is not a folder")
    if {path.name for path in out.iterdir()} - {DISTILLED.parts[0]} and not (out / DISTILLED).exists():
        raise InputError(f"`out` {out} is not empty, and lightconv distill did not make it: name another folder")


class _Distillation:
    """The steps of a distillation."""

    def __init__(self, job: Job, source: Source, out: Path) -> None:
        self.job, self.source, self.out = job, source, out
        self.text = out / "teacher" / f"train.{source.langs[1]}"
        self.counts = out / "teacher" / "counts.json"
        self.blocks = out / "teacher" / "blocks"

    def settings(self, translator: Translator, steps: Steps) -> dict[str, Any]:
        """All that the translations depend on."""
        teacher, (source, target) = self.job.teacher, self.source.train
        digests = steps.digests(teacher.files(), self.out).values()
        known = {"teacher": hashlib.sha256("".join(digests).encode()).hexdigest(), **teacher.settings(translator)}
        known |= {"block": translating.PAIRS, "source": digest(source)}
        return known | ({"reference": digest(target)} if teacher.nbest > 1 else {})

    def translate(self, translator: Translator, steps: Steps, settings: dict[str, Any]) -> None:
        """Translate what is not translated yet. Raises InputError for other settings than before, without `force`."""
        if steps.is_known(_TRANSLATION) and (changed := steps.changed(_TRANSLATION, settings)):
            if not self.job.force:
                raise InputError(
                    f"`out` {self.out} was made with another teacher or other options ({shorten(changed)}): give "
                    "`force` to replace it, or name another folder"
                )
            say(f"translate again, changed: {shorten(changed)} ...")
            remove(self.blocks)
        elif (known := steps.result(_TRANSLATION)) and self.text.is_file() and digest(self.text) == known:
            say("translate: done before")
            remove(self.blocks)  # of a process that was killed at the end
            return
        else:
            say("translate ...")
        steps.record(_TRANSLATION, settings, None)
        translating.translate_blocks(self.job.teacher, translator, self.source, self.blocks, self.job.workers)
        translating.join_blocks(self.blocks, self.text)
        steps.record(_TRANSLATION, settings, digest(self.text))
        remove(self.blocks)

    def stages(self) -> list[Stage]:
        """From the translations to binary data."""
        source = self.source
        same = [*source.other_texts(), *source.merges]
        copies = [self.out / path.relative_to(source.folder) for path in same]
        dictionaries = [source.dictionary_file(lang) for lang in source.langs]
        options = ["--srcdict", str(dictionaries[0]), "--tgtdict", str(dictionaries[1])]
        sides = Sides(self.out, source.langs, cores(), source.splits)
        kept = [*sides.files("bpe", "train"), self.counts]
        rules = {**asdict(self.job.limits), "problems": list(PROBLEMS)}
        return [
            Stage("filter", "filter", self.filter, [source.train[0], self.text], kept, rules),
            Stage("copy", "copy the other parts", partial(copy_files, same), same, copies),
            sides.binarised(False, {"dictionaries": list(map(digest, dictionaries))}, options),
        ]

    def filter(self, *outputs: Path) -> None:
        """Write the pairs that are kept, and the numbers of pairs."""
        limits, pairs = self.job.limits, 0
        dropped: Counter[str] = Counter(dict.fromkeys(PROBLEMS, 0))
        with PairWriter(outputs[:2]) as kept:
            for source, target in iter_pairs(self.source.train[0], self.text):
                pairs += 1
                if problem := limits.problem(source.split(), target.split()):
                    dropped[problem] += 1
                else:
                    kept.write((source, target))
        said = ", ".join(f"{dropped[problem]:,} {text}" for problem, text in PROBLEMS.items())
        say(f"  train: {kept.count:,} of {pairs:,} pairs kept; dropped: {said}")
        if not kept.count:
            bounds = f"`max_ratio` {limits.max_ratio:g} and `max_repeats` {limits.max_repeats}"
            raise CorpusError(f"no training pair is left with {bounds}")
        write_text(outputs[2], json.dumps({"pairs": pairs, "kept": kept.count, "dropped": dropped}) + "\n")
