"""Fast beam search for encoder-decoders, with the same results as fairseq's, and translation of raw text on top of it.

Without fairseq: `Translator` on exported models, `BatchSearch` and `StepModel` on plain models. With fairseq:
`Translator` on checkpoints, and `FastGenerator` in place of fairseq's SequenceGenerator.
"""

import importlib

from lightconv_plugin.errors import TranslationError, UnsupportedModelError

DTYPES = ("float32", "bfloat16", "int8")  # of a search on a CPU, see steps.StepModel
GPU_DTYPES = ("float32", "bfloat16", "float16")  # of a search on a GPU, each that of the whole model
AUTO = "auto"  # the fastest of them on this machine, see dtypes.py
CHOICES = (AUTO, "float32", "bfloat16", "float16", "int8")

_HOMES = {
    "BatchSearch": "batch_search",
    "FastGenerator": "generator",
    "SearchOptions": "beam_search",
    "StepModel": "steps",
    "Translation": "translations",
    "Translator": "translator",
}

__all__ = ["DTYPES", "GPU_DTYPES", "TranslationError", "UnsupportedModelError", *_HOMES]


def __getattr__(name: str):
    # Imported on first use: one of them imports fairseq, and fairseq's commands do not need the others.
    if name in _HOMES:
        return getattr(importlib.import_module(f"lightconv_plugin.generation.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
