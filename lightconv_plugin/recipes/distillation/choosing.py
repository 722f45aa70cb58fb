"""Which translation of a sentence becomes training text, if any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightconv_plugin.recipes.data.binarise import SYMBOLS


def closest_by_bleu() -> Callable[[Sequence[str], str], int]:
    """A function that returns the index of the candidate with the highest sentence BLEU, of several the first one.

    It takes tokenised sentences: the candidates and the reference. BLEU is smoothed and of effective order, sacreBLEU's
    default for sentences.
    """
    from sacrebleu.metrics import BLEU

    bleu = BLEU(tokenize="none", effective_order=True)

    def closest(candidates: Sequence[str], reference: str) -> int:
        scores = [bleu.sentence_score(candidate, [reference]).score for candidate in candidates]
        return scores.index(max(scores))

    return closest


def repetitions(words: Sequence[str]) -> int:
    """How often in a row a phrase of any length occurs: 3 for "a b c b c b c", 1 without a repetition."""
    most = 1
    for length in range(1, len(words) // 2 + 1):
        same = 0  # words in a row that equal the word `length` before
        for word, before in zip(words[length:], words, strict=False):
            same = same + 1 if word == before else 0
            most = max(most, same // length + 1)
    return most


@dataclass(frozen=True)
class Limits:
    """Which pairs are kept: the largest ratio of the lengths in pieces, and the most repetitions of a phrase in a row.

    A translation may repeat a phrase as often as its source repeats one.
    """

    max_ratio: float
    max_repeats: int

    def problem(self, source: Sequence[str], target: Sequence[str]) -> str | None:
        """Why a pair is dropped, one of PROBLEMS; None if it is kept."""
        if not (source and target):
            return "empty"
        if not SYMBOLS.isdisjoint(target):
            return "symbol"
        if max(len(source), len(target)) > self.max_ratio * min(len(source), len(target)):
            return "ratio"
        # Counting takes a time that grows with the square of the length: of the source, it is rarely needed.
        if (most := repetitions(target)) > self.max_repeats and most > repetitions(source):
            return "loop"
        return None


PROBLEMS = {
    "empty": "without a translation",
    "symbol": "with a symbol of fairseq as a word",
    "ratio": "too different in length",
    "loop": "that repeat themselves",
}
