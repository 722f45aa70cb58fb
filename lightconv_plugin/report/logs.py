"""Reading what fairseq-train and fairseq-hydra-train logged: the curves of a training, and what it says of itself.

Understood are fairseq's formats `simple`, `json` and what `tqdm` prints at the end of an epoch, with the prefix of
either command or none. Every record is known by its `num_updates`. A training that was resumed goes back to its
checkpoint's update: what was logged beyond it belongs to updates that were thrown away, and is dropped. A log that
holds several trainings (one that began anew at update 0) gives them one by one.
"""

import json
import math
import re
from dataclasses import dataclass, field

# "epoch 003:     12 / 124 loss=6.668, …, num_updates=260"   "epoch 003 | loss 6.362 | … | num_updates 372"
_INNER = re.compile(r"epoch (\d+):\s+\d+ / \d+ (.*)")
_EPOCH = re.compile(r"epoch (\d+) \| (?:valid on '([^']+)' subset \| )?(.*)")
_PAIR = re.compile(r"(\w+)=([^,\s]+)")
_JSON = re.compile(r"(\w+)\W+(?:\[INFO\] - )?(\{\"epoch\": .*)")
_LOADED = re.compile(r"loaded checkpoint \S.* \(epoch \d+ @ (\d+) updates\)", re.IGNORECASE)
_PARAMETERS = re.compile(r"num\. (?:shared )?model params: ([\d,]+)")
_EXAMPLES = re.compile(r"loaded ([\d,]+) examples from: ?(.+)$")
_DEVICES = re.compile(r"training on \d+ \w+.*")
_GPU = re.compile(r"rank\s+\d+: capabilities.*")
_BACKEND = re.compile(r"operators on \w+ tensors: backend \w+")


@dataclass
class Record:
    """What one line says: statistics by fairseq's names, without the subset's prefix of the json format."""

    update: int
    epoch: int
    values: dict[str, float]


@dataclass
class Stretch:
    """One start of the command: the update that it went on from and the statistics that still count."""

    start: int = 0
    inner: list[Record] = field(default_factory=list)
    epochs: list[Record] = field(default_factory=list)
    valid: dict[str, list[Record]] = field(default_factory=dict)

    def lists(self) -> list[list[Record]]:
        return [self.inner, self.epochs, *self.valid.values()]

    def drop_after(self, update: int) -> None:
        for records in self.lists():
            records[:] = [record for record in records if record.update <= update]


@dataclass
class Training:
    """One training, all its stretches together.

    parameters, devices, examples: as the log states them; None or empty where it does not.
    """

    stretches: list[Stretch] = field(default_factory=list)
    parameters: int | None = None
    devices: list[str] = field(default_factory=list)
    examples: dict[str, int] = field(default_factory=dict)

    def _all(self, of) -> list[Record]:
        return sorted((r for stretch in self.stretches for r in of(stretch)), key=lambda record: record.update)

    @property
    def train(self) -> list[Record]:
        """The records of training: those within epochs, and the epochs' means where there are none."""
        return self._all(lambda s: s.inner) or self._all(lambda s: s.epochs)

    @property
    def subsets(self) -> list[str]:
        """Names of the subsets that were validated on, in the order of the log."""
        return list(dict.fromkeys(name for stretch in self.stretches for name in stretch.valid))

    def valid(self, subset: str) -> list[Record]:
        return self._all(lambda s: s.valid.get(subset, []))

    @property
    def updates(self) -> int:
        """The last update that the log knows of."""
        return max((r.update for stretch in self.stretches for rs in stretch.lists() for r in rs), default=0)

    @property
    def seconds(self) -> float | None:
        """Time of the updates that count, validation included: the last `wall` of each stretch, summed."""
        walls = []
        for stretch in self.stretches:
            known = [r for rs in (stretch.inner, stretch.epochs) for r in rs if "wall" in r.values]
            if known:
                walls.append(max(known, key=lambda r: r.update).values["wall"])
        return sum(walls) if walls else None

    @property
    def tokens_per_second(self) -> float | None:
        """Target tokens a second in training: all tokens over all their time."""
        tokens = seconds = 0.0
        for stretch in self.stretches:
            before = stretch.start
            for record in stretch.inner or stretch.epochs:
                speed, batch = record.values.get("wps", 0), record.values.get("wpb", 0)
                if speed > 0 and batch > 0 and record.update > before:
                    tokens += batch * (record.update - before)
                    seconds += batch * (record.update - before) / speed
                before = record.update
        return tokens / seconds if seconds else None


@dataclass
class Log:
    """trainings: in the order of the log. broken: lines that begin like a record and cannot be read (cut off)."""

    trainings: list[Training]
    broken: int


def parse_log(text: str) -> Log:
    """Read a training's log; see the module's text for what is understood."""
    reader = _Reader()
    # A line without an end is one that was cut: its last number may have lost digits.
    *lines, rest = text.split("\n")
    for line in lines:
        # A progress bar rewrites its line: what counts is after the last return.
        reader.read(line.rstrip("\r").rpartition("\r")[2])
    broken = reader.broken + any(pattern.search(rest) for pattern in (_JSON, _INNER, _EPOCH))
    return Log(reader.trainings, broken)


class _Reader:
    def __init__(self):
        self.trainings: list[Training] = []
        self.broken = 0
        self._starting = True  # a stretch has begun, and its first update is not known yet
        self._header: dict = {}

    def read(self, line: str) -> None:
        if match := _PARAMETERS.search(line):
            self._begin()
            self._header.pop("start", None)  # of a start that came to nothing
            self._header["parameters"] = int(match[1].replace(",", ""))
        elif match := _LOADED.search(line):
            self._begin()
            self._header["start"] = int(match[1])
        elif match := (_DEVICES.search(line) or _GPU.search(line) or _BACKEND.search(line)):
            self._device(match[0].strip())
        elif match := _EXAMPLES.search(line):
            self._examples(match[2].strip().replace("\\", "/").split("/")[-1].split(".")[0], match[1])
        elif match := _JSON.search(line):
            self._json(match[1], match[2])
        elif match := _INNER.search(line):
            self._record(None, "inner", int(match[1]), _PAIR.findall(match[2]))
        elif match := _EPOCH.search(line):
            pairs = [part.rsplit(" ", 1) for part in match[3].split(" | ")]
            kind = "valid" if match[2] else "epochs"
            self._record(match[2], kind, int(match[1]), [pair for pair in pairs if len(pair) == 2])

    def _begin(self) -> None:
        if not self._starting:
            self._starting, self._header = True, {}

    def _device(self, text: str) -> None:
        known = self._header.setdefault("devices", []) if self._starting else self.trainings[-1].devices
        if text not in known:
            known.append(text)

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
        # The epoch's records have their subset as prefix: train_loss, valid_loss.
        subset = next((key.removesuffix("_num_updates") for key in stats if key.endswith("_num_updates")), tag)
        pairs = [(key if inner else key.removeprefix(f"{subset}_"), value) for key, value in stats.items()]
        kind = "inner" if inner else "epochs" if subset == "train" else "valid"
        self._record(subset, kind, epoch, pairs)

    def _record(self, subset: str | None, kind: str, epoch: int, pairs) -> None:
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
        record = Record(int(update), epoch, values)
        stretch = self._stretch(record)
        if kind == "valid":
            stretch.valid.setdefault(subset, []).append(record)
        else:
            getattr(stretch, kind).append(record)

    def _stretch(self, record: Record) -> Stretch:
        """The stretch that the record belongs to; begins it where its head was just read."""
        last = self.trainings[-1].updates if self.trainings else 0
        # A log without heads (of old fairseq, or the tail of one): numbers that fall tell of a new start.
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
            stretch.drop_after(start)
        training.stretches.append(Stretch(start))
        training.parameters = head.get("parameters", training.parameters)
        training.devices += [device for device in head.get("devices", []) if device not in training.devices]
        training.examples |= head.get("examples", {})
        self._starting, self._header = False, {}
        return training.stretches[-1]
