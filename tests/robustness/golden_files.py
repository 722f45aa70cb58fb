"""What the golden files have in common: their models, and the text that these read."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

from lightconv_plugin.mixers import MIXERS


def both_sides(**options: str) -> list[str]:
    return [
        f"--{side}-{name.replace('_', '-')}={value}"
        for side in ("encoder", "decoder")
        for name, value in options.items()
    ]


GOLDEN = Path(__file__).with_name("golden")
LANGUAGE_MODEL = "language_model"
TRANSLATION = {
    **{mixer: both_sides(conv_type=mixer) for mixer in MIXERS},
    "low_rank": both_sides(conv_type="dynamic", dynamic_rank="2"),
    "residual": [*both_sides(conv_type="dynamic"), "--dynamic-residual"],
    "attention_conv": both_sides(conv_type="attention", attention_conv="q,k,v"),
}
"""Models of translation, each with its options."""
SENTENCES = ("ich sieht den Hund", "du hört nicht die Katze oft", "er", "das Haus das Haus das Haus sieht er nicht")
SOURCE = [[1, 1, 5, 9, 4, 2], [7, 8, 10, 6, 11, 2]]
"""(B,S) tokens with pads to the left, as fairseq's translation task has them."""
PREVIOUS = [[2, 6, 4, 12, 9], [2, 5, 13, 7, 7]]
"""(B,T) tokens that the decoder has written so far."""


def expectations(golden: Path) -> dict[str, Any]:
    """What a golden folder's models computed when they were made, and with what."""
    return json.loads((golden / "expected.json").read_text(encoding="utf-8"))


def data_of(name: str, folder: Path) -> Path:
    """Puts the dictionaries of a golden checkpoint into a new folder: they are those of tests/fairseq_cli.py's text."""
    folder.mkdir()
    dictionaries = {"en": "dict.txt"} if name == LANGUAGE_MODEL else {lang: f"dict.{lang}.txt" for lang in ("de", "en")}
    for lang, file in dictionaries.items():
        shutil.copy(GOLDEN / f"dict.{lang}.txt", folder / file)
    return folder


def unpack(golden: Path, name: str, folder: Path) -> Path:
    """A golden checkpoint as the file that fairseq reads."""
    path = folder / f"{name}.pt"
    path.write_bytes(gzip.decompress((golden / f"{name}.pt.gz").read_bytes()))
    return path
