"""WikiText-103 for language models."""

from __future__ import annotations

from lightconv_plugin.recipes.data import language_model
from lightconv_plugin.recipes.data.language_model import Size
from lightconv_plugin.recipes.data.options import Request
from lightconv_plugin.recipes.data.stages import Plan

ABOUT = """WikiText-103 (Merity et al. 2017), a word-level corpus for language models

--data is a folder with wikitext-103-v1.zip. Written: raw/ data-bin/

The text is already tokenised, and words seen less than three times are <unk>; it is used as it
is, with its empty lines. Checked: 1,801,350, 3,760 and 4,358 lines and, with one </s> per line, the
published 103,227,021, 217,646 and 245,569 tokens. The published 267,735 words include <unk> and
</s>; fairseq adds <s> and <pad>, and pads the dictionary to a multiple of 8: 267,744 entries.

Free disk space: 0.2 GB of archive, 2 × 0.5 GB of text (unpacked, and raw/), 2 × 0.4 GB of 4-byte
tokens (data-bin/, and the workers' shares of it): 2 GiB.
"""
ARCHIVE = "wikitext-103-v1.zip"
EXPECTED = {"train": Size(1_801_350, 103_227_021), "valid": Size(3_760, 217_646), "test": Size(4_358, 245_569)}
ENTRIES = 267_744


def plan(request: Request) -> Plan:
    """The stages from the text to binary data."""
    return language_model.plan_files(request, ARCHIVE, EXPECTED, ENTRIES)
