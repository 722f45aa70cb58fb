"""Reads the logs of fairseq-train and fairseq-hydra-train: the curves of a training, and facts about it.

fairseq's formats `simple` and `json` and the epoch summaries of `tqdm` are supported, with the prefix of either command
or none. Every record has an update, `num_updates`. A resumed training restarts at its checkpoint's update: records
beyond it are dropped, since those updates were lost. If a log holds several trainings, each started at update 0, all of
them are returned.
"""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field

# "epoch 003:     12 / 124 loss=6.668, …, num_updates=260"   "epoch 003 | loss 6.362 | … | num_updates 372"
_INNER = re.compile(r"epoch (\d+):\s+\d+ / \d+ (.*)")
_EPOCH = re.compile(r"epoch (\d+) \| (?:valid on '([^']+)' subset \| )?(.*)")
_PAIR = re.compile(r"(\w+)=([^,\s]+)")
_JSON = re.compile(r"(\w+)\W+(?:\[INFO\] - )?(\{\"epoch\": .*)")
_LOADED = re.compile(r"loaded checkpoint \S.* \(epoch \d+ @ (\d+) updates\)", re.IGNORECASE)
_PARAMETERS = re.compile(r"num\. (?:shared )?model params: ([\d,]+)")
_EXAMPLES = re.compile(r"loaded ([\d,]+) examples from: ?(.+)$")
# The hardware and backend of a training: processes and their threads, the GPUs, the operators' backend.
_MACHINE = {
    "processes": re.compile(r"training on (\d+) devices"),
    "threads": re.compile(r"\(\d+ × (\d+) threads\)"),
    "GPU": re.compile(r"rank\s+\d+: capabilities.*; name = (.+?)\s*$"),
    "backend": re.compile(r"operators on \w+ tensors: backend (\w+)"),
}


# Names of training records; all other names are validation subsets.
_IN_EPOCH, _PER_EPOCH = "train/inner", "train/epoch"


@dataclass
class Record:
    """The statistics in one line, under fairseq's names, without the subset prefix of the json format."""

    update: int
    epoch: int
    values: dict[str, float]
    kind: str = _IN_EPOCH


@dataclass
class Stretch:
    """One start of the command: the update that it resumed from, and its statistics that are still valid."""

    start: int = 0
    records: list[Record] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Record]:
        return [record for record in self.records if record.kind in kinds]


@dataclass
class Training:
    """One training: all its stretches.

    parameters, examples: as logged; None or empty if not logged. devices: descriptions of the hardware; several if it
    was resumed on another kind of machine.
    """

    stretches: list[Stretch] = field(default_factory=list)
    parameters: int | None = None
    devices: list[str] = field(default_factory=list)
    examples: dict[str, int] = field(default_factory=dict)

    def valid(self, subset: str) -> list[Record]:
        """The records of a validation subset."""
        return sorted((r for stretch in self.stretches for r in stretch.of(subset)), key=lambda record: record.update)

    @property
    def train(self) -> list[Record]:
        """The training records: those within epochs, or the epoch means if there are none."""
        return self.valid(_IN_EPOCH) or self.valid(_PER_EPOCH)

    @property
    def subsets(self) -> list[str]:
        """Names of the validation subsets, in the order of the log."""
        kinds = dict.fromkeys(record.kind for stretch in self.stretches for record in stretch.records)
        return [kind for kind in kinds if kind not in (_IN_EPOCH, _PER_EPOCH)]

    @property
    def updates(self) -> int:
        """The last update in the log."""
        return max((record.update for stretch in self.stretches for record in stretch.records), default=0)

    @property
    def seconds(self) -> float | None:
        """Time of the updates that count, including validation: the sum of the last `wall` of each stretch.

        None if it is not known: in a stretch that was resumed by stock fairseq, `wall` is 0 throughout.
        """
        longest = []
        for stretch in self.stretches:
            walls = [r.values["wall"] for r in stretch.of(_IN_EPOCH, _PER_EPOCH) if "wall" in r.values]
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
            for record in stretch.of(_IN_EPOCH) or stretch.of(_PER_EPOCH):
                speed, batch = record.values.get("wps", 0), record.values.get("wpb", 0)
                if speed > 0 and batch > 0 and record.update > before:
                    tokens += batch * (record.update - before)
                    seconds += batch * (record.update - before) / speed
                before = record.update
        return tokens / seconds if seconds else None


@dataclass
class Log:
    """trainings: in the order of the log. broken: the number of truncated records."""

    trainings: list[Training]
    broken: int


def _device(machine: dict[str, list[str]]) -> str:
    """A description of the hardware; "" if the log does not say. machine: what _MACHINE found."""
    processes, threads, backend = (machine.get(name, [""])[-1] for name in ("processes", "threads", "backend"))
    if gpus := Counter(machine.get("GPU", ())):
        text = ", ".join(f"{number} × {name}" for name, number in gpus.items())
    elif processes:
        kind = "GPU" if backend == "cuda" else "CPU"
        text = f"1 process on a {kind}" if processes == "1" else f"{processes} processes on {kind}s"
        if threads:
            text += f", {threads} thread{'s' * (threads != '1')}{' each' * (processes != '1')}"
    else:
        return ""
    return f"{text}; operators: {backend} backend" if backend else text


def parse_log(text: str) -> Log:
    """Read a training's log; for the supported formats, see the module's docstring."""
    reader = _Reader()
    # A line without a line feed is truncated: its last number may have lost digits.
    *lines, rest = text.split("\n")
    for line in lines:
        # A progress bar rewrites its line, so only the text after the last carriage return counts.
        reader.read(line.rstrip("\r").rpartition("\r")[2])
    broken = reader.broken + any(pattern.search(rest) for pattern in (_JSON, _INNER, _EPOCH))
    return Log(reader.trainings, broken)


class _Reader:
    def __init__(self):
        self.trainings: list[Training] = []
        self.broken = 0
        self._starting = True  # a stretch has begun, but its first update is not known yet
        self._header: dict = {}

    def read(self, line: str) -> None:
        for name, pattern in _MACHINE.items():
            if match := pattern.search(line):
                self._header.setdefault(name, []).append(match[1])
                return
        if match := _PARAMETERS.search(line):
            self._starting = True
            self._forget()  # a start without any record
            self._header["parameters"] = int(match[1].replace(",", ""))
        elif match := _LOADED.search(line):
            self._starting = True
            self._header["start"] = int(match[1])
        elif match := _EXAMPLES.search(line):
            self._examples(match[2].strip().replace("\\", "/").split("/")[-1].split(".")[0], match[1])
        elif match := _JSON.search(line):
            self._json(match[1], match[2])
        elif match := _INNER.search(line):
            self._record(_IN_EPOCH, int(match[1]), _PAIR.findall(match[2]))
        elif match := _EPOCH.search(line):
            pairs = [part.rsplit(" ", 1) for part in match[3].split(" | ")]
            self._record(match[2] or _PER_EPOCH, int(match[1]), [pair for pair in pairs if len(pair) == 2])

    def _forget(self) -> None:
        # Processes that die are restarted with the same number of threads.
        self._header = {name: value for name, value in self._header.items() if name == "threads"}

    def _examples(self, subset: str, number: str) -> None:
        known = self._header.setdefault("examples", {}) if self._starting else self.trainings[-1].examples
        known[subset] = int(number.replace(",", ""))

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
        self._record(_IN_EPOCH if inner else _PER_EPOCH if subset == "train" else subset, epoch, pairs)

    def _record(self, kind: str, epoch: int, pairs) -> None:
        values = {}
        for name, value in pairs:
            try:
                values[name] = float(value)
            except (TypeError, ValueError):
                continue
        update = values.pop("num_updates", math.nan)
        if math.isnan(update):
            self.broken += bool(values)
            return
        record = Record(int(update), epoch, values, kind)
        self._stretch(record).records.append(record)

    def _stretch(self, record: Record) -> Stretch:
        """The stretch that the record belongs to, a new one if its head was just read."""
        last = self.trainings[-1].updates if self.trainings else 0
        # A log without heads (from old fairseq, or with its beginning missing): falling updates mean a restart.
        fell = bool(self.trainings) and record.update < last and not self._starting
        if not (self._starting or fell or not self.trainings):
            return self.trainings[-1].stretches[-1]
        head = {} if fell else self._header
        anew = 0 if record.epoch <= 1 else record.update - 1
        start = head.get("start", anew)
        if not self.trainings or start == 0:
            self.trainings.append(Training())
        training = self.trainings[-1]
        for stretch in training.stretches:
            stretch.records = [earlier for earlier in stretch.records if earlier.update <= start]
        training.stretches.append(Stretch(start))
        training.parameters = head.get("parameters", training.parameters)
        device = _device(head)
        training.devices += [device] if device and device not in training.devices else []
        training.examples |= head.get("examples", {})
        self._starting = False
        self._forget()
        return training.stretches[-1]
