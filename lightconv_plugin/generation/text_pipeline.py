"""Between raw text and the pieces of a model's dictionaries, by what lies beside its training data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightconv_plugin.generation.loading import TranslationError
from lightconv_plugin.text.recipe import Recipe
from lightconv_plugin.text.subwords import bpe_encoder, join, kind_of, sentencepiece_encoder

TOKENIZERS = ("moses", "none")
NO_CODES = "none"  # in the place of a file of merges: the text is in pieces already
# Where scripts/prepare_*.sh put the merges, beside data-bin, and how archives of fairseq's released models name them.
_CODES = ("bpe/codes", "bpe/codes.{}")
_RELEASED = ("bpecodes", "codes", "code", "bpe.codes")
_MODELS = ("bpe/sentencepiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model")


@dataclass(frozen=True)
class Pipeline:
    """encode: raw line → pieces of the source dictionary. decode: pieces of the target dictionary → text.

    notes: what was assumed, for the user to know.
    """

    encode: Callable[[str], list[str]]
    decode: Callable[[list[str]], str]
    notes: tuple[str, ...]


def build_pipeline(
    task,
    data: Path,
    *,
    bpe_codes: Path | str | None = None,
    sentencepiece: Path | None = None,
    tokenizer: str | None = None,
    lowercase: bool = False,
) -> Pipeline:
    """Find how the text of a training was prepared; what is given goes before what is found.

    task: fairseq's, with dictionaries and languages. data: the folder of the dictionaries.
    bpe_codes: merges of subword-nmt, or "none". tokenizer: "moses" or "none".
    lowercase: also where corpus.json beside the data does not say that the training text was.

    Raises TranslationError for what is missing, and says which parameter gives it.
    """
    if bpe_codes is not None and sentencepiece is not None:
        raise TranslationError("give `bpe_codes` or `sentencepiece`, not both: a model has one kind of subwords")
    if tokenizer is not None and tokenizer not in TOKENIZERS:
        raise TranslationError(f"`tokenizer` must be one of {', '.join(TOKENIZERS)}, got {tokenizer!r}")
    source, target = task.cfg.source_lang, task.cfg.target_lang
    kinds = [kind_of(_entries(dictionary)) for dictionary in (task.source_dictionary, task.target_dictionary)]
    encode = _subwords(kinds[0], data, source, bpe_codes, sentencepiece)
    corpus = _read_corpus(data)
    notes: list[str] = []
    recipes = [_recipe(corpus, data, lang, tokenizer, kinds, notes) for lang in (source, target)]
    if lowercase and not recipes[0].lowercase:
        recipes[0] = replace(recipes[0], lowercase="last")
    try:
        tokenise, detokenise = recipes[0].tokenise(), recipes[1].detokenise()
    except (ValueError, RuntimeError) as error:
        raise TranslationError(f"{error}; or set `tokenizer` to none, for tokenised text") from error
    kind = kinds[1]
    return Pipeline(
        encode=lambda line: encode(tokenise(line)).split(),
        decode=lambda pieces: detokenise(join(pieces, kind)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _entries(dictionary) -> list[str]:
    return list(dictionary.symbols[dictionary.nspecial :])


def _subwords(kind: str, data: Path, source: str, codes: Path | str | None, model: Path | None) -> Callable[[str], str]:
    """What encodes tokens as the source dictionary wants them."""
    try:
        if codes == NO_CODES or (kind == "words" and codes is None and model is None):
            return lambda line: line
        if codes is not None:
            return bpe_encoder(_existing(Path(codes), "bpe_codes"))
        if model is not None:
            return sentencepiece_encoder(_existing(Path(model), "sentencepiece"))
        above = data.resolve().parent
        names = (_CODES, _RELEASED) if kind == "bpe" else (_MODELS[:1], _MODELS)
        places = [above / name.format(source) for name in names[0]] + [data / name for name in names[1]]
        found = next((path for path in places if path.is_file()), None)
        if found is None:
            option = "bpe_codes" if kind == "bpe" else "sentencepiece"
            raise TranslationError(
                f"the dictionary in {data} is of {'byte-pair encoding' if kind == 'bpe' else 'sentencepiece'}, but "
                f"there is no {places[0]}: give `{option}`, or none as `bpe_codes` for text that is split already"
            )
        return (bpe_encoder if kind == "bpe" else sentencepiece_encoder)(found)
    except TranslationError:
        raise
    except ValueError as error:
        raise TranslationError(str(error)) from error


def _existing(path: Path, option: str) -> Path:
    if not path.is_file():
        raise TranslationError(f"`{option}`: no such file: {path}")
    return path


def _read_corpus(data: Path) -> dict[str, Any]:
    """corpus.json beside the data; {} without one."""
    about = data.resolve().parent / "corpus.json"
    if not about.is_file():
        return {}
    try:
        known = json.loads(about.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TranslationError(f"{about} is not the JSON that scripts/prepare_*.sh write: {error}") from error
    return known if isinstance(known, dict) else {}


def _recipe(
    corpus: dict[str, Any], data: Path, lang: str, tokenizer: str | None, kinds: list[str], notes: list[str]
) -> Recipe:
    lowercase = "last" if corpus.get("lowercase") is True else ""
    recipes = corpus.get("text")
    if isinstance(recipes, dict) and lang in recipes:
        try:
            known = Recipe.of_json(recipes[lang])
        except ValueError as error:
            raise TranslationError(f"{data.resolve().parent / 'corpus.json'}, text, {lang}: {error}") from error
        if tokenizer is None or tokenizer == known.tokeniser:
            return known
        lowercase = known.lowercase
    if tokenizer is not None:
        return Recipe(tokenizer, lang, lowercase=lowercase)
    if "sentencepiece" in kinds:  # whose text is seldom tokenised before
        return Recipe("none", lang, lowercase=lowercase)
    notes.append(
        f"no corpus.json beside {data} says how its text was tokenised: assuming Moses"
        f"{' and lower case' if lowercase else ''}; `tokenizer` moses or none confirms or changes that"
    )
    return Recipe("moses", lang, lowercase=lowercase)
