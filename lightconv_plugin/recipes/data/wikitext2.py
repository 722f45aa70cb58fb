"""WikiText-2 for language models."""

from __future__ import annotations

from lightconv_plugin.recipes.data import language_model
from lightconv_plugin.recipes.data.language_model import Size
from lightconv_plugin.recipes.data.options import Request
from lightconv_plugin.recipes.data.stages import Plan

ABOUT = """WikiText-2 (Merity et al. 2017), a small corpus for language models

--data is a folder with train.txt, valid.txt and test.txt, plain or .gz. Written: raw/ data-bin/

The text is already tokenised, and its rare words are <unk>: 2,088,628 training tokens (with
</s>), 33,278 different words. Free disk space: 0.1 GiB.
"""
EXPECTED = {"train": Size(36_718, 2_088_628), "valid": Size(3_760, 217_646), "test": Size(4_358, 245_569)}
ENTRIES = 33_280


def plan(request: Request) -> Plan:
    """The stages from the text to binary data."""
    return language_model.plan_files(request, ".", EXPECTED, ENTRIES)
