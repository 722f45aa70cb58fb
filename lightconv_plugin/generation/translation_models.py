"""The models that a `Translator` works with, from fairseq checkpoints or exported directories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightconv_plugin.modules.transformer import EncoderDecoder
from lightconv_plugin.text.sides import TextSide


@dataclass(frozen=True)
class Pipeline:
    """encode: raw line → pieces of the source dictionary. decode: pieces of the target dictionary → text.

    notes: assumptions that the user should know about.
    target: how given translations are split into pieces; None if that is unknown.
    """

    encode: Callable[[str], list[str]]
    decode: Callable[[list[str]], str]
    notes: tuple[str, ...]
    target: TextSide | None = None


@dataclass(frozen=True)
class TranslationModels:
    """An ensemble with its dictionaries and its text pipeline.

    source, target: dictionaries with fairseq's methods (index, pad, eos …).
    positions: maximum length of a sentence with its end symbol. truncates: whether the models were trained on truncated
    sentences. dtype and the fields after it: the search's defaults.
    """

    models: list[EncoderDecoder]
    source: Any
    target: Any
    source_lang: str
    target_lang: str
    positions: int
    truncates: bool
    pipeline: Pipeline
    dtype: str = "float32"
    beam: int = 5
    lenpen: float = 1.0
    min_len: int = 1
    max_len_b: int = 200
    no_repeat_ngram_size: int = 0
