"""Trainings from records: curves, time, speed and hardware.

A resumed training restarts at its checkpoint's update: statistics beyond it are dropped, since those updates were lost.
Each start at update 0 is a training of its own.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Parts of training statistics; all others are names of validation subsets.
IN_EPOCH, PER_EPOCH = "train/inner", "train/epoch"


@dataclass
class Record:
    """The statistics of one moment, under fairseq's names."""

    update: int
    epoch: int
    values: dict[str, float]
    part: str = IN_EPOCH


@dataclass
class Stretch:
    """One start of the command: its record, and its statistics that are still valid."""

    head: dict[str, Any]
    records: list[Record] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The update that it resumed from."""
        return self.head.get("update", 0)

    def of(self, *parts: str) -> list[Record]:
        return [record for record in self.records if record.part in parts]


@dataclass
class Training:
    """One training: all its stretches that have statistics."""

    stretches: list[Stretch] = field(default_factory=list)

    def known(self, name: str) -> Any:
        """The last value that a start has under this name; None if none has."""
        values = (stretch.head.get(name) for stretch in reversed(self.stretches))
        return next((value for value in values if value is not None), None)

    @property
    def parameters(self) -> int | None:
        return self.known("parameters")

    @property
    def sentences(self) -> dict[str, int]:
        """The number of sentences of each subset that was loaded."""
        texts = {name: n for stretch in self.stretches for name, n in stretch.head.get("texts", {}).items()}
        return {name.split(".")[0]: number for name, number in texts.items()}

    @property
    def devices(self) -> list[str]:
        """Descriptions of the hardware; several if it was resumed on another kind of machine."""
        return list(dict.fromkeys(filter(None, (_device(stretch.head) for stretch in self.stretches))))

    def part(self, name: str) -> list[Record]:
        """The statistics of a part or a validation subset, by update."""
        return sorted((r for stretch in self.stretches for r in stretch.of(name)), key=lambda record: record.update)

    @property
    def train(self) -> list[Record]:
        """The training statistics: those within epochs, or the epoch means if there are none."""
        return self.part(IN_EPOCH) or self.part(PER_EPOCH)

    @property
    def subsets(self) -> list[str]:
        """Names of the validation subsets, in the order of the records."""
        parts = dict.fromkeys(record.part for stretch in self.stretches for record in stretch.records)
        return [part for part in parts if part not in (IN_EPOCH, PER_EPOCH)]

    @property
    def updates(self) -> int:
        """The last update that has statistics."""
        return max((record.update for stretch in self.stretches for record in stretch.records), default=0)

    @property
    def seconds(self) -> float | None:
        """Time of the updates that count, including validation: the sum of the last `wall` of each stretch.

        None if it is not known: in a stretch that was resumed by stock fairseq, `wall` is 0 throughout.
        """
        longest = []
        for stretch in self.stretches:
            walls = [r.values["wall"] for r in stretch.of(IN_EPOCH, PER_EPOCH) if "wall" in r.values]
            if walls and stretch.start and not any(walls):
                return None
            longest += [max(walls)] if walls else []
        return sum(longest) if longest else None

    @property
    def tokens_per_second(self) -> float | None:
        """Target tokens per second of training: all tokens divided by the total time."""
        tokens = seconds = 0.0
        for stretch in self.stretches:
            before = stretch.start
            for record in stretch.of(IN_EPOCH) or stretch.of(PER_EPOCH):
                speed, batch = record.values.get("wps", 0), record.values.get("wpb", 0)
                if speed > 0:
                    tokens += batch * (record.update - before)
                    seconds += batch * (record.update - before) / speed
                before = record.update
        return tokens / seconds if seconds else None

    def per_epoch(self, name: str) -> list[float]:
        """A statistic of every finished epoch; an epoch that was interrupted and repeated counts once."""
        values = {record.epoch: record.values.get(name) for record in self.part(PER_EPOCH)}
        return [value for value in values.values() if value is not None]

    @property
    def epoch_speed(self) -> float | None:
        """Target tokens per second, mean over epochs: the speed in rows of results."""
        return statistics.fmean(speeds) if (speeds := self.per_epoch("wps")) else None

    @property
    def update_seconds(self) -> float | None:
        """Time spent in updates, over all epochs: the time in rows of results."""
        return sum(seconds) if (seconds := self.per_epoch("train_wall")) else None


def trainings(records: Iterable[dict[str, Any]]) -> list[Training]:
    """The trainings in some records, in their order. A start without statistics leaves no trace."""
    found: list[Training] = []
    head: dict[str, Any] | None = {}
    for record in records:
        if record["record"] == "start":
            head = dict(record)
        elif record["record"] == "operators":
            (head if head is not None else found[-1].stretches[-1].head)["backend"] = record["backend"]
        elif record["record"] == "statistics":
            if head is not None:
                _start(found, head)
                head = None
            values = (record["update"], record["epoch"], record["values"], record["part"])
            found[-1].stretches[-1].records.append(Record(*values))
    return found


def _start(found: list[Training], head: dict[str, Any]) -> None:
    stretch = Stretch(head)
    if not found or stretch.start == 0:
        found.append(Training())
    for earlier in found[-1].stretches:
        earlier.records = [record for record in earlier.records if record.update <= stretch.start]
    found[-1].stretches.append(stretch)


def last_start(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record of the last start; empty if there is none."""
    return next((record for record in reversed(records) if record["record"] == "start"), {})


def is_finished(records: Sequence[dict[str, Any]]) -> bool:
    """Whether the last start came to an end without an error."""
    last = next((record for record in reversed(records) if record["record"] in ("start", "end")), None)
    return last is not None and last["record"] == "end" and "error" not in last


def _device(head: dict[str, Any]) -> str:
    """A description of the hardware of a start; "" if it is not known."""
    processes, threads, backend = (head.get(name) for name in ("processes", "threads", "backend"))
    if gpus := Counter(head.get("gpus", ())):
        text = ", ".join(f"{number} × {name}" for name, number in gpus.items())
    elif processes:
        kind = "GPU" if backend == "cuda" else "CPU"
        text = f"1 process on a {kind}" if processes == 1 else f"{processes} processes on {kind}s"
        if threads:
            text += f", {threads} thread{'s' * (threads != 1)}{' each' * (processes != 1)}"
    else:
        return ""
    return f"{text}; operators: {backend} backend" if backend else text
