"""The targets of this project, and their status according to benchmarks/results/: reached, missed or not measured.

    python -m benchmarks.targets [FOLDER]

Every *.json in the folder is read, including the collected results of gpu.sh and gpu_fairseq.sh. A result is matched
with a target by what was measured (program, type, sizes, device), not by its file name. Runs with --quick do not count;
if several results match, the newest counts. For a target with several cases, the worst one counts and is printed. Cases
without the peer to compare with are left out; if none remain, the target counts as not measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.figures import (
    OURS,
    Figure,
    Measure,
    Result,
    against,
    bandwidth,
    growth,
    median,
    over_floor,
    peak_share,
    read,
    systems,
)

DYNAMIC, TRANSFORMER = "DynamicConv (ours)", "fairseq Transformer"
CTRANSLATE2 = "CTranslate2 Transformer"
REACHED, MISSED, UNKNOWN = "reached", "missed", "not measured"
# With linear growth, time and memory are constant from T = 1024 to 65,536 at equal numbers of tokens; this allows for
# noise.
_GROWTH = 1.25


@dataclass(frozen=True)
class Target:
    """`measure` returns the figures of one result (none if it does not match); each must reach `limit`.

    at_most: the figures must not exceed the limit; otherwise they must not fall below it.
    """

    name: str
    text: str
    limit: float
    measure: Measure
    at_most: bool = False

    def reached(self, figure: Figure) -> bool:
        return figure.value <= self.limit if self.at_most else figure.value >= self.limit

    def worst(self, figures: Iterable[Figure]) -> Figure:
        return (max if self.at_most else min)(figures, key=lambda figure: figure.value)


@dataclass(frozen=True)
class Verdict:
    target: Target
    status: str
    figure: Figure | None = None
    result: Result | None = None


_FAIRSEQ_PATHS = ("fairseq band", "fairseq unfold")
_CPU = {"gpu": False, "dtype": "float32"}
_IWSLT = {"ours": DYNAMIC, "preset": "iwslt_de_en", **_CPU}
_IN_INT8 = _IWSLT | {"ours": f"{DYNAMIC}, int8"}
_BATCH, _ALONE = {"beam": 5, "sentences": 32}, {"beam": 5, "sentences": 1}
_BIG = {"ours": DYNAMIC, "gpu": True, "dtype": "bfloat16", "preset": "wmt_en_de_big"}
_SHORT = {"operators": ("dynamicconv",), "gpu": True, "dtype": "bfloat16"}
_ATTENTION = {"peers": ["attention (flash)"], "passes": ["forward", "both"], "gpu": True, "dtype": "bfloat16"}


def _is_short(case: dict) -> bool:
    sizes = (case["batch"], case["steps"], case["channels"], case["kernel_size"])
    return case["causal"] and case["normalize"] == "none" and sizes == (4, 4096, 2048, 4)


TARGETS = (
    Target("CPU operators, forward + backward", "≤ 2 × the floor", 2, over_floor, at_most=True),
    Target(
        "CPU operators, forward + backward",
        "≥ 3 × fairseq's better path, T ≤ 128",
        3,
        against(_FAIRSEQ_PATHS, ["both"], keep=lambda case: case["steps"] <= 128, **_CPU),
    ),
    Target(
        "CPU operators, forward + backward",
        "≥ 20 × fairseq's better path, T = 512",
        20,
        against(_FAIRSEQ_PATHS, ["both"], keep=lambda case: case["steps"] == 512, **_CPU),
    ),
    Target(
        "CPU operators, forward + backward",
        "≥ 100 × the path that fairseq's dynamic models take",
        100,
        against(_FAIRSEQ_PATHS[1:], ["both"], operators=("dynamicconv",), **_CPU),
    ),
    Target(
        "CPU training step, DynamicConv, float32",
        "≥ 2.2 × fairseq's DynamicConv",
        2.2,
        systems("training", "tokens_per_s", "fairseq DynamicConv", **_IWSLT),
    ),
    Target(
        "CPU training step, DynamicConv, float32",
        "≥ 1.15 × fairseq's Transformer",
        1.15,
        systems("training", "tokens_per_s", TRANSFORMER, **_IWSLT),
    ),
    Target(
        "CPU generation, beam 5, 32 sentences",
        "≥ 2 × fairseq's Transformer",
        2,
        systems("generation", "sentences_per_s", TRANSFORMER, **_IWSLT, **_BATCH),
    ),
    Target(
        "CPU generation, beam 5, 32 sentences, float32",
        "≥ 1.3 × CTranslate2's Transformer",
        1.3,
        systems("generation", "sentences_per_s", f"{CTRANSLATE2}, float32", **_IWSLT, **_BATCH),
    ),
    Target(
        "CPU generation, beam 5, 32 sentences, int8",
        "≥ 1.3 × CTranslate2's Transformer",
        1.3,
        systems("generation", "sentences_per_s", f"{CTRANSLATE2}, int8", **_IN_INT8, **_BATCH),
    ),
    Target(
        "CPU generation, one sentence, float32",
        "no slower than CTranslate2's Transformer",
        1,
        systems("generation", "sentences_per_s", f"{CTRANSLATE2}, float32", **_IWSLT, **_ALONE),
    ),
    Target(
        "CPU generation, one sentence, int8",
        "no slower than CTranslate2's Transformer",
        1,
        systems("generation", "sentences_per_s", f"{CTRANSLATE2}, int8", **_IN_INT8, **_ALONE),
    ),
    Target(
        "GPU lightconv, bfloat16, T·B·C ≥ 64M, forward and backward",
        "≥ 80 % of the copy's bandwidth",
        0.80,
        bandwidth("lightconv", float("inf")),
    ),
    Target(
        "GPU dynamicconv, K ≤ 31, bfloat16, T·B·C ≥ 64M, forward and backward",
        "≥ 65 % of the copy's bandwidth",
        0.65,
        bandwidth("dynamicconv", 31),
    ),
    Target(
        "GPU against fairseq's CUDA layers, float16",
        "≥ 4 × as fast, forward + backward",
        4,
        against(["fairseq CUDA"], ["both"], gpu=True, dtype="float16"),
    ),
    Target("GPU against fairseq's CUDA layers, float16", "peak memory ≤ 50 %", 0.5, peak_share, at_most=True),
    Target(
        "GPU against attention (flash), bfloat16",
        "faster at every T ≥ 64",
        1,
        against(keep=lambda case: case["steps"] >= 64, **_ATTENTION),
    ),
    Target(
        "GPU against attention (flash), bfloat16",
        "≥ 10 × as fast at T = 8192",
        10,
        against(
            keep=lambda case: case["steps"] == 8192,
            **_ATTENTION,
        ),
    ),
    Target(
        "GPU dynamicconv, K = 4, T 4096, B 4, C 2048, bfloat16",
        "≥ 1.2 × dynamic-conv1d",
        1.2,
        against(["dynamic-conv1d"], ["forward", "both"], keep=_is_short, **_SHORT),
    ),
    Target(
        "GPU dynamicconv, K = 4, T 4096, B 4, C 2048, bfloat16",
        "≥ 2 × Jet-Nemotron",
        2,
        against(["Jet-Nemotron"], ["forward", "both"], keep=_is_short, **_SHORT),
    ),
    Target(
        "GPU training, wmt_en_de_big, bfloat16",
        "≥ 1.3 × fairseq's Transformer",
        1.3,
        systems("training", "tokens_per_s", TRANSFORMER, **_BIG),
    ),
    Target(
        "GPU generation, wmt_en_de_big, beam 4, 256 sentences",
        "≥ 2 × fairseq's Transformer",
        2,
        systems("generation", "sentences_per_s", TRANSFORMER, beam=4, sentences=256, **_BIG),
    ),
    Target(
        "GPU growth from T = 1024 to 65,536 at as many tokens",
        f"time ≤ {_GROWTH} ×",
        _GROWTH,
        growth(lambda case: median(case, OURS, "both"), "time"),
        at_most=True,
    ),
    Target(
        "GPU growth from T = 1024 to 65,536 at as many tokens",
        f"peak memory ≤ {_GROWTH} ×",
        _GROWTH,
        growth(lambda case: case["candidates"].get(OURS, {}).get("peak_bytes"), "memory"),
        at_most=True,
    ),
)


# ------------------------------------------------------------------------------------------------ reading, printing


def judge(target: Target, results: list[Result]) -> Verdict:
    """The verdict by the newest matching result, together with all other matching results in its file."""
    serving = [(result, figures) for result in results if (figures := list(target.measure(result)))]
    if not serving:
        return Verdict(target, UNKNOWN)
    youngest = max(serving, key=lambda pair: pair[0].date)[0]
    # A run of gpu.sh spreads a target's cases over several programs.
    pairs = [(figure, result) for result, figures in serving if result.file == youngest.file for figure in figures]
    worst = target.worst(figure for figure, _ in pairs)
    result = next(result for figure, result in pairs if figure == worst)
    return Verdict(target, REACHED if target.reached(worst) else MISSED, worst, result)


def rows(verdicts: Iterable[Verdict]) -> list[list[str]]:
    found = []
    for verdict in verdicts:
        figure, source = ("–", "–"), ""
        if verdict.figure is not None:
            figure = (report.digits(verdict.figure.value), verdict.figure.of)
            source = f"{verdict.result.file}, {verdict.result.date[:10]}"
        found.append([verdict.target.name, verdict.target.text, verdict.status, figure[0], figure[1], source or "–"])
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the table; BenchmarkError for a folder that cannot be read."""
    parser = report.parser("targets", __doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=report.RESULTS, help="default: benchmarks/results")
    options = parser.parse_args(arguments)
    results = read(options.folder)
    verdicts = [judge(target, results) for target in TARGETS]
    print(report.table(["", "target", "", "worst", "at", "from"], rows(verdicts)))
    counts = {status: sum(v.status == status for v in verdicts) for status in (REACHED, MISSED, UNKNOWN)}
    print("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()))


if __name__ == "__main__":
    sys.exit(report.run(main))
