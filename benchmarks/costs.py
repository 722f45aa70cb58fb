"""The cost of reproducing the rows that were not run: data, tokens, operations, and hours at measured speeds.

It is benchmarks/COSTS.md, which `python -m benchmarks.pages` writes.

Tokens are updates × tokens per update, from each configuration. The work is 6 floating-point operations per parameter
and token (2 forward, 4 backward), for a source and a target token together: max_tokens counts the longer side, and each
of its tokens passes the encoder or the decoder once. Embeddings that are only looked up count too; the convolutions and
the products of positions in attention do not. Hours are computed only from files in benchmarks/results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks import tables_counted
from benchmarks.report import RESULTS, BenchmarkError, digits, table

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = {
    "lightweightconv": "LightConv (ours)",
    "dynamicconv": "DynamicConv (ours)",
    "talkconv": "TaLK (ours)",
    "transformer": "fairseq Transformer",
}
# Task → a description of its training data, and the preset of benchmarks/training.py with the size of its models.
TASKS = {
    "iwslt14_de_en": ("160,239 pairs", "iwslt_de_en"),
    "wmt16_en_de": ("4.5 million pairs", "wmt_en_de_big"),
    "wmt14_en_de": ("4.5 million pairs", "wmt_en_de_big"),
    "wmt14_en_fr": ("35.5 million pairs", "wmt_en_de_big"),
    "wmt17_zh_en": ("as prepared", "wmt_en_de_big"),
    "cnndm": ("287,113 articles", None),
    "gbw": ("0.8 billion words", None),
    "wikitext103": ("103 million words", None),
}
_COUNTED = "training, 16384 tokens"
_GPU_PART = "training_16k"  # batches of as many tokens
EARLY = re.compile(r"at about ([\d,]+) updates")
TOTAL = re.compile(r"^#.* total +([\d,]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """One training, as described by its configuration."""

    config: Path
    data: str
    preset: str | None
    updates: int
    tokens: int
    parameters: int

    @property
    def operations(self) -> float:
        """Floating-point operations of the matrix products of the whole training."""
        return 6.0 * self.parameters * self.tokens


def read_run(path: Path, data: str, preset: str | None) -> Run:
    """Read a configuration; BenchmarkError if it lacks required information."""
    text = path.read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    total = TOTAL.search(text)
    if not total:
        raise BenchmarkError(f"{path} does not add up its parameters in its comment")
    try:
        optimization = config["optimization"]
        updates = optimization["max_update"]
        if "max_epoch" in optimization:  # which ends it before that; the comment says when
            if not (early := EARLY.search(text)):
                raise BenchmarkError(f"{path} does not say after how many updates max_epoch ends it")
            updates = int(early[1].replace(",", ""))
        tokens = updates * config["dataset"]["max_tokens"] * optimization["update_freq"][0]
    except (KeyError, IndexError, TypeError) as error:
        raise BenchmarkError(f"{path} has no {error}") from error
    return Run(path, data, preset, updates, tokens, int(total[1].replace(",", "")))


def runs() -> Iterator[Run]:
    """The four systems of every task in TASKS, none of which was run here, in that order."""
    for task, (data, preset) in TASKS.items():
        for system in SYSTEMS:
            yield read_run(ROOT / "configs" / task / f"{system}.yaml", data, preset)


def measurements(folder: Path) -> dict[str, dict]:
    """The training benchmarks at the papers' model sizes, by file name: cpu_training_… and gpu_fairseq_timing."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        # benchmarks/gpu_fairseq.sh collects its parts, which differ in the size of their batches, in a single file.
        part = content["results"].get(_GPU_PART, {}) if content.get("benchmark") == "gpu_fairseq_timing" else content
        sized = part.get("benchmark") == "training" and part["preset"] in ("iwslt_de_en", "wmt_en_de_big")
        if sized and not part.get("quick"):
            found[path.name] = part
    return found


def machine_of(content: dict) -> str:
    """The machine and the type of a measurement, which have a column together."""
    machine = content["machine"]
    return f"{machine.get('gpu') or '{threads} threads of {cpu}'.format(**machine)}, {content['dtype']}"


def hours(run: Run, content: dict) -> str:
    """Hours of a training at the measured speed of its system; a dash if that was not measured at this size."""
    measured = content["systems"].get(SYSTEMS[run.config.stem])
    if run.preset != content["preset"] or not measured:
        return "–"
    return f"{run.tokens / measured['tokens_per_s'] / 3600:,.0f}"


def counted_hours(run: Run, content: dict) -> str:
    """Hours of a training if each batch of 16,384 tokens takes what was counted for its system."""
    steps = content["steps"].get(SYSTEMS[run.config.stem], {}).get(_COUNTED)
    if run.preset != content["preset"] or not steps:
        return "–"
    tokens = int(_COUNTED.split()[1])
    return f"{run.tokens / tokens * sum(tables_counted.seconds(steps, content)) / 3600:,.0f}"


def page(folder: Path = RESULTS) -> str:
    """The whole page."""
    found = measurements(folder)
    machines = sorted({machine_of(content) for content in found.values()})
    counted = folder / f"{tables_counted.FILE}.json"
    content = json.loads(counted.read_text(encoding="utf-8")) if counted.is_file() else None
    rows, previous = [], None
    for run in runs():
        task = run.config.parent.name
        row = [f"`{task}/{run.config.stem}`", run.data if task != previous else ""]
        row += [
            f"{run.parameters / 1e6:,.1f}",
            f"{run.updates:,}",
            f"{run.tokens / 1e9:,.2f}",
            digits(run.operations, 1e18),
        ]
        row += [
            f"{run.operations / 100e12 / 3600:,.0f}" if run.operations > 1e18 else digits(run.operations / 100e12, 3600)
        ]
        for name in machines:
            cells = [hours(run, content) for content in found.values() if machine_of(content) == name]
            row.append(next((cell for cell in cells if cell != "–"), "–"))
        if content:
            row.append(counted_hours(run, content))
        rows.append(row)
        previous = task
    headers = ["configuration", "training data", "parameters, M", "updates", "tokens, billion", "10¹⁸ operations"]
    headers += ["hours at 100 TFLOP/s", *(f"hours, {name}" for name in machines)]
    if content:
        headers.append("hours, counted, one H100")
    sources = [
        f"- `{name}`: {machine_of(content)}, torch {content['machine']['versions']['torch']}, "
        f"batches of {content['data'].removeprefix('random, ').removesuffix(' tokens')} random tokens; tokens/s: "
        + ", ".join(f"{system} {values['tokens_per_s']:,.0f}" for system, values in content["systems"].items())
        for name, content in found.items()
    ]
    gpu = any("gpu" in content["machine"] for content in found.values())
    return TEXT.format(
        table=table(headers, rows),
        sources="\n".join(sources) or "- none",
        gpu="" if gpu else NO_GPU,
        counted=COUNTED if content else "",
    )


NO_GPU = """
**No GPU has been measured**, so this page has no GPU-hours. *Hours at 100 TFLOP/s* only gives a scale: the time of one
device that computes the matrix products at that sustained rate and does nothing else. `benchmarks/gpu_fairseq.sh`
measures the tokens per second of these models; with its results in `benchmarks/results`, this page gets a column of
hours.
"""

COUNTED = """- *Counted*: not measured. Batches of 16,384 tokens; for each the sum of its matrix products with attention
  and convolutions, the bytes of everything else, and 10 µs of the host per launch, as if nothing overlapped, with an
  update after every batch (`python -m benchmarks.counting`; `counted_steps.json`). The hours measured on that GPU are
  with such batches too, but with an update after each.
"""

TEXT = """# Cost of the rows that were not run

Each row below is one command, `lightconv reproduce TASK/SYSTEM --seeds 1 2 3`. It prepares the data, trains every seed,
tunes the number of averaged checkpoints and the length penalty on the validation set, and scores the test set.
**None of these rows has been run to the end.** The figures are for the training of one seed. What was run is in
RESULTS.md.
{gpu}
{table}

- *Training data*: after preparation.
- *Tokens*: updates × tokens per update (max_tokens × update_freq of the configuration), padding included.
- *Operations*: 6 × parameters × tokens. This is an upper bound, because embeddings that are only looked up count too.
{counted}- A dash: not measured at this size.

The measurements are one training step of fairseq's Trainer (`python -m benchmarks.training`):

{sources}

This page is written by `python -m benchmarks.pages`.
"""
