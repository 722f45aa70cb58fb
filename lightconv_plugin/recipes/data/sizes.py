"""Which configuration suits a corpus of a user's own, by its number of training pairs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CorpusSize:
    """A configuration for own text.

    config: its name in configs/.
    pairs: the smallest number of training pairs it is meant for.
    like: the recipe whose settings it has; like_pairs: the training pairs of that corpus.
    merges: of byte-pair encoding, as in that recipe.
    """

    config: str
    pairs: int
    like: str
    like_pairs: int
    merges: int


# By size. A limit lies between the corpora of two recipes; nobody measured where one model becomes the better one.
SIZES = (
    CorpusSize("parallel/small", 0, "multi30k_en_de/dynamicconv", 29_000, 4_000),
    CorpusSize("parallel/medium", 70_000, "iwslt14_de_en/dynamicconv", 160_239, 10_000),
    CorpusSize("parallel/large", 1_000_000, "wmt16_en_de/dynamicconv", 4_500_966, 32_000),
)


def size_for(pairs: int) -> CorpusSize:
    """The configuration for a corpus with so many training pairs."""
    return next(size for size in reversed(SIZES) if pairs >= size.pairs)
