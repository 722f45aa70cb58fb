"""A system's result, and the table of several systems."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightconv_plugin.files import write_text
from lightconv_plugin.recipes.data.text_pool import iter_lines
from lightconv_plugin.scoring.generate_log import parse_gen_log
from lightconv_plugin.text.recipe import Recipe

NAMES = {"dynamicconv": "DynamicConv", "lightweightconv": "LightConv", "transformer": "Transformer (fairseq)"}


@dataclass(frozen=True)
class Result:
    """One system's score (as printed by `lightconv score --json`) and its facts; `key` identifies the training."""

    key: str
    system: str
    score: dict
    parameters: int
    tokens_per_second: float
    seconds: float
    updates: int
    averaged: int
    threads: int
    together: bool
    generated: str

    @staticmethod
    def read(path: Path) -> Result:
        """The result at `path`. OSError if there is none."""
        return Result(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


def _translations(data: Path, src: str, tgt: str, results: Sequence[Result], number: int = 5) -> list[dict[str, str]]:
    """Some sentences of the test set, evenly spaced, with each system's translation as plain text.

    Source and reference are lower-cased if the training text was: the systems then know no case.
    """
    about = json.loads((data / "corpus.json").read_text(encoding="utf-8"))
    cased = str.lower if about["lowercase"] else str
    sources, references = (list(map(cased, iter_lines(data / "raw" / f"test.{lang}"))) for lang in (src, tgt))
    plain = Recipe.of_json(about["text"][tgt]).detokenise()
    systems = {}
    for result in results:
        path = Path(result.generated)
        systems[result.system] = parse_gen_log(list(iter_lines(path)), path).hypotheses
    samples = []
    for i in range(0, len(sources), max(1, len(sources) // number))[:number]:
        sample = {"source": sources[i], "reference": references[i]}
        sample |= {name: plain(lines[i]) for name, lines in systems.items()}
        samples.append({name: textwrap.shorten(text, 300, placeholder=" …") for name, text in sample.items()})
    return samples


def write_report(work: Path, data: Path, src: str, tgt: str, results: Sequence[Result]) -> str:
    """The report as Markdown, also written to report.md and report.json in `work`."""
    from tabulate import tabulate

    columns = ("system", "BLEU, tokenised", "sacreBLEU", "chrF2", "parameters", "tokens/s", "training")
    rows = []
    for result in results:
        score = result.score
        rows.append(
            (
                NAMES[result.system],
                *(f"{score[name]:.2f}" for name in ("bleu_tok", "sacrebleu", "chrf")),
                f"{result.parameters:,}",
                f"{result.tokens_per_second:,.0f}",
                _duration(result.seconds),
            )
        )
    first = results[0]
    threads = _count(first.threads, "thread")
    how = f"at the same time, each with {threads}" if first.together else f"one after the other, with {threads}"
    notes = [
        f"{src} → {tgt}, {first.score['n']} test sentences; {first.updates} updates, "
        f"the last {first.averaged} checkpoints averaged; beam 5.",
        f"sacreBLEU {first.score['signature']}",
        f"Trained {how}; tokens/s are target tokens in training.",
    ]
    samples = _translations(data, src, tgt, results)
    width = max(len(NAMES.get(name, name)) for name in samples[0])
    aligned = ("left", *["right"] * (len(columns) - 1))
    lines = ["", tabulate(rows, columns, "pipe", disable_numparse=True, colalign=aligned), "", *notes, ""]
    for sample in samples:
        lines += ["```", *(f"{NAMES.get(name, name):<{width}}  {text}" for name, text in sample.items()), "```", ""]
    text = "\n".join(lines)
    write_text(work / "report.md", text.lstrip())
    report = {"src": src, "tgt": tgt, "systems": [asdict(result) for result in results], "translations": samples}
    write_text(work / "report.json", json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    return text
