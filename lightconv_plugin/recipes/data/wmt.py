"""WMT's parallel corpora from their archives to fairseq's binary data, in resumable steps.

    text/      train, valid and test from the archives, one sentence per line: train.en train.fr valid.en …
    tok/       tokenised: English, German, French by Moses' rules, Chinese segmented by jieba
    encoded/   byte-pair encoded: training text, and validation text if it was taken from it
    bpe/       `codes` (codes.zh and codes.en if the languages have their own), and the encoded text after cleaning
    raw/       the raw lines of bpe/valid and bpe/test, references for sacreBLEU
    data-bin/  what fairseq-train reads
    corpus.json  languages, and the source of each part

The steps are those of fairseq's prepare-wmt14en2de.sh and prepare-wmt14en2fr.sh; wmt_tasks.py lists the parts of each
task. Every step streams: memory does not grow with the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightconv_plugin.recipes.data import bpe, moses
from lightconv_plugin.recipes.data.binarise import binarise_pairs
from lightconv_plugin.recipes.data.pairs import clean_pairs, iter_pairs, keep_pair, split_every
from lightconv_plugin.recipes.data.parallel_folder import CorpusError
from lightconv_plugin.recipes.data.request import Request
from lightconv_plugin.recipes.data.text_pool import map_file, write_lines
from lightconv_plugin.recipes.data.wmt_sources import Source, append_source, extract_sgm
from lightconv_plugin.recipes.data.wmt_tasks import TASKS, Task
from lightconv_plugin.recipes.steps import Steps, remove, say, write_text
from lightconv_plugin.text.chinese import segmenter
from lightconv_plugin.text.recipe import Recipe

_VERBS = {"tok": "tokenise", "encoded": "apply BPE to", "bpe": "apply BPE to"}
RATIO, MIN_LEN, MAX_LEN = 1.5, 1, 250  # limits of the pairs kept; lengths in pieces


def training_tokeniser(lang: str) -> Callable[[str], str]:
    """For training text, and validation text taken from it."""
    return moses.tokeniser(lang, normalise=True, remove_non_printing=True, aggressive=True)


def evaluation_tokeniser(lang: str) -> Callable[[str], str]:
    """For separate validation and test sets: their text is not normalised, except for the typographic apostrophe."""
    tokenise = moses.tokeniser(lang, aggressive=True)
    return lambda line: tokenise(line.replace("’", "'"))


def _recipe(lang: str) -> Recipe:
    """How the test set's text was processed, so that it can be repeated."""
    return Recipe("jieba", lang) if lang == "zh" else Recipe("moses", lang, aggressive=True, plain_apostrophe=True)


def _tokenising(lang: str, training: bool) -> tuple[Callable[..., Callable[[str], str]], tuple, dict[str, object]]:
    """(the tokeniser's factory, its arguments, what its results depend on)."""
    if lang == "zh":
        try:
            return segmenter, (), {"jieba": version("jieba")}
        except PackageNotFoundError:
            raise CorpusError("jieba, which segments Chinese, is not installed: pip install jieba") from None
    params = {**moses.versions(), "lang": lang, "training": training}
    return (training_tokeniser if training else evaluation_tokeniser), (lang,), params


def keep_raw(encoded: Sequence[Path], text: Sequence[Path], outputs: Sequence[Path]) -> None:
    """Write the raw lines of the pairs that cleaning keeps."""
    rows = zip(iter_pairs(*encoded), iter_pairs(*text), strict=True)
    kept = [raw for pair, raw in rows if keep_pair(*pair, MAX_LEN, RATIO, MIN_LEN)]
    for output, lines in zip(outputs, zip(*kept, strict=True), strict=True):
        write_lines(output, lines)


class Preparation:
    """The steps of one task in one folder."""

    def __init__(self, task: Task, steps: Steps, request: Request) -> None:
        self.task, self.steps, self.request = task, steps, request
        self.out: Path = steps.root
        self.langs = task.src, task.tgt
        self.merges: int = request.options.bpe

    def files(self, kind: str, split: str) -> list[Path]:
        return [self.out / kind / f"{split}.{lang}" for lang in self.langs]

    def codes(self, lang: str) -> Path:
        return self.out / "bpe" / ("codes" if self.task.joint else f"codes.{lang}")

    def texts(self) -> None:
        """text/: the concatenated sources of the training text, split into train and valid, and the test sets."""
        data, scratch = self.request.data, self.out / ".unpacked"
        every = self.task.valid if isinstance(self.task.valid, int) else None
        splits = ["train"] if every is None else ["train", "valid"]

        def train(*outputs: Path) -> None:
            whole = outputs if every is None else [self.out / f".whole.{lang}" for lang in self.langs]
            for path in whole:
                remove(path)
            counts = {}
            for source in self.task.train:
                counts[source.name] = append_source(source, data, scratch, whole, self.request.any_size)
                say(f"  {source.name}: {counts[source.name]:,} pairs")
            if every is not None:
                split_every(whole, every, outputs[:2], outputs[2:])
                for path in whole:
                    remove(path)

        self.steps.run(
            "text-train",
            "training text",
            train,
            inputs=[data / source.archive for source in self.task.train],
            outputs=[path for split in splits for path in self.files("text", split)],
            params={
                "members": [source.members for source in self.task.train],
                "every": every,
            },
        )
        sets = {"test": self.task.test}
        if isinstance(self.task.valid, Source):
            sets["valid"] = self.task.valid
        for split, source in sets.items():
            self.steps.run(
                f"text-{split}",
                f"{split} text, {source.name}",
                lambda *outputs, source=source: extract_sgm(source, data, scratch, outputs, self.request.any_size),
                inputs=[data / source.archive],
                outputs=self.files("text", split),
                params={"members": source.members},
            )

    def map(self, kind: str, split: str, source: str, making: Callable[[str], tuple], inputs: Callable) -> None:
        """For each language, a step that maps source/SPLIT.LANG to kind/SPLIT.LANG line by line."""
        for lang, path, output in zip(self.langs, self.files(source, split), self.files(kind, split), strict=True):
            factory, arguments, params = making(lang)
            title = f"{split}.{lang}"
            self.steps.run(
                f"{kind}-{title}",
                f"{_VERBS[kind]} {title}",
                lambda out, path=path, title=title, factory=factory, arguments=arguments: map_file(
                    factory, arguments, path, out, title, self.request.workers
                ),
                inputs=[path, *inputs(lang)],
                outputs=[output],
                params=params,
            )

    def run(self) -> None:
        task, own_valid = self.task, isinstance(self.task.valid, Source)
        self.texts()
        for split in ("train", "valid", "test"):
            training = split == "train" or (split == "valid" and not own_valid)
            self.map("tok", split, "text", partial(_tokenising, training=training), lambda lang: [])
        params = {**bpe.versions(), "merges": self.merges}
        tok = dict(zip(self.langs, self.files("tok", "train"), strict=True))
        for lang in self.langs[:1] if task.joint else self.langs:
            texts = list(tok.values()) if task.joint else [tok[lang]]
            self.steps.run(
                self.codes(lang).name,
                f"learn {self.merges} BPE merges" + ("" if task.joint else f", {lang}"),
                partial(bpe.learn_codes, texts, self.merges),
                inputs=texts,
                outputs=[self.codes(lang)],
                params=params,
            )
        whole = ("valid", "test") if own_valid else ("test",)  # separate sets are used as they are
        for split in ("train", "valid", "test"):
            self.map(
                "bpe" if split in whole else "encoded",
                split,
                "tok",
                lambda lang: (bpe.encoder, (self.codes(lang),), params),
                lambda lang: [self.codes(lang)],
            )
        self.used(whole)
        joined = task.joint and not self.request.options.separate_dictionaries
        self.steps.run(
            "data-bin",
            "binarise",
            lambda output: binarise_pairs(
                self.out, *self.langs, ("train", "valid", "test"), joined, self.request.workers, output
            ),
            inputs=[path for split in ("train", "valid", "test") for path in self.files("bpe", split)],
            outputs=[self.out / "data-bin"],
            params={"joined": joined, "langs": self.langs},
        )
        self.about(joined)

    def used(self, whole: Sequence[str]) -> None:
        """bpe/ and raw/: the text used for training, validation and test."""
        bounds = {"ratio": RATIO, "min_len": MIN_LEN, "max_len": MAX_LEN}
        for split in ("train", "valid", "test"):
            encoded, text, raw = (self.files(kind, split) for kind in ("encoded", "text", "raw"))

            def clean(*outputs: Path, split: str = split, encoded: list[Path] = encoded) -> None:
                kept, number = clean_pairs(encoded, outputs, RATIO, MIN_LEN, MAX_LEN)
                if not kept:
                    raise CorpusError(f"no {split} pair of {number} is left with {bounds}")
                say(f"  {split}: {kept:,} of {number:,} pairs kept")

            def copy(*outputs: Path, text: list[Path] = text) -> None:
                for path, output in zip(text, outputs, strict=True):
                    output.write_bytes(path.read_bytes())

            def keep(*outputs: Path, text: list[Path] = text, encoded: list[Path] = encoded) -> None:
                keep_raw(encoded, text, outputs)

            title = f"raw lines of {split}"
            if split in whole:
                self.steps.run(f"raw-{split}", title, copy, inputs=text, outputs=raw, params={})
                continue
            used = self.files("bpe", split)
            self.steps.run(f"bpe-{split}", f"clean {split}", clean, inputs=encoded, outputs=used, params=bounds)
            if split != "train":
                self.steps.run(f"raw-{split}", title, keep, inputs=[*encoded, *text], outputs=raw, params=bounds)

    def about(self, joined: bool) -> None:
        task = self.task
        valid = task.valid.name if isinstance(task.valid, Source) else f"one pair in {task.valid} of them"
        about = {
            "src": task.src,
            "tgt": task.tgt,
            "splits": {"train": [source.name for source in task.train], "valid": valid, "test": task.test.name},
            "lowercase": False,
            "bpe": self.merges,
            "joined_dictionary": joined,
            "text": {lang: _recipe(lang).as_json() for lang in self.langs},
        }
        write_text(self.out / "corpus.json", json.dumps(about, indent=1) + "\n")


def run(request: Request) -> None:
    """Run all steps of the task `request.variant`."""
    with Steps(request.out) as steps:
        Preparation(TASKS[request.variant], steps, request).run()
