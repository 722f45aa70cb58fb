"""ROUGE of summaries for `lightconv score --metric rouge`, by the library rouge-score.

ROUGE-1 and -2 compare words and pairs of words; ROUGE-L uses the longest common subsequence of the two whole texts, as
if each were one sentence; ROUGE-Lsum uses that of sentences and joins the matches (Lin 2004, section 3.2). What papers
on CNN/Daily Mail call ROUGE-L, from ROUGE-1.5.5 on a file with one sentence per line, is ROUGE-Lsum.

As in files2rouge, a sentence ends at a word "." (--sentence-end), and words are stemmed (unless --no-stem).

rouge-score has its own definition of a word, whatever the text's tokens are: a run of a to z and 0 to 9 after
lower-casing. Everything else, even letters of other alphabets, separates words and is dropped (Moses' escapes such as
&apos; are removed before they could become words). `lightconv score --help` says what that means for published scores.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version

from lightconv_plugin.errors import InputError

TYPES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
# ROUGE-1.5.5 -c 95 -r 1000. The seed makes the interval the same on every run.
CONFIDENCE, SAMPLES, SEED = 0.95, 1000, 0
# fairseq-generate's form of <unk> in a reference, chosen so that it does not match <unk> in a translation.
UNKNOWN, MATCHES_NOTHING = "<<unk>>", " unknowninreference "
MOSES_ESCAPES = re.compile(r"&(?:amp|lt|gt|apos|quot|#124|#91|#93);")


@dataclass(frozen=True)
class RougeReport:
    """The result of `lightconv score --metric rouge`: means over the summaries, on a scale of 0 to 100.

    rouge1, rouge2, rougeL, rougeLsum: F1. precision, recall: by the same names. interval: the 95 % interval of each F1,
    [low, high]. n: number of summaries; empty: those without a word, which score 0 but are counted.
    """

    rouge1: float
    rouge2: float
    rougeL: float
    rougeLsum: float
    precision: dict[str, float]
    recall: dict[str, float]
    interval: dict[str, list[float]]
    signature: str
    n: int
    empty: int
    stem: bool
    sentence_end: str

    def lines(self) -> str:
        """Readable lines: one for each ROUGE, then one about the method."""
        rows = []
        for key, name in TYPES.items():
            low, high = self.interval[key]
            rows.append(
                f"{name} = {getattr(self, key):.2f} (P={self.precision[key]:.2f}, R={self.recall[key]:.2f}, "
                f"95% interval {low:.2f}-{high:.2f})"
            )
        without = f", {self.empty} of them without a word" if self.empty else ""
        return "\n".join([*rows, f"F1 of {self.n} summaries{without}  {self.signature}\n"])


def rouge(
    summaries: Sequence[str], references: Sequence[str], stem: bool = True, sentence_end: str = "."
) -> RougeReport:
    """ROUGE of summaries against references, one string each, in the same order.

    stem: compare Porter stems of words longer than three letters. sentence_end: the token that ends a sentence.

    Raises InputError if the numbers differ or are 0, a reference has no word, or rouge-score is not installed.
    """
    _check(summaries, references, sentence_end)
    library = _library()
    tokeniser = _tokeniser(library, stem)
    summaries, references = ([MOSES_ESCAPES.sub(" ", text) for text in side] for side in (summaries, references))
    scorer = library.rouge_scorer.RougeScorer(list(TYPES), tokenizer=tokeniser)
    aggregator = library.scoring.BootstrapAggregator(confidence_interval=CONFIDENCE, n_samples=SAMPLES)
    references = [text.replace(UNKNOWN, MATCHES_NOTHING) for text in references]
    scores, empty = [], 0
    for number, (summary, reference) in enumerate(zip(summaries, references, strict=True), start=1):
        if not tokeniser.tokenize(reference):
            raise InputError(
                f"reference {number} of {len(references)} has no word of the letters a to z and digits, which is all "
                f"that rouge-score compares: {reference[:60]!r}"
            )
        empty += not tokeniser.tokenize(summary)
        of_both = (sentences(reference, sentence_end), sentences(summary, sentence_end))
        scores.append(scorer.score(*("\n".join(side) for side in of_both)))
        aggregator.add_scores(scores[-1])

    def mean(key: str, measure: str) -> float:
        return 100 * sum(getattr(score[key], measure) for score in scores) / len(scores)

    bounds = _aggregate(aggregator)
    stemmed = "porter" if stem else "none"
    return RougeReport(
        **{key: mean(key, "fmeasure") for key in TYPES},
        precision={key: mean(key, "precision") for key in TYPES},
        recall={key: mean(key, "recall") for key in TYPES},
        interval={key: [100 * float(bound.fmeasure) for bound in (bounds[key].low, bounds[key].high)] for key in TYPES},
        signature=f"rouge-score|stem:{stemmed}|sentence-end:{sentence_end}|version:{version('rouge-score')}",
        n=len(scores),
        empty=empty,
        stem=stem,
        sentence_end=sentence_end,
    )


def sentences(text: str, sentence_end: str = ".") -> list[str]:
    """The sentences of a tokenised text, without the tokens that end them. An empty text has none."""
    split: list[list[str]] = [[]]
    for token in text.split():
        if token == sentence_end:
            split.append([])
        else:
            split[-1].append(token)
    return [" ".join(tokens) for tokens in split if tokens]


def _check(summaries: Sequence[str], references: Sequence[str], sentence_end: str) -> None:
    if not summaries:
        raise InputError("there are no summaries to score")
    if len(summaries) != len(references):
        raise InputError(f"{len(summaries)} summaries, but {len(references)} references: each needs one")
    if len(sentence_end.split()) != 1:
        raise InputError(f"`sentence_end` must be one token, such as '.', got {sentence_end!r}")


def _library():
    """The package rouge_score with the modules used here."""
    try:
        import rouge_score.rouge_scorer
        import rouge_score.scoring
        import rouge_score.tokenize
        import rouge_score.tokenizers
    except ImportError as error:
        raise InputError(f"ROUGE needs the library rouge-score: pip install rouge-score ({error})") from error
    return rouge_score


def _tokeniser(library, stem: bool):
    """rouge-score's own tokeniser, but stemming each different word only once, as it takes most of the time."""
    stemmer = None
    if stem:

        class Stemmer:
            stem = staticmethod(lru_cache(maxsize=None)(library.tokenizers.porter.PorterStemmer().stem))

        stemmer = Stemmer()

    class Tokeniser(library.tokenizers.Tokenizer):
        def tokenize(self, text: str) -> list[str]:
            return library.tokenize.tokenize(text, stemmer)

    return Tokeniser()


def _aggregate(aggregator) -> dict:
    """The aggregator's intervals; it uses numpy's global generator, whose state is restored."""
    import numpy as np

    state = np.random.get_state()
    np.random.seed(SEED)
    try:
        return aggregator.aggregate()
    finally:
        np.random.set_state(state)
