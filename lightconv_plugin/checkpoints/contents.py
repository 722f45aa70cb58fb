"""Checks the parts of a loaded fairseq checkpoint that this package reads: names, tensors and containers."""

from argparse import Namespace
from numbers import Integral
from pathlib import Path
from typing import Any

from lightconv_plugin.checkpoints.layouts import as_mapping
from lightconv_plugin.checkpoints.untrusted import shown
from lightconv_plugin.errors import InputError

# Sections of "cfg" that are read by name.
_SECTIONS = ("model", "task", "common", "checkpoint")


def check_contents(path: Path, state: Any) -> None:
    """Raises InputError unless `state`, loaded from `path`, has parameters and each part of it has the right type.

    The parameters must be dense tensors in memory with texts as names, none larger than the file. "cfg", "args",
    "optimizer_history" and "extra_state" may be missing or None.
    """
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict) or not state["model"]:
        raise InputError(f"{path} is not a checkpoint of fairseq: it has no parameters under 'model'")
    for key, value in state["model"].items():
        _check_parameter(path, key, value)
    _check_settings(path, state)
    extra = state.get("extra_state")
    if extra is not None and not isinstance(extra, dict):
        raise _wrong(path, "extra_state", "a dictionary", extra)
    history = state.get("optimizer_history")
    if history is not None and not isinstance(history, list):
        raise _wrong(path, "optimizer_history", "a list", history)
    for entry in history or []:
        if not isinstance(entry, dict):
            raise _wrong(path, "an entry of optimizer_history", "a dictionary", entry)
        if not isinstance(updates := entry.get("num_updates", 0), Integral):
            raise _wrong(path, "num_updates in optimizer_history", "an integer", updates)


def _check_parameter(path: Path, key: Any, value: Any) -> None:
    import torch

    if not isinstance(key, str):
        raise _wrong(path, "the name of a parameter", "a text", key)
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{path}: {shown(key)} is a {type(value).__name__}, not a tensor")
    if value.is_nested:
        raise InputError(f"{path}: {shown(key)} must be a dense tensor, got a nested tensor")
    if value.layout != torch.strided:
        raise InputError(f"{path}: {shown(key)} must be a dense tensor, got {value.layout}")
    if value.device.type != "cpu":
        raise InputError(f"{path}: {shown(key)} must have values, got a tensor on the {value.device.type} device")
    # A few bytes can be repeated to any size, which would then be filled with them.
    size = value.numel() * value.element_size()
    if size > value.untyped_storage().nbytes() and size > path.stat().st_size:
        raise InputError(f"{path}: {shown(key)} has {size:,} bytes, more than the file")


def _check_settings(path: Path, state: dict) -> None:
    cfg, args = state.get("cfg"), state.get("args")
    if cfg is not None and not isinstance(cfg, dict):
        raise _wrong(path, "cfg", "a dictionary", cfg)
    if args is not None and not isinstance(args, dict | Namespace):
        raise _wrong(path, "args", "a Namespace or a dictionary", args)
    for name in _SECTIONS:
        section = (cfg or {}).get(name)
        if section is not None and not isinstance(section, dict | Namespace):
            raise _wrong(path, f"{name} in cfg", "a dictionary or a Namespace", section)
    for name, section in [("cfg", cfg), ("args", args), *(cfg or {}).items()]:
        if isinstance(section, dict | Namespace):
            for key in as_mapping(section):
                if not isinstance(key, str):
                    raise _wrong(path, f"the name of a setting in {shown(name)}", "a text", key)


def _wrong(path: Path, what: str, allowed: str, value: Any) -> InputError:
    return InputError(f"{path}: {what} must be {allowed}, got {type(value).__name__} {shown(repr(value))}")
