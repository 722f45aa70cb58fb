"""What a `Translator` works with, wherever it comes from: checkpoints of fairseq or exported directories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightconv_plugin.generation.text_pipeline import Pipeline
from lightconv_plugin.modules.transformer import EncoderDecoder


@dataclass(frozen=True)
class TranslationModels:
    """An ensemble with its dictionaries and its way to and from text.

    source, target: dictionaries with fairseq's methods (index, pad, eos …).
    positions: of a sentence with its end, at the most. truncates: whether the models were trained on cut sentences.
    dtype, beam, lenpen, no_repeat_ngram_size: of the search, where the user does not say.
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
    no_repeat_ngram_size: int = 0
