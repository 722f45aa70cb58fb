"""Fast beam search for encoder-decoders, with the results of fairseq's, and translation of raw text on top of it.

Without fairseq: `Translator` on exported models, `BatchSearch` and `StepModel` on plain ones. With it: `Translator`
on checkpoints, and `FastGenerator` in the place of fairseq's SequenceGenerator.
"""

import importlib

from lightconv_plugin.errors import UnsupportedModelError

_HOMES = {
    "BatchSearch": "batch_search",
    "DTYPES": "linear",
    "FastGenerator": "generator",
    "SearchOptions": "beam_search",
    "StepModel": "steps",
    "Translation": "translator",
    "TranslationError": "searcher",
    "Translator": "translator",
}

__all__ = ["UnsupportedModelError", *_HOMES]


def __getattr__(name: str):
    # None of them before it is asked for: one would import fairseq, the others are not needed by its commands.
    if name in _HOMES:
        return getattr(importlib.import_module(f"lightconv_plugin.generation.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
