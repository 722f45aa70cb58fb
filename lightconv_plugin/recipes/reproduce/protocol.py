"""The rules of a reproduction: the task's protocol.yaml, and the settings of a system's configuration with overrides.

A protocol is validated strictly: an unknown, missing or wrong key is an error that names the file and the key.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import json
import operator
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from lightconv_plugin.errors import InputError
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.paths import configs_dir
from lightconv_plugin.scoring.measuring import Measuring
from lightconv_plugin.scoring.paper import FACTS, TASKS, find_fact
from lightconv_plugin.validation import read

# The scores of a row by metric. The first one is the default of `tune: by`.
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
    "common.seed",  # each seed is a separate training
    "common.tensorboard_logdir",
    "common.user_dir",
    "dataset.num_workers",
    "distributed_training",
    "task.data",  # data are identified by their content
)
# What the papers call the systems of every task, by the names of their configurations.
PAPER_NAMES = {kind.family: kind.system for kind in MIXERS.values() if kind.family}
OVERRIDE = re.compile(r"(?:\+{1,2}|~)?[A-Za-z_][\w./@-]*=.*|[+~][A-Za-z_][\w./@-]*", re.DOTALL)


@dataclass(frozen=True)
class Tuning:
    """What to try on the validation set: numbers of averaged checkpoints and length penalties.

    by: the score to choose by, "" for the first of SCORES. grid: try all pairs. within: see `tuning.tune`.
    """

    average: tuple[int, ...]
    lenpen: tuple[float, ...] = ()
    by: str = ""
    grid: bool = False
    within: float = 0.0

    def __post_init__(self) -> None:
        if not self.average or min(self.average) < 1 or len(set(self.average)) < len(self.average):
            raise ValueError(f"average must be a list of different positive whole numbers, got {list(self.average)}")
        if len(set(self.lenpen)) < len(self.lenpen):
            raise ValueError(f"lenpen must be a list of different numbers, got {list(self.lenpen)}")


@dataclass(frozen=True)
class Scoring:
    """How the test set is scored, as in `Measuring`."""

    compound_split: bool = False
    stem: bool = True

    def settings(self) -> dict[str, Any]:
        """The settings that differ from the defaults."""
        return {name: value for name, value in asdict(self).items() if value != getattr(Scoring(), name)}


@dataclass(frozen=True)
class System:
    """A row of a task: a configuration next to the protocol.

    title: "" for the papers' name. generate: options added after those of the task.
    paper: the system whose published score is shown next to it; null for none, "" for the system of the same name.
    """

    title: str = ""
    generate: tuple[str | int | float, ...] = ()
    paper: str | None = ""


@dataclass
class Protocol:
    """A task's protocol.yaml.

    prepare: a task of `lightconv prepare`, and its options. generate: options of fairseq-generate (or fairseq-eval-lm).
    measure, test (the name of the test set), title, note: text for its table.
    paper: the task's name in scoring/paper.py, null for none.
    `read_protocol` fills in path, task, and all `systems` of the folder.
    """

    prepare: str
    metric: Literal["bleu", "rouge", "perplexity"]
    generate: tuple[str | int | float, ...]
    tune: Tuning
    measure: str
    test: str
    score: Scoring = Scoring()
    paper: str | None = None
    title: str = ""
    note: str = ""
    systems: dict[str, System] = field(default_factory=dict)
    path: Path = field(default=Path(), init=False)
    task: str = field(default="", init=False)

    def __post_init__(self) -> None:
        for name in ("prepare", "measure", "test"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} must be a text, got {getattr(self, name)!r}")
        if self.by not in (scores := SCORES[self.metric]):
            raise ValueError(f"tune.by must be one of {', '.join(scores)}, got {self.by!r}")
        if bool(self.tune.lenpen) == (self.metric == "perplexity"):
            wanted = "an empty list: perplexity has none" if self.tune.lenpen else "a list of different numbers"
            raise ValueError(f"tune.lenpen must be {wanted}, got {list(self.tune.lenpen)}")
        if not 0 <= self.tune.within < 1 or (self.tune.within and self.metric != "bleu"):
            wanted = "0 to below 1" if self.metric == "bleu" else "0: the test is for BLEU"
            raise ValueError(f"tune.within must be {wanted}, got {self.tune.within}")
        if self.paper is not None and self.paper not in (names := [task.name for task in TASKS]):
            raise ValueError(f"paper must be null or one of {', '.join(names)}, got {self.paper!r}")
        for name, system in self.systems.items():
            if system.paper and system.paper not in (known := dict.fromkeys(fact.system for fact in FACTS)):
                wanted = f"null or one of {', '.join(map(repr, known))}"
                raise ValueError(f"systems.{name}.paper must be {wanted}, got {system.paper!r}")

    @property
    def by(self) -> str:
        """The score that settings are chosen by."""
        return self.tune.by or SCORES[self.metric][0]

    def generate_of(self, system: str) -> list[str]:
        """Options of fairseq-generate (or -eval-lm): the task's, then the system's, which take precedence."""
        return [str(word) for word in (*self.generate, *self.systems[system].generate)]

    def title_of(self, system: str) -> str:
        return self.systems[system].title or PAPER_NAMES.get(system, system)

    def published(self, system: str) -> tuple[dict[str, str], str]:
        """(the published scores by name, their source); both empty if none are known."""
        paper = self.systems[system].paper
        of = PAPER_NAMES.get(system) if paper == "" else paper
        fact = find_fact(next((task for task in TASKS if task.name == self.paper), None), of)
        return (dict(fact.values), ", ".join(filter(None, (fact.source, fact.note)))) if fact else ({}, "")

    def measuring(self) -> Measuring:
        """How the test set is scored."""
        return Measuring(metric=self.metric, **self.score.settings())

    def fingerprint(self, system: str) -> list[Any]:
        """The parts of this protocol that a row of `system` depends on, as JSON values."""
        tune, score = self.tune, [list(item) for item in sorted(self.score.settings().items())]
        return [
            *(self.metric, self.generate_of(system), score),
            *(list(tune.average), list(tune.lenpen), self.by, tune.grid),
            *([tune.within] if tune.within else []),  # rows from before this was a choice stay valid
        ]


def split_words(text: str, name: str) -> list[str]:
    """The words of a command line, split as by a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"{name}: {error}, in {text!r}") from None


def load_yaml(path: Path) -> Any:
    """The content of a YAML file. InputError if the file is missing or not YAML."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def task_name(folder: Path) -> str:
    """A task's name: its path relative to configs/, or just the folder's name if it is elsewhere."""
    configs = configs_dir()
    return str(folder.relative_to(configs)) if folder.is_relative_to(configs) and folder != configs else folder.name


def read_protocol(folder: Path) -> Protocol:
    """`folder`/protocol.yaml, checked.

    Raises:
        InputError: a key is missing, unknown or wrong, or a system has no configuration.
    """
    path = folder / "protocol.yaml"
    try:
        protocol = read(Protocol, load_yaml(path))
        systems = {name: System() for name in PAPER_NAMES if (folder / f"{name}.yaml").is_file()} | protocol.systems
        if not systems:
            raise ValueError(f"no system: the folder has no {', '.join(PAPER_NAMES)}.yaml, and none is listed")
        for name in systems:
            if not (folder / f"{name}.yaml").is_file():
                raise ValueError(f"systems.{name} has no configuration {folder / name}.yaml")
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    protocol.systems, protocol.path, protocol.task = systems, path, task_name(folder)
    protocol.title = protocol.title or protocol.task
    return protocol


def canonical(value: Any) -> str:
    """A setting in canonical form: 5e-4 equals 0.0005, [2000, 10000] equals "2000,10000", an enum equals its value."""
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
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def is_machine(key: str) -> bool:
    """Whether a setting concerns only the machine."""
    return any(key == name or key.startswith(f"{name}.") for name in MACHINE)


def split_override(item: str) -> tuple[str, Any]:
    """(key, value) of a hydra override; the value is None if the key is deleted."""
    key, _, value = item.lstrip("+~").partition("=")
    if item.startswith("~"):
        return key, None
    try:
        found = yaml.safe_load(value)
    except yaml.YAMLError:
        return key, value
    # To hydra, no is a text: Norwegian.
    return key, value if isinstance(found, bool) and key.endswith("_lang") else found


def resolved(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that determine what a training computes; ${key} is replaced by its value, as fairseq does."""
    found = {key: value for key, value in flat.items() if not is_machine(key)}
    references = [key for key, value in found.items() if "${" in str(value)]
    if references:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        config = OmegaConf.create({})
        for key, value in flat.items():
            OmegaConf.update(config, key, value, merge=False)
        for key in references:
            try:
                value = functools.reduce(operator.getitem, key.split("."), config)
                found[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except OmegaConfBaseException as error:
                reason = str(error).splitlines()[0]
                raise InputError(f"{key} is {found[key]}, which the configuration does not have: {reason}") from None
    return found


def settings_of(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, str]:
    """The settings that determine what a training computes, {key: value in canonical form}.

    The tokens per update matter, not how they are divided into batches: overriding max_tokens alone does not change a
    training (see training/plan.py).

    Raises:
        InputError: the value of a setting refers to one that there is not.
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
    if tokens in flat and frequency not in given and given.get(tokens) is not None:
        given.pop(tokens, None)
    return {key: canonical(value) for key, value in sorted(resolved(flat | given).items())}


def changing(config: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """The overrides that change `settings_of`, each of them."""
    settings, needed = settings_of(config, overrides), list(overrides)
    for item in overrides:
        at = needed.index(item)
        rest = needed[:at] + needed[at + 1 :]
        with contextlib.suppress(InputError):  # without it, another setting refers to nothing
            if settings_of(config, rest) == settings:
                needed = rest
    return needed


def short_digest(value: Any) -> str:
    """The first 16 digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def row_digest(protocol: Protocol, system: str, settings: Mapping[str, str]) -> str:
    """Identifies a row: a digest of the system's settings and the protocol. A row with another digest is outdated."""
    return short_digest([dict(settings), protocol.fingerprint(system)])
