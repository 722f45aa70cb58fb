"""The tokeniser: raw text to the ids of a model's dictionaries, and back."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizer
from transformers.utils import cached_file

from lightconv_plugin.checkpoints.exported import CONFIG, TEXT, dictionary_name, is_language, read_text
from lightconv_plugin.checkpoints.saving import TOKENIZER
from lightconv_plugin.checkpoints.untrusted import read_bytes, read_json
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_write
from lightconv_plugin.hf.weights import where
from lightconv_plugin.released.cache import resolve
from lightconv_plugin.text.dictionary import BOS, EOS, PAD, UNK, Dictionary
from lightconv_plugin.text.sides import TextSide

_MOST = 2**28  # maximum bytes of a file
_OUTSIDE = (BOS, PAD, EOS)  # never words, even if a text contains them
_BEFORE = ("x", "世")  # words that stay the same in every kind of subwords and by every detokeniser


class _SideTokenizer:
    """Dictionary and text of one side; its encoder is created at first use, from the content of the text's file, which
    may have changed or be gone by then."""

    def __init__(self, dictionary: Dictionary, text: TextSide, content: bytes | None):
        self.dictionary = dictionary
        self.text = text
        self._content = content
        self._encode: Callable[[str], list[str]] | None = None
        self._decode: Callable[[list[str]], str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_encode": None, "_decode": None}

    def encode(self, line: str) -> list[str]:
        if self._encode is None:
            self._encode = self.text.encode(self._content)
        return self._encode(line)

    def decode(self, pieces: list[str]) -> str:
        if self._decode is None:
            self._decode = self.text.decode()
        return self._decode(pieces)


class LightConvTokenizer(PreTrainedTokenizer):
    """Raw text ↔ ids, by the tokeniser, subwords and dictionaries of an exported directory.

        tokenizer = AutoTokenizer.from_pretrained("model")
        batch = tokenizer(["Ein Hund ."], text_target=["A dog ."], padding=True, return_tensors="pt")
        tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)

    Text is in the source language, `text_target` in the target language. `decode` takes ids of the target, or of the
    source with use_source_tokenizer=True. A translation model's text ends with `</s>`; a language model's begins with
    it, as in fairseq's training. Ids that do not begin with it continue a text: `decode` keeps the space before them.
    Words such as `</s>` in a text are unknown words. `decode` keeps unknown words as `<unk>`. `convert_tokens_to_ids`
    gives ids of the source; those of the target, such as for `bad_words_ids`, are in `get_vocab()`.

    Args:
        text_file: text.json; the other files are next to it.
        source_lang, target_lang: as in the names of the dictionaries; default: those in config.json.
        model_max_target_length: truncate `text_target` to this many ids, as model_max_length does with `text`; default:
            max_target_positions in config.json.
        The others are those of transformers' tokenisers. The special symbols are fairseq's; no others can be added.

    Raises:
        InputError: a file is missing or damaged.
        ValueError: a token to add is not in the dictionaries.
    """

    vocab_files_names = {"text_file": TEXT}  # noqa: RUF012  (required by transformers)
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        text_file: str | os.PathLike,
        source_lang: str | None = None,
        target_lang: str | None = None,
        bos_token: str = BOS,
        pad_token: str = PAD,
        eos_token: str = EOS,
        unk_token: str = UNK,
        model_max_target_length: int | None = None,
        **kwargs: Any,
    ):
        directory = Path(text_file).parent
        config = read_json(directory, CONFIG) if (directory / CONFIG).exists() else {}
        if target_lang is None and config:
            source_lang, target_lang = _languages(config, directory / CONFIG)
        longest = config.get("max_target_positions") if model_max_target_length is None else model_max_target_length
        if longest is not None and (not isinstance(longest, int) or longest < 1):
            raise ValueError(f"model_max_target_length must be a whole number of at least 1, got {ascii(longest)[:80]}")
        langs = (source_lang, target_lang)
        texts = read_text(directory, source_lang is not None)
        self._files = {TEXT: read_bytes(directory, TEXT, _MOST)}
        sides: list[_SideTokenizer | None] = []
        for lang, text in zip(langs, texts, strict=True):
            if text is None:
                sides.append(None)
                continue
            name = dictionary_name(lang)
            self._files[name] = read_bytes(directory, name, _MOST)
            content = None
            if text.file is not None:
                content = self._files[text.file.name] = read_bytes(directory, text.file.name, _MOST)
            sides.append(_SideTokenizer(Dictionary.of_bytes(self._files[name], directory / name), text, content))
        assert sides[1] is not None  # text.json has a target
        self._source, self._target = sides[0], sides[1]
        self._current: _SideTokenizer = self._source or self._target
        if self._source is None:
            kwargs.setdefault("padding_side", "left")  # `generate` continues after the last token
        super().__init__(
            source_lang=source_lang,
            target_lang=target_lang,
            bos_token=bos_token,
            pad_token=pad_token,
            eos_token=eos_token,
            unk_token=unk_token,
            model_max_target_length=longest,
            **kwargs,
        )
        self.model_max_target_length = longest
        self.source_lang, self.target_lang = langs

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The tokeniser of a directory, or of a repository on the Hugging Face hub. See transformers."""
        pretrained_model_name_or_path = resolve(pretrained_model_name_or_path)
        if not os.path.isdir(pretrained_model_name_or_path):
            _fetch(pretrained_model_name_or_path, where(kwargs))
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def __call__(
        self, text: Any = None, text_pair: Any = None, text_target: Any = None, *args: Any, **kwargs: Any
    ) -> BatchEncoding:
        """As in transformers, but each side has its own maximum length, unless one is given."""
        if text_target is not None and not args and kwargs.get("max_length") is None:
            kwargs.setdefault("max_target_length", self.model_max_target_length)
        try:
            return super().__call__(text, text_pair, text_target, *args, **kwargs)
        finally:
            self._switch_to_input_mode()  # transformers does not if text_target is refused

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write the dictionaries, text.json and the files that it names, byte for byte as they were read."""
        if filename_prefix:
            raise ValueError(f"filename_prefix is not supported: the files have fixed names, got {filename_prefix!r}")
        paths = [Path(save_directory) / name for name in self._files]
        for path, content in zip(paths, self._files.values(), strict=True):
            with atomic_write(path, binary=True) as file:
                file.write(content)
        return tuple(map(str, paths))

    @property
    def vocab_size(self) -> int:
        """Number of entries in the target dictionary."""
        return len(self._target.dictionary)

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """The target dictionary."""
        return dict(self._target.dictionary.indices)

    def add_special_tokens(self, special_tokens_dict: dict[str, Any], *args: Any, **kwargs: Any) -> int:
        """Make symbols of the dictionaries special; ValueError for any others."""
        for token in special_tokens_dict.values():
            self._check_tokens(token if isinstance(token, (list, tuple)) else [token])
        return super().add_special_tokens(special_tokens_dict, *args, **kwargs)

    def _add_tokens(self, new_tokens: Sequence[Any], special_tokens: bool = False) -> int:
        self._check_tokens(new_tokens)
        return super()._add_tokens(new_tokens, special_tokens=special_tokens)

    def _check_tokens(self, tokens: Sequence[Any] | None) -> None:
        unknown = [str(token) for token in tokens or () if str(token) not in self._target.dictionary]
        if unknown:
            raise ValueError(f"tokens cannot be added, the dictionaries of a model are fixed: got {', '.join(unknown)}")

    def _switch_to_input_mode(self) -> None:
        self._current = self._source or self._target

    def _switch_to_target_mode(self) -> None:
        self._current = self._target

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """The pieces of a line of text.

        Raises:
            ValueError: it is not valid text. InputError: the tokeniser is not installed or lacks the language.
        """
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"text has a NUL or a half of a surrogate pair: {ascii(text)[:80]}")
        pieces = self._current.encode(re.sub(r"[\r\n]+", " ", text))
        return [UNK if piece in _OUTSIDE else piece for piece in pieces]

    def _convert_token_to_id_with_added_voc(self, token: str) -> int:
        return self._convert_token_to_id(token)  # those added have ids of the target, whatever the text's side is

    def _convert_token_to_id(self, token: str) -> int:
        return self._current.dictionary.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._target.dictionary[_index(index)]

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str | list[str]:  # type: ignore[override]
        """Ids of the target as pieces; `<s>`, `<pad>` and `</s>` can be skipped, `<unk>` is kept."""
        if isinstance(ids, int):
            return self._convert_id_to_token(ids)
        return _pieces(self._target.dictionary, ids, skip_special_tokens)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Pieces of the target as text."""
        return _text(self._target, tokens)

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        use_source_tokenizer: bool = False,
        **kwargs: Any,
    ) -> str:
        side = self._source if use_source_tokenizer and self._source is not None else self._target
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        pieces = _pieces(side.dictionary, ids, skip_special_tokens)
        if self._source is None and len(ids) and side.dictionary[int(ids[0])] not in _OUTSIDE:
            return _continuation(side, pieces)
        return _text(side, pieces)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """ids, followed by `</s>`; for a language model, `</s>` followed by ids. ValueError for pairs."""
        if token_ids_1 is not None:
            raise ValueError("text_pair is not supported: use text_target for the other language")
        end = self._target.dictionary.eos()
        return [end, *token_ids_0] if self._source is None else [*token_ids_0, end]

    def get_special_tokens_mask(
        self, token_ids_0: list, token_ids_1: list | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """1 at `<s>`, `<pad>` and `</s>`, else 0."""
        ids = token_ids_0 if already_has_special_tokens else self.build_inputs_with_special_tokens(token_ids_0)
        dictionary = self._target.dictionary
        outside = (dictionary.bos(), dictionary.pad(), dictionary.eos())
        return [int(index in outside) for index in ids]


def _languages(config: dict[str, Any], path: Path) -> tuple[str | None, str | None]:
    langs = config.get("source_lang"), config.get("target_lang")
    for lang in langs:
        if lang is not None and not (isinstance(lang, str) and is_language(lang)):
            raise InputError(f"{path}: source_lang and target_lang must be names of languages, got {ascii(lang)[:80]}")
    return langs


def _fetch(repository: str | os.PathLike, places: dict[str, Any]) -> None:
    """Download the files that other files name into the hub's cache."""
    path = Path(cached_file(repository, CONFIG, **places))
    langs = _languages(read_json(path.parent, CONFIG), path)
    if langs == (None, None):  # a language model, or one whose configuration was built without languages
        known = cached_file(repository, TOKENIZER, _raise_exceptions_for_missing_entries=False, **places)
        if known is not None:
            langs = _languages(read_json(Path(known).parent, TOKENIZER), Path(known))
    text = Path(cached_file(repository, TEXT, **places))
    sides = read_json(text.parent, TEXT)
    names = [dictionary_name(lang) for lang in langs if lang is not None or langs == (None, None)]
    for side in (sides.get("source"), sides.get("target")):
        name = side.get("file") if isinstance(side, dict) else None
        if isinstance(name, str) and Path(name).name == name and name not in ("", ".", ".."):
            names.append(name)
    for name in dict.fromkeys(names):
        try:
            cached_file(repository, name, **places)
        except OSError as error:
            raise OSError(
                f"{repository}: {name}, which its {CONFIG} or {TEXT} names, could not be fetched: {error}"
            ) from error


def _index(index: int) -> int:
    if index < 0:
        raise ValueError(f"token_ids must be at least 0, got {index}: replace -100 with the pad first")
    return index


def _pieces(dictionary: Dictionary, ids: Sequence[int], skip: bool) -> list[str]:
    outside = (dictionary.bos(), dictionary.pad(), dictionary.eos()) if skip else ()
    return [dictionary[_index(int(index))] for index in ids if index not in outside]


def _text(side: _SideTokenizer, pieces: Sequence[str]) -> str:
    """The pieces as text: words are joined and decoded, and special symbols stay as they are."""
    parts: list[str] = []
    words: list[str] = []
    for piece in [*pieces, None]:
        if piece is not None and piece not in _OUTSIDE:
            words.append(piece)
            continue
        if words:
            parts.append(side.decode(words))
            words = []
        if piece is not None:
            parts.append(piece)
    return " ".join(part for part in parts if part)


def _continuation(side: _SideTokenizer, pieces: Sequence[str]) -> str:
    """The pieces as text that follows other text: with a space first, unless they attach to the word before."""
    found = []
    for word in _BEFORE:
        before, text = side.decode([word]), _text(side, [word, *pieces])
        found.append(text[len(before) :] if text.startswith(before) else _text(side, pieces))
    # Chinese words attach only to each other.
    return min(found, key=len)
