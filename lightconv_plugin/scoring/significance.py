"""Whether one system is better than another: sacreBLEU's paired bootstrap test (Koehn 2004) on each of our measures."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import read_lines
from lightconv_plugin.scoring.bleu import Measure
from lightconv_plugin.scoring.generate_log import is_gen_log, parse_gen_log

SAMPLES = 1000
NAMES = {"bleu_tok": "BLEU4", "sacrebleu": "sacreBLEU", "chrf": "chrF2"}


@dataclass(frozen=True)
class Comparison:
    """One measure of the two systems, on the scale 0 to 100.

    score, against_score: of the whole text. mean, ci: of the bootstrap samples, of which 95% lie within mean ± ci.
    p_value: how probable so large a difference is between systems that are equally good.
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
    """The measures by name; the test's signature says samples, seed and the measure's own parameters."""

    against: str
    samples: int
    measures: dict[str, Comparison]
    signatures: dict[str, str]

    def as_json(self) -> dict:
        measures = {name: asdict(found) | {"signature": self.signatures[name]} for name, found in self.measures.items()}
        return {"file": self.against, "samples": self.samples, **measures}

    def lines(self) -> str:
        """For people: a line for each measure."""
        rows = [f"against {self.against}, paired bootstrap test of {self.samples:,} samples:\n"]
        for name, found in self.measures.items():
            ours = f"{found.score:.2f} ({found.mean:.2f} ± {found.ci:.2f})"
            theirs = f"{found.against_score:.2f} ({found.against_mean:.2f} ± {found.against_ci:.2f})"
            difference = f"{found.score - found.against_score:+.2f}, p = {found.p_value:.4f}"
            rows.append(f"{NAMES[name]} {ours} against {theirs}: {difference}\n")
        return "".join(rows)


def read_other(path: Path, references: Sequence[str]) -> list[str]:
    """The other system's translations, from a log of fairseq-generate or a file with one to a line.

    Raises InputError when they are not of the sentences of these references.
    """
    lines = read_lines(path)
    if is_gen_log(lines):
        log = parse_gen_log(lines, path)
        for number, (ours, theirs) in enumerate(zip(references, log.references, strict=False)):
            if ours != theirs:
                raise InputError(
                    f"{path} has translations of another text: its reference T-{number} is {theirs[:60]!r}"
                )
        lines = log.hypotheses
    if len(lines) != len(references):
        raise InputError(f"{path} has {len(lines)} translations, but there are {len(references)} references")
    return lines


def compare(
    system: Mapping[str, Measure], other: Mapping[str, Measure], against: str, samples: int = SAMPLES
) -> Significance:
    """Test every measure of `system` against the same of `other`; `against` is the other's name for the report.

    The seed is sacreBLEU's, 12345, or what $SACREBLEU_SEED says: the same texts give the same numbers on every run.
    """
    from sacrebleu.significance import PairedTest

    found, signatures = {}, {}
    for name, ours in system.items():
        test = PairedTest(
            [("other", other[name].hypotheses), ("system", ours.hypotheses)],  # sacreBLEU's baseline comes first
            {name: ours.metric},
            [ours.references],
            test_type="bs",
            n_samples=samples,
        )
        signature, scores = test()
        results: dict[str, Any] = {key: value for key, value in scores.items() if key != "System"}
        ((key, (baseline, result)),) = results.items()
        found[name] = Comparison(
            score=float(result.score),
            mean=float(result.mean),
            ci=float(result.ci),
            against_score=float(baseline.score),
            against_mean=float(baseline.mean),
            against_ci=float(baseline.ci),
            # For equal texts no sample differs, and sacreBLEU's count of those that differ more has its lowest value.
            p_value=1.0 if ours.hypotheses == other[name].hypotheses else float(result.p_value),
        )
        signatures[name] = str(signature[key])
    return Significance(against, samples, found, signatures)
