"""What the golden files have in common: their models, and the text that these read."""

import gzip
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden")
MIXERS = ("lightweight", "dynamic", "talk", "depthwise", "conv", "window_attention", "attention")
LANGUAGE_MODEL = "language_model"
SENTENCES = ("ich sieht den Hund", "du hört nicht die Katze oft", "er", "das Haus das Haus das Haus sieht er nicht")
SOURCE = [[1, 1, 5, 9, 4, 2], [7, 8, 10, 6, 11, 2]]
"""(B,S) tokens with pads to the left, as fairseq's translation task has them."""
PREVIOUS = [[2, 6, 4, 12, 9], [2, 5, 13, 7, 7]]
"""(B,T) tokens that the decoder has written so far."""


def unpack(golden: Path, mixer: str, folder: Path) -> Path:
    """A golden checkpoint as the file that fairseq reads."""
    path = folder / f"{mixer}.pt"
    path.write_bytes(gzip.decompress((golden / f"{mixer}.pt.gz").read_bytes()))
    return path
