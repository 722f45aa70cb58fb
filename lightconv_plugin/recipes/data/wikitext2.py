"""WikiText-2 for language models."""

from __future__ import annotations

import argparse

from lightconv_plugin.recipes.data import language_model
from lightconv_plugin.recipes.data.language_model import Size
from lightconv_plugin.recipes.data.request import Request

ABOUT = """WikiText-2 (Merity et al. 2017), a small corpus for language models

--data is a folder with train.txt, valid.txt and test.txt, plain or .gz. Written: raw/ data-bin/

The text is already tokenised, and its rare words are <unk>: 2,088,628 training tokens (with
</s>), 33,278 different words. Free disk space: 0.1 GiB.
"""
EXPECTED = {"train": Size(36_718, 2_088_628), "valid": Size(3_760, 217_646), "test": Size(4_358, 245_569)}
ENTRIES = 33_280


def add_options(parser: argparse.ArgumentParser) -> None:
    language_model.add_options(parser, threshold=0)
    language_model.add_sizes(parser)


def run(request: Request) -> None:
    """Run all steps."""
    language_model.run(request, ".", EXPECTED, ENTRIES)
