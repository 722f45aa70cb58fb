"""From a folder of parallel raw text to fairseq's binary data.

    raw/       the text as it came, decompressed: train.en train.de valid.en … test.de (then test1.en, …)
    tok/       lower-cased if requested, punctuation normalised, Moses-tokenised
    bpe/       with separate merges, `codes.en` and `codes.de` instead of `codes`

Text is lower-cased before it is normalised and tokenised, like in the Multi30k authors' script, whose tokenised files
this reproduces (with `keep_last`). Validation and test sets without files are held out from the training text.
"""

from __future__ import annotations

import shutil
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from lightconv_plugin.errors import CorpusError, InputError
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.data import bpe
from lightconv_plugin.recipes.data.options import Options, Request
from lightconv_plugin.recipes.data.pairs import clean_pairs, hold_out, temporary
from lightconv_plugin.recipes.data.parallel_folder import Corpus, find_corpus, locate
from lightconv_plugin.recipes.data.stages import Plan, Sides, Stage
from lightconv_plugin.recipes.data.text_pool import BLOCK, iter_lines, map_file, write_lines
from lightconv_plugin.recipes.grammar.corpus import write_corpus
from lightconv_plugin.recipes.steps import remove
from lightconv_plugin.text import moses
from lightconv_plugin.text.recipe import Recipe, moses_rules
from lightconv_plugin.text.segmenters import SEGMENTERS, segmented

AS_TOKENS = "lightconv prepare parallel --tokenizer none"  # of the commands that read text, only this has the option
COPIES = 8  # copies of the training text with BPE-dropout
MULTI30K_TESTS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")
SMOKE_SIZES = {"train": 600, "valid": 40, "test": 40}  # sentence pairs


def recipe(options: Options, lang: str, keep_last: bool) -> Recipe:
    """The steps from a language's raw text to tokens. CorpusError if the tokeniser has no rules for it.

    A region, as in pt_BR, has the rules of its language. Text that Moses' script has tokenised already may be in any
    language: the script uses its English rules where it has no others. InputError if a library is missing.
    """
    case: Literal["", "first"] = "first" if options.lowercase else ""
    if options.tokenizer == "none":
        return Recipe("none", lang, lowercase=case)
    if options.tokenizer == "moses" and (segmenter := segmented(lang)):
        return usable(Recipe(segmenter, lang, lowercase=case))
    try:
        rules = moses_rules(lang)
    except ValueError as error:
        if options.tokenizer != "done":
            raise CorpusError(f"{error}: give tokenised text to {AS_TOKENS}") from None
        rules = "en"
    if options.tokenizer == "done":  # with case
        return usable(Recipe("moses", rules, lowercase="last" if options.lowercase else ""))
    return usable(Recipe("moses", rules, lowercase=case, normalise=True, keep_last=keep_last))


def usable(recipe: Recipe) -> Recipe:
    """The recipe, tried before anything is written. CorpusError if rules for the language are missing, InputError if a
    library is."""
    try:
        recipe.tokenise()
    except ValueError as error:
        raise CorpusError(f"{error}: give tokenised text to {AS_TOKENS}") from None
    except RuntimeError as error:
        raise InputError(f"{error} (or give text with spaces between its words to {AS_TOKENS})") from error
    return recipe


def copy_pair(sources: list[Path], outputs: list[Path]) -> int:
    """Copy both sides of one part, decompressed; returns the number of pairs. Both need text and equal line counts."""
    lengths = []
    for source, output in zip(sources, outputs, strict=True):
        lengths.append(write_lines(output, iter_lines(source)))
        if not any(map(str.strip, iter_lines(output))):
            raise CorpusError(f"{source} has no text: " + (f"{lengths[-1]} empty lines" if lengths[-1] else "0 bytes"))
    if lengths[0] != lengths[1]:
        raise CorpusError(f"{sources[0]} has {lengths[0]} lines but {sources[1]} has {lengths[1]}")
    return lengths[0]


def append(source: Path, target: Path) -> None:
    """Copy the text of `source` to the end of `target`."""
    with source.open("rb") as file, target.open("ab") as end:
        shutil.copyfileobj(file, end, BLOCK)


def append_exchanged(texts: Sequence[Path]) -> None:
    """Append the text of each side to the other one."""
    source, target = texts
    first = source.with_suffix(".first")
    try:
        shutil.copyfile(source, first)
        append(target, source)
        append(first, target)
    finally:
        first.unlink(missing_ok=True)


class Preparation:
    """The stages for one corpus, in the folder `out`.

    keep_last: see `moses.tokeniser`
    """

    def __init__(self, corpus: Corpus, out: Path, options: Options, keep_last: bool = False) -> None:
        if options.bpe_copies and not options.bpe_dropout:
            raise InputError(f"`bpe_copies` {options.bpe_copies} needs `bpe_dropout`: the copies would all be the same")
        if options.bpe_copies == 1:
            raise InputError("`bpe_copies` must be at least 2 with `bpe_dropout`, got 1: the first copy has all merges")
        if options.bidirectional and not joined(options):
            wrong = "separate_bpe" if options.separate_bpe else "separate_dictionaries"
            raise InputError(f"`bidirectional` needs one dictionary for both languages: it is not valid with `{wrong}`")
        self.corpus, self.options, self.langs = corpus, options, (corpus.src, corpus.tgt)
        self.copies = encodings(options)
        self.held_out = held_out(options)
        self.recipes = {lang: recipe(options, lang, keep_last) for lang in self.langs}
        self.steps = self.recipes  # from raw/ to tok/
        if options.tokenizer == "done":
            self.steps = {lang: Recipe("none", lang, lowercase=known.lowercase) for lang, known in self.recipes.items()}
        self.splits = corpus.splits()
        for split, pairs in self.held_out.items():
            self.splits[split] = f"{pairs} pairs of {corpus.train}, seed {options.split_seed}"
        self.sides = Sides(out, self.langs, options.workers, tuple(self.splits), not options.separate_bpe)

    def raw(self, *outputs: Path) -> None:
        pairs = iter(zip(outputs[::2], outputs[1::2], strict=True))
        parts: dict[str, Sequence[Path]] = dict(zip(self.splits, pairs, strict=True))
        for split, prefix in self.corpus.splits().items():
            texts = [locate(self.corpus.folder, prefix, lang) for lang in self.langs]
            say(f"  {split}: {copy_pair(texts, list(parts[split]))} pairs of lines")
        if self.held_out:
            tokens = [self.steps[lang].tokenise() for lang in self.langs]
            new = {split: parts[split] for split in self.held_out}
            left, of = hold_out(parts["train"], new, self.held_out, self.options.split_seed, tokens)
            alike = of - left - sum(self.held_out.values())
            sizes = ", ".join(f"{pairs} for {split}" for split, pairs in self.held_out.items())
            say(f"  held out: {sizes}; {alike} pairs that share a side with them removed; {left} left for training")

    def tokenise(self, *outputs: Path) -> None:
        self.sides.map(lambda lang: (Recipe.tokenise, (self.steps[lang],)), self.sides.files("raw"), outputs)

    def encode(self, *outputs: Path) -> None:
        other = replace(self.sides, joint=not self.sides.joint)
        for lang in self.langs:
            remove(other.codes(lang))  # from a run with the other kind of merges; `lightconv translate` would use it
        self.sides.encode(*outputs)
        for lang, path in zip(self.langs, outputs[:2], strict=True):
            for copy in range(1, self.copies):
                self.append_copy(copy, lang, path)
        self.clean(outputs[:2])
        if self.options.bidirectional:
            append_exchanged(outputs[:2])

    def append_copy(self, copy: int, lang: str, output: Path) -> None:
        """Append another encoding of the training text, by BPE-dropout."""
        source, temporary = self.sides.out / f"tok/train.{lang}", output.with_suffix(f".{copy}")
        how = (self.sides.codes(lang), self.options.bpe_dropout, copy)
        try:
            map_file(bpe.dropout_encoder, how, source, temporary, f"{source.name}, {copy}", self.options.workers)
            append(temporary, output)
        finally:
            temporary.unlink(missing_ok=True)

    def clean(self, train: Sequence[Path]) -> None:
        """Remove the training pairs that are too long or too different in length."""
        cleaned = [path.with_suffix(".clean") for path in train]
        max_len, max_ratio = self.options.max_len, self.options.max_ratio
        with temporary(cleaned):
            kept, of = clean_pairs(train, cleaned, max_ratio, 1, max_len)
            if not kept:
                raise CorpusError(f"no training pair is left with `max_len` {max_len} and `max_ratio` {max_ratio}")
            for source, output in zip(cleaned, train, strict=True):
                source.replace(output)
        say(f"  train: {kept} of {of} pairs kept")

    def plan(self) -> Plan:
        sides, options, corpus = self.sides, self.options, self.corpus
        texts = [locate(corpus.folder, prefix, lang) for prefix in corpus.splits().values() for lang in self.langs]
        segmenters = {recipe.tokeniser for recipe in self.steps.values()} & SEGMENTERS.keys()
        words = ChainMap(*(SEGMENTERS[name].versions() for name in segmenters))
        how = {**moses.versions(), **words, "text": {lang: recipe.as_json() for lang, recipe in self.steps.items()}}
        # Sentences with the same tokens are not in two parts, so other tokens make other parts.
        chosen = {"held_out": self.held_out, "seed": options.split_seed, **how} if self.held_out else {}
        bounds: dict[str, object] = {"max_len": options.max_len, "max_ratio": options.max_ratio}
        if options.bpe_dropout:
            bounds |= {"bpe_dropout": options.bpe_dropout, "bpe_copies": self.copies}
        directions = {"bidirectional": True} if options.bidirectional else {}
        stages = [
            Stage("raw", "raw text", self.raw, texts, sides.files("raw"), chosen),
            Stage("tok", "tokenise", self.tokenise, sides.files("raw"), sides.files("tok"), how),
            *sides.learned(options.bpe),
            sides.encoded(self.encode, bounds | directions),
            sides.binarised(joined(options), {"joined": joined(options), "langs": self.langs}),
        ]
        about = sides.about(self.splits, options.lowercase, options.bpe, self.recipes, **directions)
        return Plan(sides.out, stages, lambda: about)


def encodings(options: Options) -> int:
    """How many times the training text is encoded."""
    return (options.bpe_copies or COPIES) if options.bpe_dropout else 1


def repetitions(options: Options) -> int:
    """How many times the binarised training text has each pair, in either direction."""
    return encodings(options) * (2 if options.bidirectional else 1)


def joined(options: Options) -> bool:
    """Whether both languages have one dictionary."""
    return not (options.separate_dictionaries or options.separate_bpe)


def held_out(options: Options) -> Mapping[str, int]:
    """{"valid": pairs, "test": pairs}: how many pairs are taken from the training text."""
    sizes = {}
    for split, lines, prefix in (
        ("valid", options.valid_lines, options.valid_prefix),
        ("test", options.test_lines, options.test_prefix),
    ):
        if lines and prefix:
            raise InputError(f"`{split}_prefix` {prefix} is not valid with `{split}_lines` {lines}: give one of them")
        if lines:
            sizes[split] = lines
    if options.split_seed != Options.split_seed and not sizes:
        raise InputError(f"`split_seed` {options.split_seed} needs `valid_lines` or `test_lines`: nothing is held out")
    return sizes


def plan(request: Request, tests: Sequence[str] = (), keep_last: bool = False) -> Plan:
    """The stages for the corpus in `request.data`; `tests` are its test sets, unless the options name others."""
    options = request.options
    named = tuple(filter(None, options.test_prefix.split(","))) or tests
    prefixes = options.train_prefix, options.valid_prefix, named
    corpus = find_corpus(request.data, options.src, options.tgt, *prefixes, without=tuple(held_out(options)))
    parts = ", ".join(filter(None, (corpus.train, corpus.valid, *corpus.tests)))
    say(f"{corpus.src} → {corpus.tgt}: {parts} in {request.data}")
    return Preparation(corpus, request.out, options, keep_last).plan()


def plan_multi30k(request: Request) -> Plan:
    """The stages for Multi30k; the test sets are those that are in the folder, unless the options name others."""
    first, *others = MULTI30K_TESTS
    return plan(request, (first, *(name for name in others if _is_pair(request, name))), keep_last=True)


def _is_pair(request: Request, name: str) -> bool:
    """Whether the folder has a test set in both languages: not all have been published in all of them."""
    langs = {path.name.removesuffix(".gz").rpartition(".")[2] for path in request.data.glob(f"{name}.*")}
    return len(langs) >= 2 and {request.options.src, request.options.tgt} - {None} <= langs


def plan_smoke(request: Request) -> Plan:
    """The stages for the user's text, or for text that the demonstration's grammar writes first."""
    if request.options.data is None:
        write_corpus(request.data, seed=1, sizes=SMOKE_SIZES)
    return plan(request, keep_last=True)
