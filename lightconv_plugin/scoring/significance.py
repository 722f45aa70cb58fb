"""Whether one system is better than another: sacreBLEU's paired bootstrap test (Koehn 2004) on each of our measures."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import read_lines
from lightconv_plugin.scoring.bleu import Measure, join_subwords
from lightconv_plugin.scoring.generate_log import is_gen_log, parse_gen_log

SAMPLES = 1000
NAMES = {"bleu_tok": "BLEU4", "sacrebleu": "sacreBLEU", "chrf": "chrF2"}


@dataclass(frozen=True)
class Comparison:
    """One measure of the two systems, on a scale of 0 to 100.

    score, against_score: of the whole text. mean, ci: 95% of the bootstrap samples are within mean ± ci.
    p_value: sacreBLEU's: how many of the samples' differences, moved to a mean of 0, are above this one's size. That is
        one tail; the p-value of a two-sided test is about twice as large.
    """

    score: float
    mean: float
    ci: float
    against_score: float
    against_mean: float
    against_ci: float
    p_value: float


@dataclass(frozen=True)
class Significance:
    """The measures by name; the signature has the number of samples, the seed and the measure's own parameters."""

    against: str
    samples: int
    measures: dict[str, Comparison]
    signatures: dict[str, str]

    def as_json(self) -> dict:
        measures = {name: asdict(found) | {"signature": self.signatures[name]} for name, found in self.measures.items()}
        return {"file": self.against, "samples": self.samples, **measures}

    def lines(self) -> str:
        """Readable lines, one for each measure."""
        rows = [f"against {self.against}, paired bootstrap test of {self.samples:,} samples:\n"]
        for name, found in self.measures.items():
            ours = f"{found.score:.2f} ({found.mean:.2f} ± {found.ci:.2f})"
            theirs = f"{found.against_score:.2f} ({found.against_mean:.2f} ± {found.against_ci:.2f})"
            difference = f"{found.score - found.against_score:+.2f}, p = {found.p_value:.4f}"
            rows.append(f"{NAMES[name]} {ours} against {theirs}: {difference}\n")
        return "".join(rows)


def read_other(
    path: Path,
    references: Sequence[str],
    check: Callable[[bool, object], None] = lambda decoded, name: None,
) -> list[str]:
    """The other system's translations, from a fairseq-generate log or a file with one per line.

    The references are compared as words, as one of the two logs may have been written with --remove-bpe. check: as for
    `translations_in`.

    Raises InputError if they are not translations of the same sentences as these references.
    """
    hypotheses, others = translations_in(path, check)
    for number, (ours, theirs) in enumerate(zip(references, others, strict=False)):
        if join_subwords(ours) != theirs:
            raise InputError(f"{path} has translations of another text: its reference T-{number} is {theirs[:60]!r}")
    check_number(path, hypotheses, len(references))
    return hypotheses


def translations_in(path: Path, check: Callable[[bool, object], None]) -> tuple[list[str], list[str]]:
    """The translations in a fairseq-generate log and their references, or the lines of a file and no references.

    Lines in subwords are joined to words.

    check: called with a log's `decoded` (see `Generated`) and its name, raises InputError if it cannot be scored.
    """
    lines = read_lines(path)
    if not is_gen_log(lines):
        return list(map(join_subwords, lines)), []
    log = parse_gen_log(lines, path)
    check(log.decoded, path)
    return list(map(join_subwords, log.hypotheses)), list(map(join_subwords, log.references))


def check_number(path: Path, hypotheses: Sequence[str], references: int) -> None:
    """Raise InputError unless there are as many translations as references."""
    if len(hypotheses) != references:
        raise InputError(f"{path} has {len(hypotheses)} translations, but there are {references} references")


def compare(
    system: Mapping[str, Measure], other: Mapping[str, Measure], against: str, samples: int = SAMPLES
) -> Significance:
    """Test every measure of `system` against that of `other`; `against` is the other system's name in the report.

    The seed is sacreBLEU's, 12345, or $SACREBLEU_SEED: the same texts give the same numbers on every run, unless it is
    "none". sacreBLEU takes 0 for none.

    Raises InputError for another seed, or if the memory does not suffice for the samples.
    """
    from sacrebleu.significance import PairedTest

    seed = os.environ.get("SACREBLEU_SEED", "12345")
    if not (seed.isdecimal() and int(seed)) and seed.lower() != "none":
        raise InputError(f"SACREBLEU_SEED must be a whole number from 1, or none, got {seed!r}")
    found, signatures = {}, {}
    for name, ours in system.items():
        try:
            test = PairedTest(
                [("other", other[name].hypotheses), ("system", ours.hypotheses)],  # sacreBLEU's baseline comes first
                {name: ours.metric},
                [ours.references],
                test_type="bs",
                n_samples=samples,
            )
            signature, scores = test()
        except MemoryError:  # for the sentences of all samples at once
            size = f"{samples:,} of {len(ours.hypotheses):,} sentences"
            raise InputError(f"not enough memory for `samples` {size}: give fewer") from None
        results: dict[str, Any] = {key: value for key, value in scores.items() if key != "System"}
        ((key, (baseline, result)),) = results.items()
        found[name] = Comparison(
            score=float(result.score),
            mean=float(result.mean),
            ci=float(result.ci),
            against_score=float(baseline.score),
            against_mean=float(baseline.mean),
            against_ci=float(baseline.ci),
            # Every sample differs by 0 or more. sacreBLEU counts those that differ by more than what was observed, and
            # returns its lowest p-value for texts that this measure does not distinguish.
            p_value=1.0 if result.score == baseline.score else float(result.p_value),
        )
        signatures[name] = str(signature[key])
    return Significance(against, samples, found, signatures)
