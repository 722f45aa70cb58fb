"""Fast beam search for encoder-decoders, with the results of fairseq's, and translation of raw text on top of it."""

import importlib

import fairseq  # noqa: F401 (first of all: it registers the models, on which everything here is built)

from lightconv_plugin.generation.generator import FastGenerator
from lightconv_plugin.generation.linear import DTYPES
from lightconv_plugin.generation.steps import StepModel
from lightconv_plugin.generation.sublayers import UnsupportedModelError

__all__ = ["DTYPES", "FastGenerator", "StepModel", "Translation", "Translator", "UnsupportedModelError"]


def __getattr__(name: str):
    # Not above: fairseq's commands import this package for the search alone.
    if name in ("Translation", "Translator"):
        return getattr(importlib.import_module("lightconv_plugin.generation.translator"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
