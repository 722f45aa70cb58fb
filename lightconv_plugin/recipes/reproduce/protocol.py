"""What a reproduction follows: the task's protocol.yaml, and the settings of a system's configuration with overrides.

A protocol is read strictly: whatever it has that is not known, or lacks, is an error that names the file and the key.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
# The scores of a row by metric, the first being that of `tune: by` unless it says another.
SCORES = {
    "bleu": ("bleu_tok", "sacrebleu", "chrf"),
    "rouge": ("rouge1", "rouge2", "rougeLsum", "rougeL"),
    "perplexity": ("perplexity",),
}
# Settings that say where and how a training runs, not what it computes.
MACHINE = (
    "checkpoint.save_dir",
    "checkpoint.keep_interval_updates",
    "checkpoint.keep_last_epochs",
    "common.log_file",
    "common.log_format",
    "common.log_interval",
    "common.seed",  # a seed is a training of its own
    "common.tensorboard_logdir",
    "common.user_dir",
    "dataset.num_workers",
    "distributed_training",
    "task.data",  # the data are known by their content
)
# The systems of every task, by the names of their configurations: what the papers call them.
PAPER_NAMES = {
    "lightweightconv": "LightConv",
    "dynamicconv": "DynamicConv",
    "talkconv": "TaLK",
    "transformer": "self-attention",
}
OVERRIDE = re.compile(r"(?:\+{1,2}|~)?[A-Za-z_][\w./@-]*=.*|~[A-Za-z_][\w./@-]*", re.DOTALL)


class ProtocolError(ValueError):
    """A protocol, a configuration or an override that cannot be followed; the text names it."""


@dataclass(frozen=True)
class System:
    """A row of a task: a configuration beside the protocol. paper: the published figure by name of the score, source:
    whose it is, both of lightconv_plugin/report/paper.py and empty where it has none."""

    name: str
    title: str
    generate: tuple[str, ...]
    paper: dict[str, str]
    source: str


@dataclass(frozen=True)
class Tuning:
    """What is chosen on the validation set: numbers of averaged checkpoints, length penalties, by which score."""

    average: tuple[int, ...]
    lenpen: tuple[float, ...]
    by: str
    grid: bool


@dataclass(frozen=True)
class Protocol:
    """A task's protocol.yaml. measure, test (the name of the test set), title, note: words for its table."""

    path: Path
    task: str
    prepare: tuple[str, ...]
    metric: str
    generate: tuple[str, ...]
    score: tuple[str, ...]
    tune: Tuning
    measure: str
    test: str
    title: str
    note: str
    systems: dict[str, System]

    def generate_of(self, system: str) -> list[str]:
        """Options of fairseq-generate (or -eval-lm): the task's, then the system's, of which the last counts."""
        return [*self.generate, *self.systems[system].generate]

    def fingerprint(self, system: str) -> list[Any]:
        """What of this protocol a row of `system` depends on, as JSON values."""
        tune = self.tune
        return [
            *(self.metric, self.generate_of(system), list(self.score)),
            *(list(tune.average), list(tune.lenpen), tune.by, tune.grid),
        ]


class _Reader:
    """A mapping of a protocol whose keys are taken one by one; what is left over is unknown."""

    def __init__(self, path: Path, name: str, value: Any, known: Sequence[str]) -> None:
        self.path, self.name = path, name
        if not isinstance(value, dict):
            raise self.error("", "a mapping", value)
        for key in value:
            if key not in known:
                raise ProtocolError(f"{path}: unknown key {self._full(str(key))}; known: {', '.join(known)}")
        self.value = value

    def _full(self, key: str) -> str:
        return ".".join(filter(None, (self.name, key))) or "the whole file"

    def error(self, key: str, wanted: str, got: Any) -> ProtocolError:
        return ProtocolError(f"{self.path}: {self._full(key)} must be {wanted}, got {got!r}")

    def get(self, key: str, wanted: str, check: Any, default: Any = ...) -> Any:
        if key not in self.value:
            if default is ...:
                raise ProtocolError(f"{self.path}: {self._full(key)} is missing: {wanted}")
            return default
        value = self.value[key]
        if not check(value):
            raise self.error(key, wanted, value)
        return value

    def words(self, key: str, default: Any = ...) -> tuple[str, ...]:
        """A list of options; numbers need no quotes."""
        wanted = "a list of options, such as [--beam, 5]"
        value = self.get(key, wanted, lambda v: isinstance(v, list) and all(map(_is_word, v)), default)
        return tuple(map(str, value))

    def text(self, key: str, default: Any = ...) -> str:
        return self.get(key, "a text", lambda v: isinstance(v, str) and v.strip() != "", default).strip()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_word(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, str) and value != "")


def _is_list(value: Any, item: Any) -> bool:
    return isinstance(value, list) and all(map(item, value)) and len(set(value)) == len(value)


def split_words(text: str, name: str) -> tuple[str, ...]:
    """A command line's words, as a shell takes them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ProtocolError(f"{name}: {error}, in {text!r}") from None


def load_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        ProtocolError: there is none, or it is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProtocolError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def task_name(folder: Path) -> str:
    """A task is known by its folder, from configs/ on where it is in there."""
    configs = ROOT / "configs"
    return str(folder.relative_to(configs)) if folder.is_relative_to(configs) and folder != configs else folder.name


def read_protocol(folder: Path) -> Protocol:
    """`folder`/protocol.yaml, checked.

    Raises:
        ProtocolError: something in it is missing, unknown or of the wrong kind, or a system has no configuration.
    """
    path = folder / "protocol.yaml"
    known = ("prepare", "metric", "generate", "score", "tune", "measure", "test", "paper", "title", "note", "systems")
    top = _Reader(path, "", load_yaml(path), known)
    metric = top.get("metric", f"one of {', '.join(SCORES)}", lambda v: isinstance(v, str) and v in SCORES)
    paper = top.get("paper", "null or the name of a task in paper.py", lambda v: v is None or isinstance(v, str), None)
    systems = top.get("systems", "a mapping of systems", lambda v: isinstance(v, dict), {})
    here = {name: {} for name in PAPER_NAMES if (folder / f"{name}.yaml").is_file()}
    if not here | systems:
        raise ProtocolError(f"{path}: no system: there is neither {', '.join(PAPER_NAMES)}.yaml beside it nor another")
    return Protocol(
        path=path,
        task=task_name(folder),
        prepare=split_words(top.text("prepare"), f"{path}: prepare"),
        metric=metric,
        generate=top.words("generate"),
        score=top.words("score", []),
        tune=_read_tuning(path, top.get("tune", "a mapping", lambda v: isinstance(v, dict)), metric),
        measure=top.text("measure"),
        test=top.text("test"),
        title=top.text("title", task_name(folder)),
        note=top.text("note", ""),
        systems={str(name): _read_system(path, str(name), value, paper) for name, value in (here | systems).items()},
    )


def _read_tuning(path: Path, value: Any, metric: str) -> Tuning:
    tune = _Reader(path, "tune", value, ("average", "lenpen", "by", "grid"))
    average = tune.get(
        "average",
        "a list of different positive whole numbers",
        lambda v: v and _is_list(v, lambda n: isinstance(n, int) and not isinstance(n, bool) and n > 0),
    )
    if metric == "perplexity":
        lenpen = tune.get("lenpen", "an empty list: perplexity has no length penalty", lambda v: v == [], [])
    else:
        lenpen = tune.get("lenpen", "a list of different numbers", lambda v: v and _is_list(v, _is_number))
    scores = SCORES[metric]
    by = tune.get("by", f"one of {', '.join(scores)}", lambda v: v in scores, scores[0])
    grid = tune.get("grid", "true or false", lambda v: isinstance(v, bool), False)
    return Tuning(tuple(average), tuple(map(float, lenpen)), by, grid)


def _read_system(path: Path, name: str, value: Any, paper: str | None) -> System:
    from lightconv_plugin.report.paper import TASKS, find_fact

    system = _Reader(path, f"systems.{name}", value, ("title", "generate", "paper"))
    if not (path.parent / f"{name}.yaml").is_file():
        raise ProtocolError(f"{path}: systems.{name} has no configuration {path.parent / name}.yaml")
    task = next((task for task in TASKS if task.name == paper), None)
    if paper is not None and task is None:
        names = ", ".join(task.name for task in TASKS)
        raise ProtocolError(f"{path}: paper must be null or one of {names}, got {paper!r}")
    known = tuple(PAPER_NAMES.values())
    wanted = f"null or one of {', '.join(known)}"
    of = system.get("paper", wanted, lambda v: v is None or v in known, PAPER_NAMES.get(name))
    fact = find_fact(task, of)
    source = ", ".join(filter(None, (fact.source, fact.note))) if fact else ""
    title = system.text("title", PAPER_NAMES.get(name, name))
    return System(name, title, system.words("generate", []), dict(fact.values) if fact else {}, source)


def canonical(value: Any) -> str:
    """A setting in one form, however it is typed: 5e-4 and 0.0005, [2000, 10000] and "2000,10000", an enum's value."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return ",".join(map(canonical, value))
    text = str(value).strip().strip("'\"")
    if len(text) > 1 and text[0] + text[-1] in ("[]", "()"):
        text = text[1:-1]
    if "," in text:
        return ",".join(map(canonical, text.split(",")))
    try:
        return repr(float(text))
    except ValueError:
        return {"True": "true", "False": "false", "None": "null"}.get(text, text)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": c}} as {"a.b": c}."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def is_machine(key: str) -> bool:
    """Whether a setting is about the machine alone."""
    return any(key == name or key.startswith(f"{name}.") for name in MACHINE)


def split_override(item: str) -> tuple[str, Any]:
    """(key, value) of a hydra override, the value None where the key is deleted."""
    key, _, value = item.lstrip("+~").partition("=")
    if item.startswith("~"):
        return key, None
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        return key, value


def settings_of(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, str]:
    """What a training computes, {key: value in canonical form}; train.sh divides the tokens of an update as it must.

    An override of max_tokens alone changes no training: it bounds what fits the memory (see train_plan.py).
    """
    flat = flatten(config)
    given = {}
    for item in overrides:
        key, value = split_override(item)
        if item.startswith("~"):
            flat = {name: old for name, old in flat.items() if name != key and not name.startswith(f"{key}.")}
        else:
            given[key] = value
    tokens, frequency = "dataset.max_tokens", "optimization.update_freq"
    if tokens in flat and frequency not in given:
        given.pop(tokens, None)
    settings = {key: canonical(value) for key, value in (flat | given).items() if not is_machine(key)}
    return dict(sorted(settings.items()))


def short_digest(value: Any) -> str:
    """The first 16 digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def row_digest(protocol: Protocol, system: str, settings: Mapping[str, str]) -> str:
    """By what a row is known: the system's settings and the protocol's. A row with another is of an older version."""
    return short_digest([dict(settings), protocol.fingerprint(system)])
