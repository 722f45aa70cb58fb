"""The teacher: one model or an ensemble, which translates pieces of the data's dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightconv_plugin.cgroups import cores
from lightconv_plugin.errors import EnsembleError, InputError, TranslationError
from lightconv_plugin.quiet import quietly
from lightconv_plugin.recipes.distillation.choosing import closest_by_bleu
from lightconv_plugin.recipes.distillation.source import Block, Source
from lightconv_plugin.recipes.steps import digest
from lightconv_plugin.text.subwords import join, kind_of

if TYPE_CHECKING:
    from lightconv_plugin.generation.translations import Translation
    from lightconv_plugin.generation.translator import Translator

Translated = tuple[int, list[str]]  # the number of a block, and a line of pieces for each of its sentences
_SEARCH = (
    *("beam_size", "len_penalty", "unk_penalty", "min_len", "max_len_a", "max_len_b", "temperature"),
    "no_repeat_ngram_size",
)


@dataclass(frozen=True)
class Teacher:
    """How the text is translated.

    paths: models of one kind, as for `Translator`: an ensemble. options: of `Translator`.
    nbest: of how many translations the one that is closest to the reference is taken; 1 takes the best.
    """

    paths: tuple[Path, ...]
    options: Mapping[str, Any]
    nbest: int = 1

    def files(self) -> list[Path]:
        """The files that determine the translations: of an exported model, all but its card."""
        found = []
        for path in self.paths:
            inside = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
            found += [file for file in inside if file.name != "README.md"]
        return found

    def open(self, source: Source) -> Translator:
        """The Translator, which fits the data.

        Raises:
            InputError: the teacher cannot be opened, translates in another direction, or has other dictionaries.
        """
        with quietly():
            translator = self._open(source)
        try:
            self._check(translator, source)
        except BaseException:
            translator.close()
            raise
        return translator

    def _open(self, source: Source) -> Translator:
        from lightconv_plugin.generation.translator import Translator

        paths = list(self.paths)
        if any(path.is_dir() for path in paths):
            return Translator(paths, **self.options)
        split: dict[str, Any] = {"bpe_codes": "none", "tokenizer": "none"}  # the text is split already
        try:
            return Translator(paths, **split, **self.options)
        except EnsembleError:
            raise
        except TranslationError:
            # The folder of its training may be gone; a teacher that fits has the dictionaries of the data.
            return Translator(paths, source.binarised, **split, **self.options)

    def _check(self, translator: Translator, source: Source) -> None:
        langs = translator.source_lang, translator.target_lang
        if langs != source.langs:
            wanted, found = (" → ".join(pair) for pair in (source.langs, langs))
            raise InputError(f"`path` {self.paths[0]} translates {found}, but `data` {source.folder} is {wanted}")
        for lang, theirs in zip(langs, translator.dictionaries, strict=True):
            ours = source.dictionary(lang)
            if theirs.symbols != ours.symbols:
                raise InputError(
                    f"`path` {self.paths[0]} has another dictionary ({len(theirs):,} entries) than "
                    f"{source.dictionary_file(lang)} ({len(ours):,} entries): `data` must be prepared with the "
                    "teacher's merges and dictionaries"
                )
        if not 1 <= self.nbest <= translator.beam:
            raise InputError(f"`nbest` must be in 1 … `beam` = {translator.beam}, got {self.nbest}")

    def settings(self, translator: Translator) -> dict[str, Any]:
        """What the translations depend on besides `files`, as JSON values."""
        found = {**search_of(translator), "dtype": translator.dtype, "nbest": self.nbest}
        listed = translator.shortlist
        if listed is not None:
            found["shortlist"] = digest(listed)
        if listed is not None or translator.options.max_len_a:  # words or lengths are allowed for a whole batch
            found |= {name: self.options.get(name) for name in ("batch_tokens", "batch_size")}
        return found

    def divided(self, workers: int) -> list[Teacher]:
        """This teacher for each of several processes, which share the cores and the GPUs."""
        threads = self.options.get("threads") or max(cores() // workers, 1)
        shares = [{**self.options, "threads": threads} for _ in range(workers)]
        if self.options.get("device") == "cuda":
            import torch

            for number, share in enumerate(shares):
                share["device"] = f"cuda:{number % torch.cuda.device_count()}"
        return [replace(self, options=share) for share in shares]


def search_of(translator: Translator) -> dict[str, Any]:
    """The options of the search that determine its result, as JSON values."""
    return {name: getattr(translator.options, name) for name in _SEARCH}


def open_work(teacher: Teacher, source: Source) -> Callable[[Block], Translated]:
    """What translates blocks, in a process of its own."""
    return work_with(teacher.open(source), teacher.nbest, source)


def work_with(translator: Translator, nbest: int, source: Source) -> Callable[[Block], Translated]:
    """What translates blocks. A line without a translation, such as one that is too long, becomes empty."""
    dictionary = source.dictionary(source.langs[1])
    kind = kind_of(dictionary.symbols[dictionary.nspecial :])
    closest = closest_by_bleu() if nbest > 1 else None

    def choose(translation: Translation, reference: str) -> str:
        candidates = [hypothesis.tokens for hypothesis in translation.hypotheses]
        if closest is None or len(candidates) < 2:
            return " ".join(translation.tokens)
        words = [join(pieces, kind) for pieces in candidates]
        return " ".join(candidates[closest(words, join(reference.split(), kind))])

    def translate(block: Block) -> Translated:
        translations = translator.translate(block.sources, nbest, pieces=True)
        return block.number, list(map(choose, translations, block.targets))

    return translate
