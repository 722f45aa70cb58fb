"""Overrides: hydra's, such as optimization.max_epoch=30, and named changes of a recipe, such as +criterion/rdrop."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.progress import say

_PLAIN = "label_smoothed_cross_entropy"
# The values are the papers'.
CHANGES: Mapping[str, Mapping[str, str]] = {
    "criterion/rdrop": {"criterion._name": f"{_PLAIN}_with_rdrop", "criterion.rdrop_alpha": "5.0"},
    "criterion/simcut": {
        "criterion._name": f"{_PLAIN}_with_simcut",
        "criterion.simcut_alpha": "3.0",
        "criterion.simcut_p": "0.05",
    },
}
"""The settings of each named change. They replace those of a recipe with the same keys."""

# fairseq's groups whose options depend on their _name: hydra knows those that the configuration has.
OPEN = ("bpe", "criterion", "lr_scheduler", "model", "optimizer", "scoring", "task", "tokenizer")
_PRECISIONS = ("common.fp16", "common.bf16")


def get(config: Mapping[str, Any], key: str) -> Any:
    """config["a"]["b"] for "a.b"; None if it is missing."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _hydra_is_1_0() -> bool:
    return version("hydra-core").startswith("1.0.")


def quote(value: str | Path) -> str:
    r"""A string quoted for a hydra override.

    Raises:
        ValueError: hydra cannot read it: it contains ${, which would be interpolated, or, with hydra 1.0 (fairseq
            0.12.2), a backslash before a quotation mark or at the end.
    """
    text = str(value)
    if "${" in text:
        raise ValueError(f"{text}: a name with ${{ cannot be passed to hydra, which reads it as a variable")
    if re.search(r"\\('|\Z)", text) and _hydra_is_1_0():
        raise ValueError(f"{text}: hydra 1.0 cannot read a name with a backslash before a quotation mark or at the end")
    # A backslash is literal except before a quotation mark or at the end.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), text) + "'"


def given_values(overrides: Sequence[str]) -> dict[str, str]:
    """Key -> value of the overrides that set a value."""
    return dict(item.lstrip("+").split("=", 1) for item in overrides if "=" in item)


def setting(config: Mapping[str, Any], given: Mapping[str, str], key: str) -> Any:
    """An override's text for this key, or the configuration's value; None if that is missing, null or none."""
    value = given.get(key, get(config, key))
    return None if str(value).strip("'\"").lower() in ("none", "null", "") else value


def is_set(key: str, config: Mapping[str, Any], overrides: Sequence[str]) -> bool:
    """Whether the configuration with these overrides has true for this key, in any of OmegaConf's words for it."""
    value = str(given_values(overrides).get(key, get(config, key)))
    return value.strip("'\"").lower() in ("true", "yes", "y", "on", "1")


def replaced(overrides: Sequence[str], new: Sequence[str]) -> list[str]:
    """The overrides, with `new` replacing those with the same keys."""
    keys = given_values(new).keys()
    return [item for item in overrides if item.lstrip("+").split("=", 1)[0] not in keys] + list(new)


def expanded(config: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """The overrides as hydra and fairseq need them.

    The settings of a named change are in its place; other overrides of the same settings win. fp16 or bf16 replaces the
    other one of the configuration, which is said. Options that the configuration leaves to fairseq have hydra's +.

    Raises:
        InputError: there is no such change, there are two, or the configuration has another criterion; or fp16 and
            bf16 are both set.
    """
    return for_hydra(config, _with_one_precision(config, _with_change(config, overrides)))


def _with_change(config: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    # hydra would take +criterion/rdrop=5 for a new key, which nothing reads, and does not know criterion/rdrop.
    named = [item for item in overrides if re.fullmatch(r"\+[^=]*|\+*criterion/.*", item)]
    if not named:
        return list(overrides)
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)} change the same settings: give one of them")
    name = named[0].removeprefix("+")
    if named[0] not in (known := [f"+{change}" for change in CHANGES]):
        raise InputError(f"there is no change {named[0]}; there are {', '.join(known)}")
    if (criterion := get(config, "criterion._name")) != _PLAIN:
        raise InputError(f"+{name} changes {_PLAIN}; the criterion of this configuration is {criterion}")
    others = [item for item in overrides if item not in named]
    given = given_values(others)
    settings = {key: given.get(key, value) for key, value in CHANGES[name].items()}
    return replaced(others, [f"{key}={value}" for key, value in settings.items()])


def _with_one_precision(config: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    # With both, fairseq scales the loss as for fp16 but has no scaler, and fails.
    if not all(is_set(key, config, overrides) for key in _PRECISIONS):
        return list(overrides)
    given = given_values(overrides)
    configured = [key for key in _PRECISIONS if key not in given]
    if len(configured) != 1:
        raise InputError(f"{' and '.join(_PRECISIONS)} are both true: set one of them")
    (chosen,) = given.keys() & set(_PRECISIONS)
    say(f"{chosen}=true replaces {configured[0]}=true of the configuration")
    return [*overrides, f"{configured[0]}=false"]


def for_hydra(config: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """The overrides with hydra's + before each option of `OPEN` groups that the configuration does not have."""
    plus = "+"
    if "defaults" in config:  # other files may have the option, and + is for new ones alone
        plus = "" if _hydra_is_1_0() else "++"
    result: list[str] = []
    for item in overrides:
        key, is_value, _ = item.partition("=")
        unknown = key.partition(".")[0] in OPEN and "." in key and get(config, key) is None
        result.append(f"{plus}{item}" if is_value and unknown and key not in given_values(result) else item)
    return result
