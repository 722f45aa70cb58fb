"""A preparation as data: a list of stages, and the stages that all corpora of two sides have in common.

    raw/         the text as it came
    tok/         tokenised
    bpe/         byte-pair encoding: the merges, `codes`, learned on the training text, and the encoded text
    data-bin/    what fairseq-train reads
    corpus.json  the sides, where the parts come from, whether the text is lower-cased, how it was tokenised

A task's module says what is different there.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.files import write_text
from lightconv_plugin.recipes.data import bpe
from lightconv_plugin.recipes.data.binarise import binarise, check_words
from lightconv_plugin.recipes.data.options import SPLITS
from lightconv_plugin.recipes.data.text_pool import map_file
from lightconv_plugin.recipes.steps import Steps, check_own, remove
from lightconv_plugin.text.recipe import Recipe

LineMap = tuple[Callable[..., Callable[[str], str]], tuple]  # a factory and its arguments, as for `map_file`


class Stage(NamedTuple):
    """A step of `Steps.run`, in whose order the fields are."""

    name: str
    title: str
    make: Callable[..., object]
    inputs: Sequence[Path]
    outputs: Sequence[Path]
    params: Mapping[str, object] = {}


class Plan(NamedTuple):
    """What fills the folder `out`: stages in order, and then corpus.json, with what `about` returns."""

    out: Path
    stages: Sequence[Stage]
    about: Callable[[], Mapping[str, object]] | None = None

    def run(self) -> None:
        """Run the stages that are not done. CorpusError if one of them would replace the user's files."""
        self._check_inputs()
        about = [self.out / "corpus.json"] if self.about else []
        check_own(self.out, [*about, *(path for stage in self.stages for path in stage.outputs)])
        with Steps(self.out) as steps:
            run_stages(steps, self.stages)
            if self.about:
                write_text(self.out / "corpus.json", json.dumps(self.about(), indent=1) + "\n")

    def _check_inputs(self) -> None:
        """Raise CorpusError for an input that no stage makes in a place where one writes."""
        written = {path.resolve() for stage in self.stages for path in stage.outputs}
        made: set[Path] = set()
        for stage in self.stages:
            for path in stage.inputs:
                if path not in made and path.resolve() in written:
                    raise CorpusError(
                        f"`data`: {path} would be replaced by what is made of it in {self.out}: name another folder "
                        "with `out`, or move the text"
                    )
            made.update(stage.outputs)


def run_stages(steps: Steps, stages: Sequence[Stage]) -> None:
    """Run the stages that are not done."""
    for name, title, make, inputs, outputs, params in stages:
        steps.run(name, title, make, inputs=inputs, outputs=outputs, params=params)


def copy_files(sources: Sequence[Path], *outputs: Path) -> None:
    """Copy each file to its output."""
    for source, output in zip(sources, outputs, strict=True):
        shutil.copyfile(source, output)


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """An empty folder for temporary files; it is removed afterwards."""
    remove(folder)  # left over from a killed run
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        remove(folder)


@dataclass(frozen=True)
class Sides:
    """The files out/KIND/SPLIT.SIDE of a corpus of two sides, usually languages.

    joint: the merges of byte-pair encoding are learned on both sides together
    """

    out: Path
    names: tuple[str, str]
    workers: int
    splits: Sequence[str] = SPLITS
    joint: bool = True

    def files(self, kind: str, *splits: str) -> list[Path]:
        """The files of these splits (default: all), both sides of a split next to each other."""
        return [self.out / kind / f"{split}.{name}" for split in splits or self.splits for name in self.names]

    def codes(self, name: str) -> Path:
        """The merges of a side."""
        return self.out / "bpe" / ("codes" if self.joint else f"codes.{name}")

    def map(self, how: Callable[[str], LineMap], sources: Sequence[Path], outputs: Sequence[Path]) -> None:
        """Map files line by line by `how(side)`."""
        for source, output in zip(sources, outputs, strict=True):
            factory, arguments = how(source.suffix[1:])
            map_file(factory, arguments, source, output, source.name, self.workers)

    def encode(self, *outputs: Path) -> None:
        """Apply byte-pair encoding to all files of tok/."""
        self.map(lambda name: (bpe.encoder, (self.codes(name),)), self.files("tok"), outputs)

    def encoded(self, make: Callable[..., object], params: Mapping[str, object]) -> Stage:
        """The stage that makes bpe/ of tok/."""
        merges = list(dict.fromkeys(map(self.codes, self.names)))
        return Stage("bpe", "apply BPE", make, [*self.files("tok"), *merges], self.files("bpe"), params)

    def learned(self, merges: int) -> list[Stage]:
        """The stages that learn so many merges on the training text in tok/."""
        stages = []
        for group in [self.names] if self.joint else [(name,) for name in self.names]:
            codes, texts = self.codes(group[0]), [self.out / "tok" / f"train.{name}" for name in group]
            title = f"learn {merges} BPE merges" + ("" if self.joint else f", {group[0]}")
            learn = partial(bpe.learn_codes, texts, merges)
            stages.append(Stage(codes.name, title, learn, texts, [codes], {**bpe.versions(), "merges": merges}))
        return stages

    def binarised(
        self,
        joined: bool,
        params: Mapping[str, object],
        extra: Sequence[str] = (),
        check: Callable[[Path], object] = lambda output: None,
    ) -> Stage:
        """The stage that makes data-bin/ of bpe/.

        Args:
            joined: one dictionary for both sides
            extra: more options for fairseq-preprocess
            check: called with the folder of binarised data before it is accepted
        """

        sides = ["--source-lang", self.names[0], "--target-lang", self.names[1]]
        options = [*sides, *(["--joined-dictionary"] if joined else []), *extra]

        def make(output: Path) -> None:
            check_words(self.files("bpe"))
            binarise(self.out, self.splits, "bpe/{}", options, self.workers, output)
            check(output)

        return Stage("data-bin", "binarise", make, self.files("bpe"), [self.out / "data-bin"], params)

    def about(
        self, splits: Mapping[str, object], lowercase: bool, merges: int, recipes: Mapping[str, Recipe], **more: Any
    ) -> dict[str, object]:
        """The content of corpus.json: sides, origin of the splits, case, number of merges, and recipes by side."""
        facts = {"src": self.names[0], "tgt": self.names[1], "splits": splits, "lowercase": lowercase, "bpe": merges}
        return {**facts, **more, "text": {name: recipe.as_json() for name, recipe in recipes.items()}}
