"""One-line explanations of known training errors: wrong configuration, missing data, too little memory, processes that
do not respond."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import errno
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from lightconv_plugin.errors import InputError, VariableError
from lightconv_plugin.recipes.training.overrides import OPEN

MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")
CLOSED = ("connection closed", "connection reset", "broken pipe", "connection refused")
LATE = ("timed out waiting", "wait timeout", "timeout after", "timed out after", "timed out.")
PLAIN = (  # messages that say enough
    "could not infer language pair",
    "cannot load model parameters from checkpoint",
    "the checkpoint's optimizer state is",
    "common.fp16 (--fp16) needs a gpu",
    "requires a joined dictionary",
    "the dataset is empty",
)


class ConfigError(ValueError):
    """An option is wrong; the message names it."""


def check_parts(config: Any) -> None:
    """Raise ConfigError if a composed configuration does not name a known task, criterion, optimizer and schedule, or
    lacks the size of a batch, or has a value out of range that fairseq does not check."""
    for group in ("task", "criterion", "optimizer", "lr_scheduler"):
        check_name(group, getattr(config, group, None), parts(group))
    if config.dataset.max_tokens is None and config.dataset.batch_size is None:
        raise ConfigError("dataset.max_tokens is missing, the size of a batch (or dataset.batch_size, in sentences)")
    rates, frequencies = config.optimization.lr, config.optimization.update_freq
    if not rates:
        raise ConfigError("optimization.lr must be a list such as [0.005], got []")
    if not frequencies or min(frequencies) < 1:
        raise ConfigError(f"optimization.update_freq must be a list of whole numbers from 1, got {list(frequencies)}")
    for group, option, least in (("common", "log_interval", 1), ("common", "seed", 0), ("dataset", "num_workers", 0)):
        if (value := getattr(getattr(config, group), option)) < least:
            raise ConfigError(f"{group}.{option} must be at least {least}, got {value}")
    if config.common.seed >= 1 << 32:  # NumPy's limit
        raise ConfigError(f"common.seed must be below {1 << 32}, got {config.common.seed}")
    smoothing = getattr(config.criterion, "label_smoothing", 0.0)
    if not 0 <= smoothing < 1:
        raise ConfigError(f"criterion.label_smoothing must be in 0 … 1, but not 1, got {smoothing}")


def parts(group: str) -> Mapping[str, Any]:
    """The classes that fairseq knows for a group, by name."""
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_REGISTRY

    if group == "model":
        return {**MODEL_REGISTRY, **ARCH_MODEL_REGISTRY}
    return TASK_REGISTRY if group == "task" else REGISTRIES[group]["registry"]


def check_added(config: Any, overrides: Iterable[str]) -> None:
    """Raise ConfigError if an override adds an option that its part does not have.

    fairseq checks those of parts with a dataclass. Others, such as its Transformer, would not read it.
    """
    for item in overrides:
        key = item.lstrip("+").partition("=")[0]
        group, _, option = key.partition(".")
        if not item.startswith("+") or group not in OPEN:
            continue
        name = str(getattr(getattr(config, group), "_name", None))
        part = parts(group).get(name)
        if part is None or getattr(part, "__dataclass", None) is not None:
            continue
        parser = argparse.ArgumentParser()
        part.add_args(parser)
        known = ["_name", *(action.dest for action in parser._actions)]
        if option not in known:
            raise ConfigError(f"{key}: the {group} {name} has no such option{did_you_mean(option, known)}")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name."""
    alike = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(alike)}?" if alike else ""


def check_name(group: str, options: Any, known: Collection[str]) -> str:
    """The `_name` in a group of options; ConfigError if there is none, or if it is not known."""
    name = getattr(options, "_name", None)
    if name is None:
        raise ConfigError(f"{group}._name is missing: a configuration names its {group}")
    if name not in known:
        raise ConfigError(f"{group}._name: there is no {group} {name}{did_you_mean(str(name), known)}")
    return name


def check_model(model: Any) -> None:
    """Raise ConfigError if the `model` group of a composed configuration cannot be built, before anything is loaded.

    fairseq itself only notices when it builds the model, after process-group setup and loading the dictionaries.
    """
    from lightconv_plugin.models.config import transformer_config
    from lightconv_plugin.models.encoder_decoder import ConvTransformerModel
    from lightconv_plugin.models.language_model import ConvLanguageModel
    from lightconv_plugin.models.language_model_config import language_model_config

    known = parts("model")
    built = known[check_name("model", model, known)]
    try:
        make_defaults = getattr(built, "__dataclass", None)  # None for fairseq's models of before 2021
        defaults = make_defaults() if make_defaults is not None else None
        if issubclass(built, ConvTransformerModel):
            transformer_config(model, defaults=defaults)
        elif issubclass(built, ConvLanguageModel):
            language_model_config(model, defaults)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


def full_disk(error: BaseException | None) -> OSError | None:
    """The error of a full disk that led to this one; None if there is none.

    When it cannot write, torch's own error is about positions in the file.
    """
    while error is not None and not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        error = error.__cause__ or error.__context__
    return error


def _unknown_option(error: BaseException | None) -> str:
    """What is wrong with an option that its group does not have; empty for other errors.

    hydra's own message advises to add the option with a +, which is refused as well.
    """
    from omegaconf.errors import OmegaConfBaseException

    group = getattr(error, "object_type", None)
    if not isinstance(error, OmegaConfBaseException) or not dataclasses.is_dataclass(group):
        return ""
    known = [option.name for option in dataclasses.fields(group)]
    if error.key in (None, *known):
        return ""
    name = getattr(group, "__name__", group)
    return f"{error.full_key}: {name} has no such option{did_you_mean(str(error.key), known)}"


def is_certain(error: BaseException) -> bool:
    """Whether every start ends with this error: it is in the configuration, in what that names, or in a variable."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    wrong = (ConfigError, OmegaConfBaseException, HydraException, VariableError)
    return isinstance(error, wrong) or isinstance(error.__cause__, wrong) or _is_plain(str(error))


def _is_plain(text: str) -> bool:
    return any(sign in text.lower() for sign in PLAIN)


def explain(error: BaseException, timeout: int) -> str:
    """Explain a known exception in one line that says what to do; empty for an unknown one."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if unknown := _unknown_option(error) or _unknown_option(error.__cause__):
        return unknown
    said = " ".join(str(error).split())
    text = said.lower()
    if isinstance(error, (ConfigError, InputError, OmegaConfBaseException)):
        return said
    if isinstance(error, HydraException):
        # The cause says what is wrong, the exception itself says where.
        cause = " ".join(str(error.__cause__).split()) if error.__cause__ else ""
        return said if cause in said else f"{said} {cause}"
    if isinstance(error, FileNotFoundError) or text.startswith("dataset not found"):
        return f"{said}: is the data prepared, and complete? (task.data)"
    if isinstance(error, MemoryError) or any(sign in text for sign in MEMORY):
        remedy = "a smaller dataset.max_tokens with a larger optimization.update_freq needs less"
        return f"not enough memory: {remedy} ({said or type(error).__name__})"
    if isinstance(error, RuntimeError):
        if any(sign in text for sign in LATE):
            return f"no response from a peer process after {timeout} s: it hangs or cannot be reached ({said})"
        if any(sign in text for sign in CLOSED):
            return f"lost the connection to a peer process, which has died or cannot be reached ({said})"
    return said if _is_plain(said) else ""
