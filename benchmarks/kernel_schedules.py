"""Which kernel size for which layer? A search by successive halving, at equal parameters.

    python -m benchmarks.kernel_schedules multi30k_en_de/ablation/dynamic --data DATA_BIN --folder DIR --json FILE

The sizes of all layers of a side add up to what they do in CONFIG, so that all models have the same number of
parameters. The first schedules are those of CONFIG, both sides falling instead of rising, and as even as odd sizes
allow; the others are drawn at random, for both sides alike or not. All are trained for `--updates`, on the learning
rate schedule of CONFIG; the half with the lower validation loss is trained on to twice as many, and so on; the best
two, to the end of CONFIG's schedule. Rerun the same command to resume. What follows -- are overrides for all.

That a schedule wins says little: their losses are close, and another seed may exchange them. Train the winner and its
rivals with several seeds to know.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks import machine, report
from benchmarks.recipes import quoted, require_data_bin, with_overrides
from benchmarks.report import BenchmarkError
from lightconv_plugin.records.file import read_folder
from lightconv_plugin.records.trainings import trainings

Sizes = tuple[int, ...]
Schedule = tuple[Sizes, Sizes]
"""The kernel sizes of the encoder layers and of the decoder layers."""
_SIDES = ("encoder", "decoder")
_LARGEST = 31


def parser() -> argparse.ArgumentParser:
    result = report.parser("kernel_schedules", __doc__)
    result.add_argument("config", metavar="CONFIG", help="name of a translation model's configuration")
    result.add_argument("--data", type=Path, required=True, metavar="DATA_BIN", help="its prepared data")
    result.add_argument("--folder", type=Path, required=True, metavar="DIR", help="keeps the trainings")
    result.add_argument("--schedules", type=machine.positive, default=8, metavar="N", help="default: %(default)s")
    result.add_argument("--updates", type=machine.positive, default=500, metavar="N", help="default: %(default)s")
    result.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of draws and trainings (default: %(default)s)"
    )
    result.add_argument("--json", type=machine.json_file, metavar="FILE", help="write all losses to FILE")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Search, print a table and write the JSON; BenchmarkError for wrong options and failed trainings."""
    options, overrides = with_overrides(parser(), arguments)
    require_data_bin(options.data)
    settings = configuration(options.config)
    last = settings["optimization"]["max_update"]
    if options.updates > last:
        raise BenchmarkError(f"--updates {options.updates} is more than the {last} of {options.config}")
    wanted = schedules(of_model(settings["model"], options.config), options.schedules, options.seed)
    options.folder.mkdir(parents=True, exist_ok=True)
    trials = [Trial(schedule, options, overrides) for schedule in wanted]
    description = machine.describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    halve(trials, options.updates, last)
    print(_table(trials))
    if options.json:
        content = {
            "benchmark": "kernel_schedules",
            "machine": description,
            "config": options.config,
            "seed": options.seed,
            "overrides": overrides,
            "schedules": [trial.as_json() for trial in by_loss(trials)],
        }
        report.write_json(options.json, content)


def configuration(name: str) -> dict[str, Any]:
    """What a configuration says. BenchmarkError if there is none of this name."""
    path = machine.ROOT / "configs" / f"{name}.yaml"
    if not path.is_file():
        raise BenchmarkError(f"CONFIG: there is no configuration {name}: {path} is missing")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def of_model(model: dict[str, Any], name: str) -> Schedule:
    """The schedule of a configuration. BenchmarkError if its layers have no odd sizes, from 3, of their own."""
    found = []
    for side in _SIDES:
        sizes = tuple(model.get(f"{side}_kernel_size_list", ()))
        if len(sizes) != model.get(f"{side}_layers") or not all(size % 2 and size >= 3 for size in sizes):
            raise BenchmarkError(
                f"CONFIG: {name} must have an odd {side}_kernel_size_list entry of at least 3 for each layer, "
                f"got {list(sizes)}"
            )
        found.append(sizes)
    return found[0], found[1]


def schedules(first: Schedule, number: int, seed: int) -> list[Schedule]:
    """`number` different schedules with the sums of `first`: itself, falling, even, then random ones."""
    found = dict.fromkeys([first, *_named(first)])
    draws = random.Random(seed)
    for _ in range(1000 * number):
        if len(found) >= number:
            return list(found)[:number]
        found[_drawn(first, draws)] = None
    raise BenchmarkError(f"--schedules: only {len(found)} schedules have the sizes' sums, got {number}")


def _named(first: Schedule) -> Iterator[Schedule]:
    encoder, decoder = first
    yield tuple(sorted(encoder, reverse=True)), tuple(sorted(decoder, reverse=True))
    yield _even(encoder), _even(decoder)


def _even(sizes: Sizes) -> Sizes:
    """Odd sizes that differ by at most 2, with the same sum, the smaller ones first."""
    pairs, layers = (sum(sizes) - len(sizes)) // 2, len(sizes)
    return tuple(1 + 2 * ((pairs + layer) // layers) for layer in range(layers))


def _drawn(first: Schedule, draws: random.Random) -> Schedule:
    """In half of all draws, both sides have the same sizes, if they can."""
    encoder, decoder = (_random(sizes, draws) for sizes in first)
    alike = len(encoder) == len(decoder) and sum(encoder) == sum(decoder)
    return encoder, encoder if alike and draws.random() < 0.5 else decoder


def _random(sizes: Sizes, draws: random.Random) -> Sizes:
    """Odd sizes of 3 to 31, or to the largest of `sizes`, with the same sum: pairs of taps go to random layers."""
    most = (max(_LARGEST, *sizes) - 1) // 2
    pairs = [1] * len(sizes)
    weights = [draws.random() ** 2 for _ in sizes]
    for _ in range((sum(sizes) - 3 * len(sizes)) // 2):
        open_layers = [layer for layer, size in enumerate(pairs) if size < most]
        [layer] = draws.choices(open_layers, [weights[layer] for layer in open_layers])
        pairs[layer] += 1
    return tuple(1 + 2 * size for size in pairs)


class Trial:
    """One schedule and its training; `losses` are those on the validation text, by update."""

    def __init__(self, schedule: Schedule, options: argparse.Namespace, overrides: Sequence[str]) -> None:
        self.schedule, self.losses = schedule, dict[int, float]()
        self.folder = (options.folder / "-".join("_".join(map(str, sizes)) for sizes in schedule)).resolve()
        sizes = [
            f"model.{side}_kernel_size_list={json.dumps(list(known))}"
            for side, known in zip(_SIDES, schedule, strict=True)
        ]
        self.command = [sys.executable, "-m", "lightconv_plugin", "train", options.config, *sizes]
        self.command += [f"task.data={quoted(options.data.resolve())}", f"checkpoint.save_dir={quoted(self.folder)}"]
        self.command += ["checkpoint.save_interval_updates=0", f"common.seed={options.seed}", *overrides]

    @property
    def name(self) -> str:
        return named(self.schedule)

    def train(self, updates: int) -> None:
        """Train to this many updates, on from where an earlier training ended. BenchmarkError if it fails."""
        self._keep_command()
        if self._read(updates):
            return
        command = [*self.command, f"optimization.max_update={updates}"]
        with tempfile.TemporaryFile() as out:
            status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out).returncode
            out.seek(0)
            said = out.read().decode("utf-8", "replace")
        if status:
            raise BenchmarkError(f"{self.name}: training failed ({status}):\n{said[-2000:]}")
        if not self._read(updates):
            raise BenchmarkError(f"{self.name}: {self.folder} has no validation loss of update {updates}")

    def _keep_command(self) -> None:
        """BenchmarkError if the folder has a training with another seed, configuration, text or other overrides."""
        file, command = self.folder.with_name(f"{self.folder.name}.json"), self.command[1:]
        if not file.exists():
            report.write_json(file, {"command": command})
        elif json.loads(file.read_text(encoding="utf-8"))["command"] != command:
            raise BenchmarkError(f"--folder: {self.folder} was trained by another command: see {file}")

    def _read(self, updates: int) -> bool:
        """Whether the training has a loss of this update."""
        known = trainings(read_folder(self.folder).records)
        for record in known[-1].part("valid") if known else ():
            if record.update == updates and "loss" in record.values:
                self.losses[updates] = record.values["loss"]
        return updates in self.losses

    def as_json(self) -> dict[str, Any]:
        encoder, decoder = self.schedule
        return {"encoder": list(encoder), "decoder": list(decoder), "valid_loss": self.losses}


def named(schedule: Schedule) -> str:
    """As in the table: 3,7,15,31, or both sides if they differ."""
    encoder, decoder = (",".join(map(str, sizes)) for sizes in schedule)
    return encoder if encoder == decoder else f"{encoder} / {decoder}"


def halve(trials: Sequence[Trial], updates: int, last: int) -> None:
    """Train all; train the better half on to twice as many updates, and so on; two at least to the `last` update."""
    left = list(trials)
    while True:
        for trial in left:
            trial.train(updates)
            print(f"{trial.name}: update {updates}, validation loss {trial.losses[updates]:.3f}", flush=True)
        if updates == last:
            return
        left = by_loss(left)[: max(2, len(left) // 2)]
        updates = last if len(left) == 2 else min(2 * updates, last)


def by_loss(trials: Sequence[Trial]) -> list[Trial]:
    """Those that were trained longest first, and of those the lowest loss."""

    def key(trial: Trial) -> tuple[int, float]:
        longest = max(trial.losses)
        return -longest, trial.losses[longest]

    return sorted(trials, key=key)


def _table(trials: Sequence[Trial]) -> str:
    updates = sorted({update for trial in trials for update in trial.losses})
    rows = [
        [trial.name, *(f"{trial.losses[update]:.3f}" if update in trial.losses else "" for update in updates)]
        for trial in by_loss(trials)
    ]
    return report.table(["kernel sizes, encoder / decoder", *(f"update {update}" for update in updates)], rows)


if __name__ == "__main__":
    sys.exit(report.run(main))
