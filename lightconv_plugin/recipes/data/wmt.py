"""WMT's parallel corpora from their archives to fairseq's binary data.

    text/      train, valid and test from the archives, one sentence per line: train.en train.fr valid.en …
    tok/       tokenised: English, German, French by Moses' rules, Chinese segmented by jieba
    encoded/   byte-pair encoded: training text, and validation text if it was taken from it
    bpe/       `codes` (codes.zh and codes.en if the languages have their own), and the encoded text after cleaning
    raw/       the raw lines of bpe/valid and bpe/test, references for sacreBLEU

The steps are those of fairseq's prepare-wmt14en2de.sh and prepare-wmt14en2fr.sh; sources.toml lists the parts of each
task. Every step streams: memory does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.data import bpe
from lightconv_plugin.recipes.data.options import SPLITS, Request
from lightconv_plugin.recipes.data.pairs import PairWriter, clean_pairs, iter_pairs, keep_pair, split_every
from lightconv_plugin.recipes.data.stages import LineMap, Plan, Sides, Stage, copy_files, scratch
from lightconv_plugin.recipes.data.text_pool import map_file
from lightconv_plugin.recipes.data.wmt_sources import TASKS, Source, WmtTask, append_source, extract_sgm
from lightconv_plugin.text import moses
from lightconv_plugin.text.recipe import Recipe
from lightconv_plugin.text.segmenters import SEGMENTERS, segmented

RATIO, MIN_LEN, MAX_LEN = 1.5, 1, 250  # limits of the pairs kept; lengths in pieces
BOUNDS = {"ratio": RATIO, "min_len": MIN_LEN, "max_len": MAX_LEN}


def training_tokeniser(lang: str) -> Callable[[str], str]:
    """For training text, and validation text taken from it."""
    return moses.tokeniser(lang, normalise=True, remove_non_printing=True, aggressive=True)


def recipe(lang: str) -> Recipe:
    """For separate validation and test sets: their text is not normalised, except for the typographic apostrophe."""
    segmenter = segmented(lang)
    return Recipe(segmenter, lang) if segmenter else Recipe("moses", lang, aggressive=True, plain_apostrophe=True)


def tokenising(lang: str, training: bool) -> tuple[LineMap, dict[str, object]]:
    """(the tokeniser, what its results depend on)."""
    if segmenter := segmented(lang):
        return (Recipe.tokenise, (recipe(lang),)), {**SEGMENTERS[segmenter].versions()}
    how: LineMap = (training_tokeniser, (lang,)) if training else (Recipe.tokenise, (recipe(lang),))
    return how, {**moses.versions(), "lang": lang, "training": training}


def clean(split: str, encoded: Sequence[Path], *outputs: Path) -> None:
    """Write the pairs that are neither too long nor too different in length."""
    kept, of = clean_pairs(encoded, outputs, RATIO, MIN_LEN, MAX_LEN)
    if not kept:
        raise CorpusError(f"no {split} pair of {of} is left with {BOUNDS}")
    say(f"  {split}: {kept:,} of {of:,} pairs kept")


def keep_raw(encoded: Sequence[Path], text: Sequence[Path], *outputs: Path) -> None:
    """Write the raw lines of the pairs that cleaning keeps."""
    with PairWriter(outputs) as kept:
        for pair, raw in zip(iter_pairs(*encoded), iter_pairs(*text), strict=True):
            if keep_pair(*pair, MAX_LEN, RATIO, MIN_LEN):
                kept.write(raw)


class Preparation:
    """The stages of one task.

    own_valid: validation text is a separate set, not taken from the training text
    """

    def __init__(self, task: WmtTask, request: Request) -> None:
        self.task, self.request = task, request
        self.own_valid = isinstance(task.valid, Source)
        self.langs = task.src, task.tgt
        self.sides = Sides(request.out, self.langs, request.options.workers, joint=task.joint)

    def text_stages(self) -> list[Stage]:
        """text/: the concatenated sources of the training text, split into train and valid, and the test sets."""
        task, data = self.task, self.request.data
        every = task.valid if isinstance(task.valid, int) else None
        train = Stage(
            "text-train",
            "training text",
            self.concatenate,
            [data / source.archive for source in task.train],
            self.sides.files("text", *(["train"] if self.own_valid else ["train", "valid"])),
            {"members": [source.members for source in task.train], "every": every},
        )
        separate = {"test": task.test} | ({"valid": task.valid} if isinstance(task.valid, Source) else {})
        return [train, *(self.set_stage(split, source) for split, source in separate.items())]

    def concatenate(self, *outputs: Path) -> None:
        """Write the training text; unless there is a separate validation set, every N-th pair is for validation."""
        valid = self.task.valid
        if isinstance(valid, Source):
            return self.append_sources(outputs)
        with scratch(self.sides.out / ".whole") as folder:
            whole = [folder / lang for lang in self.langs]
            self.append_sources(whole)
            split_every(whole, valid, outputs[:2], outputs[2:])

    def append_sources(self, outputs: Sequence[Path]) -> None:
        unpacked, any_size = self.sides.out / ".unpacked", self.request.options.any_size
        for source in self.task.train:
            pairs = append_source(source, self.request.data, unpacked, outputs, any_size)
            say(f"  {source.name}: {pairs:,} pairs")

    def set_stage(self, split: str, source: Source) -> Stage:
        """text/ of a separate set."""
        data, unpacked, any_size = self.request.data, self.sides.out / ".unpacked", self.request.options.any_size
        return Stage(
            f"text-{split}",
            f"{split} text, {source.name}",
            lambda *outputs: extract_sgm(source, data, unpacked, outputs, any_size),
            [data / source.archive],
            self.sides.files("text", split),
            {"members": source.members},
        )

    def mapped(
        self, kind: str, verb: str, source: Path, how: LineMap, inputs: Sequence[Path], params: dict[str, object]
    ) -> Stage:
        """A stage that maps a file to the folder `kind` line by line."""
        title = source.name

        def make(output: Path) -> None:
            map_file(*how, source, output, title, self.request.options.workers)

        output = self.sides.out / kind / title
        return Stage(f"{kind}-{title}", f"{verb} {title}", make, [source, *inputs], [output], params)

    def tokenised(self, split: str, source: Path) -> Stage:
        training = split == "train" or (split == "valid" and not self.own_valid)
        how, params = tokenising(source.suffix[1:], training)
        return self.mapped("tok", "tokenise", source, how, [], params)

    def encoded(self, split: str, source: Path) -> Stage:
        codes = self.sides.codes(source.suffix[1:])
        params = {**bpe.versions(), "merges": self.request.options.bpe}
        kind = "bpe" if self.is_whole(split) else "encoded"
        return self.mapped(kind, "apply BPE to", source, (bpe.encoder, (codes,)), [codes], params)

    def is_whole(self, split: str) -> bool:
        """Whether a split is used as it is: separate sets are not cleaned."""
        return split == "test" or (split == "valid" and self.own_valid)

    def used(self, split: str) -> list[Stage]:
        """bpe/ and raw/: the text used for training, validation and test."""
        encoded, text, raw = (self.sides.files(kind, split) for kind in ("encoded", "text", "raw"))
        title = f"raw lines of {split}"
        if self.is_whole(split):
            return [Stage(f"raw-{split}", title, partial(copy_files, text), text, raw)]
        cleaning = partial(clean, split, encoded)
        stages = [Stage(f"bpe-{split}", f"clean {split}", cleaning, encoded, self.sides.files("bpe", split), BOUNDS)]
        if split != "train":
            keeping = partial(keep_raw, encoded, text)
            stages.append(Stage(f"raw-{split}", title, keeping, [*encoded, *text], raw, BOUNDS))
        return stages

    def plan(self) -> Plan:
        sides, options = self.sides, self.request.options
        joined = self.task.joint and not options.separate_dictionaries
        stages = [
            *self.text_stages(),
            *(self.tokenised(split, path) for split in SPLITS for path in sides.files("text", split)),
            *sides.learned(options.bpe),
            *(self.encoded(split, path) for split in SPLITS for path in sides.files("tok", split)),
            *(stage for split in SPLITS for stage in self.used(split)),
            sides.binarised(joined, {"joined": joined, "langs": self.langs}),
        ]
        return Plan(sides.out, stages, lambda: self.about(joined))

    def about(self, joined: bool) -> dict[str, object]:
        """The content of corpus.json."""
        task = self.task
        valid = task.valid.name if isinstance(task.valid, Source) else f"one pair in {task.valid} of them"
        splits = {"train": [source.name for source in task.train], "valid": valid, "test": task.test.name}
        recipes = {lang: recipe(lang) for lang in self.langs}
        return self.sides.about(splits, False, self.request.options.bpe, recipes, joined_dictionary=joined)


def plan(request: Request) -> Plan:
    """The stages of the task `request.variant`."""
    return Preparation(TASKS[request.variant], request).plan()
