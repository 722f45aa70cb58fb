"""The records of a training that has only a log: of fairseq-train and fairseq-hydra-train, or of an earlier version.

fairseq's formats `simple` and `json` and the epoch summaries of `tqdm` are supported, with the prefix of either command
or none. Nothing else reads fairseq's log.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

from lightconv_plugin.records.trainings import IN_EPOCH, PER_EPOCH

# "epoch 003:     12 / 124 loss=6.668, …, num_updates=260"   "epoch 003 | loss 6.362 | … | num_updates 372"
_INNER = re.compile(r"epoch (\d+):\s+\d+ / \d+ (.*)")
_EPOCH = re.compile(r"epoch (\d+) \| (?:valid on '([^']+)' subset \| )?(.*)")
_PAIR = re.compile(r"(\w+)=([^,\s]+)")
_JSON = re.compile(r"(\w+)\W+(?:\[INFO\] - )?(\{\"epoch\": .*)")
_SETTINGS = re.compile(r"fairseq_cli\.train(?:\]\[INFO\] -| \|) \{")
# What the log says about a start, once or, with a name, several times.
_FACTS = {
    "threads": re.compile(r"\(\d+ × (?P<value>\d+) threads\)"),
    "dictionaries": re.compile(r"(?:^| )(?:\[(?P<name>\w+)\] )?dictionary: (?P<value>[\d,]+) types"),
    "parameters": re.compile(r"num\. (?:shared )?model params: (?P<value>[\d,]+)"),
    "texts": re.compile(r"loaded (?P<value>[\d,]+) examples from: ?(?:.*[/\\])?(?P<name>[^/\\]+?)\s*$"),
    "processes": re.compile(r"training on (?P<value>\d+) devices"),
    "update": re.compile(r"loaded checkpoint \S.* \(epoch \d+ @ (?P<value>\d+) updates\)", re.IGNORECASE),
    "gpus": re.compile(r"rank\s+(?P<name>\d+): capabilities.*; name = (?P<value>.+?)\s*$"),
}
_BACKEND = re.compile(r"operators on \w+ tensors: backend (\w+)")
_END = re.compile(r"done training in [\d.]+ seconds")


def records_of_log(text: str) -> tuple[list[dict[str, Any]], int]:
    """(the records of a training's log, the number of truncated statistics)."""
    reader = _Reader()
    # A line without a line feed is truncated: its last number may have lost digits.
    *lines, rest = text.split("\n")
    for line in lines:
        # A progress bar rewrites its line, so only the text after the last carriage return counts.
        reader.read(line.rstrip("\r").rpartition("\r")[2])
    reader.finish()
    return reader.records, reader.broken + any(pattern.search(rest) for pattern in (_JSON, _INNER, _EPOCH))


class _Reader:
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.broken = 0
        self._starting = True  # a start has begun, but its first statistics are not known yet
        self._head: dict[str, Any] = {}
        self._last = 0  # the last update of the training

    def read(self, line: str) -> None:
        if _SETTINGS.search(line):
            self._begin()
        for key, pattern in _FACTS.items():
            if match := pattern.search(line):
                return self._fact(key, match)
        if match := _BACKEND.search(line):
            self._head["backend"] = match[1]
        elif match := _JSON.search(line):
            self._json(match[1], match[2])
        elif match := _INNER.search(line):
            self._statistics(IN_EPOCH, int(match[1]), _PAIR.findall(match[2]))
        elif match := _EPOCH.search(line):
            pairs = [part.rsplit(" ", 1) for part in match[3].split(" | ")]
            self._statistics(match[2] or PER_EPOCH, int(match[1]), [pair for pair in pairs if len(pair) == 2])
        elif _END.search(line):
            self.finish()
            self.records.append({"record": "end"})

    def finish(self) -> None:
        """Add a start that has no statistics."""
        if self._starting and self._head:
            self._start(self._head.get("update", 0))

    def _begin(self) -> None:
        """A start, and the end of one without statistics."""
        self._starting = True
        # Processes that die are restarted with the same number of threads.
        self._head = {"record": "start"} | {k: v for k, v in self._head.items() if k == "threads"}

    def _fact(self, key: str, match: re.Match) -> None:
        if key == "parameters" and key in self._head:  # a log without settings
            self._begin()
        self._starting |= key in ("parameters", "update")
        value = match["value"] if key == "gpus" else int(match["value"].replace(",", ""))
        if "name" in match.re.groupindex:
            self._head.setdefault(key, {})[match["name"] or ""] = value
        else:
            self._head[key] = value

    def _json(self, tag: str, text: str) -> None:
        try:
            stats = json.loads(text)
        except ValueError:
            self.broken += 1
            return
        epoch = int(stats.pop("epoch"))
        stats.pop("update", None)
        inner = tag == "train_inner" or "num_updates" in stats
        # The keys of epoch records have the subset as prefix: train_loss, valid_loss.
        subset = next((key.removesuffix("_num_updates") for key in stats if key.endswith("_num_updates")), tag)
        pairs = [(key if inner else key.removeprefix(f"{subset}_"), value) for key, value in stats.items()]
        self._statistics(IN_EPOCH if inner else PER_EPOCH if subset == "train" else subset, epoch, pairs)

    def _statistics(self, part: str, epoch: int, pairs: Iterable[Any]) -> None:
        values = numbers(pairs)
        update = values.pop("num_updates", math.nan)
        if math.isnan(update):
            self.broken += bool(values)
            return
        before = 0 if epoch <= 1 else int(update) - 1
        if self._starting:
            self._start(self._head.get("update", before))
        elif update < self._last:
            # A log without heads (from old fairseq, or with its beginning missing): falling updates mean a restart.
            self._head = {}
            self._start(before)
        statistics = {"part": part, "epoch": epoch, "update": int(update), "values": values}
        self.records.append({"record": "statistics", **statistics})
        self._last = int(update)

    def _start(self, update: int) -> None:
        head = {"record": "start"} | self._head | {"update": update}
        if "gpus" in head:
            head["gpus"] = [head["gpus"][rank] for rank in sorted(head["gpus"], key=int)]
        self.records.append(head)
        self._begin()
        self._starting = False


def numbers(pairs: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Those pairs whose values are numbers."""
    found = {}
    for name, value in pairs:
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue
    return found
