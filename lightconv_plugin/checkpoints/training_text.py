"""Finds out how the text of a training was prepared, from the files beside its data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightconv_plugin.checkpoints.exported import is_exported, open_exported
from lightconv_plugin.errors import TranslationError
from lightconv_plugin.paths import beside
from lightconv_plugin.text.recipe import Lowercase, Recipe
from lightconv_plugin.text.sides import Subwords, TextSide
from lightconv_plugin.text.subwords import fits, kind_of

# The steps that a user can name: moses-a is tokenizer.perl -a, and what fairseq calls moses.
TOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    "moses": {"tokeniser": "moses"},
    "moses-a": {"tokeniser": "moses", "aggressive": True},
    "none": {"tokeniser": "none"},
}
NO_CODES = "none"  # instead of a file of merges: text of a dictionary of subwords is already split into them
# Where scripts/prepare.sh puts the merges, beside data-bin, and how archives of fairseq's released models name them.
_CODES = ("bpe/codes", "bpe/codes.{}")
_RELEASED = ("bpecodes", "codes", "code", "bpe.codes")
_MODELS = ("bpe/sentencepiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model")


@dataclass(frozen=True)
class FoundText:
    """How the text of both sides is split into pieces, and the assumptions that the user should know about.

    The file of the target may be missing, as translating does not need it: one that is given is for both sides, or for
    the source alone if it does not make the pieces of the target's dictionary.
    """

    source: TextSide
    target: TextSide
    notes: tuple[str, ...]


def find_text(
    task,
    data: Path,
    *,
    bpe_codes: Path | str | None = None,
    sentencepiece: Path | None = None,
    tokenizer: str | None = None,
    lowercase: bool = False,
) -> FoundText:
    """Find out how the text of a training was prepared; arguments take precedence over what is found.

    task: fairseq's, with dictionaries and languages. data: the folder of the dictionaries, or an exported model.
    bpe_codes: merges of subword-nmt, or "none". tokenizer: one of TOKENIZERS; with bpe_codes "none", for translations
        and for text of a dictionary of words alone.
    lowercase: lower-case both sides even if corpus.json beside the data does not say that the training text was.

    Raises TranslationError if something is missing; the message names the parameter to set.
    """
    if tokenizer is not None and tokenizer not in TOKENIZERS:
        raise TranslationError(f"`tokenizer` must be one of {', '.join(TOKENIZERS)}, got {tokenizer!r}")
    source, target = task.cfg.source_lang, task.cfg.target_lang
    kinds = [kind_of(entries(dictionary)) for dictionary in (task.source_dictionary, task.target_dictionary)]
    subwords, file = find_subwords(kinds[0], data, source, bpe_codes, sentencepiece)
    target_file = None if bpe_codes == NO_CODES else _found(kinds[1], data, target)
    given = bpe_codes is not None or sentencepiece is not None
    if file is not None and kinds[1] == subwords and (given or target_file is None):
        target_file = file if _fits(file, subwords, task.target_dictionary) else target_file
    corpus = read_corpus(data)
    if exported := _exported(data):
        corpus = {"text": {lang: side.recipe.as_json() for lang, side in exported.items()}}
    notes: list[str] = []
    recipes = [_recipe(corpus, data, lang, tokenizer, kinds, notes) for lang in (source, target)]
    if lowercase:
        recipes = [recipe if recipe.lowercase else replace(recipe, lowercase="last") for recipe in recipes]
    return FoundText(
        TextSide(recipes[0], subwords, file),
        TextSide(recipes[1], kinds[1], target_file),
        tuple(dict.fromkeys(notes)),
    )


def entries(dictionary) -> list[str]:
    """The symbols of a dictionary that are in its file."""
    return list(dictionary.symbols[dictionary.nspecial :])


def find_subwords(
    kind: Subwords, data: Path, lang: str, codes: Path | str | None, model: Path | None
) -> tuple[Subwords, Path | None]:
    """What splits tokens into the pieces of a dictionary of this kind, and its file; None if nothing is split.

    Raises TranslationError if something is missing; the message names the parameter to set.
    """
    if codes is not None and model is not None:
        raise TranslationError("give `bpe_codes` or `sentencepiece`, not both: a model has one kind of subwords")
    if codes == NO_CODES or (kind == "words" and codes is None and model is None):
        return kind, None
    if codes is not None:
        return "bpe", _existing(Path(codes), "bpe_codes")
    if model is not None:
        return "sentencepiece", _existing(Path(model), "sentencepiece")
    if (found := _found(kind, data, lang)) is None:
        option = "bpe_codes" if kind == "bpe" else "sentencepiece"
        raise TranslationError(
            f"the dictionary in {data} uses {'byte-pair encoding' if kind == 'bpe' else 'sentencepiece'}, but there "
            f"is no {_places(kind, data, lang)[0]}: give `{option}`, or set `bpe_codes` to none for text that is "
            "already split"
        )
    return kind, found


def _found(kind: Subwords, data: Path, lang: str) -> Path | None:
    if (side := _exported(data).get(lang)) is not None:
        return side.file if side.subwords == kind else None
    return next((path for path in _places(kind, data, lang) if path.is_file()), None)


def _fits(file: Path, kind: Subwords, dictionary) -> bool:
    try:
        return fits(file, kind, entries(dictionary))
    except ValueError as error:
        raise TranslationError(str(error)) from error


def _exported(data: Path) -> dict[str, TextSide]:
    """The text sides of an exported model by language (a language model's under ""); {} for any other folder."""
    if not is_exported(data):
        return {}
    exported = open_exported(data)
    sides = {exported.settings.target_lang or "": exported.target_text}
    if exported.source_text is not None:
        sides[exported.settings.source_lang or ""] = exported.source_text
    return sides


def _places(kind: Subwords, data: Path, lang: str) -> list[Path]:
    """The possible places of the file for a kind of subwords."""
    if kind == "words":
        return []
    names = (_CODES, _RELEASED) if kind == "bpe" else (_MODELS[:1], _MODELS)
    return [beside(data, name.format(lang)) for name in names[0]] + [data / name for name in names[1]]


def _existing(path: Path, option: str) -> Path:
    if not path.is_file():
        raise TranslationError(f"`{option}`: no such file: {path}")
    return path


def read_corpus(data: Path) -> dict[str, Any]:
    """corpus.json beside the data; {} if there is none, and for an exported model, which can lie anywhere."""
    about = beside(data, "corpus.json")
    if not about.is_file() or is_exported(data):
        return {}
    try:
        known = json.loads(about.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TranslationError(f"{about} is not the JSON that lightconv prepare writes: {error}") from error
    return known if isinstance(known, dict) else {}


def _recipe(
    corpus: dict[str, Any], data: Path, lang: str, tokenizer: str | None, kinds: Sequence[str], notes: list[str]
) -> Recipe:
    lowercase: Lowercase = "last" if corpus.get("lowercase") is True else ""
    named = None if tokenizer is None else Recipe(lang=lang, **TOKENIZERS[tokenizer])
    recipes = corpus.get("text")
    if isinstance(recipes, dict) and lang in recipes:
        try:
            known = Recipe.of_json(recipes[lang])
        except ValueError as error:
            raise TranslationError(f"{beside(data, 'corpus.json')}, text, {lang}: {error}") from error
        if named is None or (named.tokeniser == known.tokeniser and named.aggressive <= known.aggressive):
            return known
        lowercase = known.lowercase
    if named is not None:
        return replace(named, lowercase=lowercase)
    if "sentencepiece" in kinds:  # usually applied to text that is not tokenised
        return Recipe("none", lang, lowercase=lowercase)
    notes.append(
        f"no corpus.json beside {data} says how its text was tokenised: assuming Moses"
        f"{' and lower case' if lowercase else ''}; set `tokenizer` to moses, moses-a or none to confirm or change this"
    )
    return Recipe("moses", lang, lowercase=lowercase)
