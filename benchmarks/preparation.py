"""The cost of preparing a large corpus: `lightconv prepare parallel` on synthetic text, step by step.

    python -m benchmarks.preparation --pairs 2000000 --json benchmarks/results/cpu_preparation.json

The text is similar to WMT's: about 25 words per sentence, word frequencies by Zipf's law, hundreds of thousands of
different words. It is meaningless, which does not affect the cost. For each step: seconds as printed by the command,
processor time of all its processes, and their total resident memory, sampled ten times a second. For a machine with
more or fewer cores, only the parallel steps scale.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks import machine, report
from benchmarks.report import BenchmarkError
from lightconv_plugin.cgroups import cores

_BEGUN = re.compile(r"(.+?)(?: again.*)? \.\.\.$")
_DONE = re.compile(r"(.+): ([\d.]+) s$")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SYLLABLES = 300
_SENTENCES = 10_000  # generated at a time


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    result.add_argument("--pairs", type=machine.positive, default=2_000_000)
    result.add_argument("--types", type=machine.positive, default=400_000, help="different words of a language")
    result.add_argument("--bpe", type=machine.positive, default=32_000, help="merges")
    result.add_argument("--workers", type=machine.positive, default=cores())
    result.add_argument(
        "--folder",
        type=Path,
        help="where a temporary folder is made for the text and what becomes of it",
    )
    result.add_argument("--json", type=machine.json_file, metavar="FILE")
    return result


def words(types: int, random: np.random.Generator) -> np.ndarray:
    """Different words; frequent ones are shorter."""
    consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
    syllables = [c + v + e for c in consonants for v in vowels for e in ("", "n", "r", "st")][:_SYLLABLES]
    made: dict[str, None] = {}
    while len(made) < types:
        count = 1 + int(np.log1p(len(made)) / 4)
        made["".join(syllables[i] for i in random.integers(0, len(syllables), count + random.integers(0, 2)))] = None
    return np.array(list(made), dtype=object)


def write_text(path: Path, pairs: int, types: int, seed: int) -> None:
    """Write one language's side: `pairs` lines."""
    random = np.random.default_rng(seed)
    vocabulary = words(types, random)
    likely = np.cumsum(1 / np.arange(1, types + 1))
    lengths = np.random.default_rng(0)  # the same for both sides
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, pairs, _SENTENCES):
            count = min(_SENTENCES, pairs - first)
            sizes = np.clip(lengths.lognormal(3.05, 0.55, count), 2, 120).astype(int)
            drawn = vocabulary[np.searchsorted(likely, random.random(sizes.sum()) * likely[-1])]
            ends = np.cumsum(sizes)
            for end, size in zip(ends, sizes, strict=True):
                sentence = drawn[end - size : end]
                middle = size // 2
                file.write(" ".join(sentence[:middle]).capitalize() + ", " + " ".join(sentence[middle:]) + ".\n")


@dataclass
class Step:
    """The cost of one step. processor_s: total of all processes."""

    title: str
    seconds: float
    processor_s: float
    peak_bytes: int


class Watch(threading.Thread):
    """Samples the processes of a session: their total memory and processor time."""

    def __init__(self, session: int) -> None:
        super().__init__(daemon=True)
        self.session = session
        self.peak = 0
        self.processor = 0.0
        self.over = threading.Event()

    def run(self) -> None:
        had: dict[int, float] = {}  # by process, including those that have ended
        while not self.over.wait(0.1):
            memory = 0
            for entry in Path("/proc").iterdir():
                if not entry.name.isdigit():
                    continue
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:  # the process has ended
                    continue
                if int(fields[3]) == self.session:
                    memory += int(fields[21]) * _PAGE
                    had[int(entry.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
            self.peak = max(self.peak, memory)
            self.processor = sum(had.values())


def measure(folder: Path, arguments: list[str]) -> list[Step]:
    """Run `lightconv prepare` with these arguments; returns the cost of each step.

    Raises:
        BenchmarkError: it failed; the message has its last lines.
    """
    command = [sys.executable, "-m", "lightconv_plugin", "prepare", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True)
    watch = Watch(process.pid)
    watch.start()
    steps, lines, before = [], [], 0.0
    with process:
        for line in process.stderr:
            lines.append(line.strip())
            text = lines[-1].rpartition("\r")[2]
            if _BEGUN.fullmatch(text):
                print(text, file=sys.stderr, flush=True)
                watch.peak, before = 0, watch.processor
            elif done := _DONE.fullmatch(text):
                time.sleep(0.15)  # for one more sample
                steps.append(Step(done[1], float(done[2]), round(watch.processor - before, 1), watch.peak))
    watch.over.set()
    if process.returncode:
        raise BenchmarkError("lightconv prepare failed: " + " / ".join(lines[-3:]))
    return steps


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if not Path("/proc/self/stat").exists():
        raise BenchmarkError("memory and processor time are read from /proc, which this system does not have")
    about = machine.describe(torch.device("cpu"))
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        raw = folder / "raw"
        raw.mkdir()
        for number, lang in enumerate(("en", "de")):
            write_text(raw / f"train.{lang}", options.pairs, options.types, number)
        size = sum(path.stat().st_size for path in raw.iterdir())
        arguments = ["parallel", "--data", str(raw), "--out", str(folder / "out"), "--src", "en", "--tgt", "de"]
        arguments += ["--valid-lines", "1000", "--test-lines", "1000", "--bpe", str(options.bpe)]
        steps = measure(folder, [*arguments, "--workers", str(options.workers)])
    rows = [
        [
            step.title,
            f"{step.seconds:.1f}",
            f"{step.processor_s / max(step.seconds, 0.1):.1f}",
            f"{step.peak_bytes / 2**20:.0f}",
        ]
        for step in steps
    ]
    print(f"{options.pairs:,} pairs, {size / 1e6:.0f} MB, {options.workers} processes\n")
    print(report.table(["step", "seconds", "cores busy", "peak memory, MiB"], rows))
    if options.json:
        result = {
            "benchmark": "preparation",
            "machine": about,
            "pairs": options.pairs,
            "bytes": size,
            "types": options.types,
            "merges": options.bpe,
            "workers": options.workers,
            "steps": [vars(step) for step in steps],
        }
        report.write_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(report.run(main))
