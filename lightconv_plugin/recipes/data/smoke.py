"""A miniature corpus written by the demonstration's grammar, to try a whole reproduction in minutes."""

from __future__ import annotations

import argparse

from lightconv_plugin.recipes.data import parallel_text
from lightconv_plugin.recipes.data.request import Request

ABOUT = """A miniature English–German corpus, written by a grammar, to try things out

600 sentence pairs for training, 40 for validation and 40 for test; 300 joint BPE merges. --data
is a folder of other parallel text: train.en train.de valid.en … test.de. Filled: text/ raw/ tok/
bpe/ data-bin/
"""
SIZES = {"train": 600, "valid": 40, "test": 40}


def add_options(parser: argparse.ArgumentParser) -> None:
    parallel_text.add_options(parser, bpe=300)


def run(request: Request) -> None:
    from lightconv_plugin.recipes.demo.corpus import write_corpus  # it uses this package's modules

    if not request.data_given:
        write_corpus(request.data, seed=1, sizes=SIZES)
    parallel_text.run(request, parallel_text.settings_of(request, keep_last=True))
