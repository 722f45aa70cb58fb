"""Converts checkpoints between layouts: upstream's for the plugin, and the plugin's for upstream's code (layouts.py).

The plugin also loads upstream's files directly; converting them just gives all files one layout. An option that a
layout cannot express is an error, and so is a parameter that the model does not have.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightconv_plugin.checkpoints.layouts import (
    architecture_in,
    as_mapping,
    layout_of,
    options_in,
    our_state,
    parameter_order,
    read_model,
    state_in,
)
from lightconv_plugin.checkpoints.loading import load_model_checkpoint, search_settings
from lightconv_plugin.checkpoints.to_fairseq import command_line, fairseq_checkpoint
from lightconv_plugin.checkpoints.untrusted import shown
from lightconv_plugin.errors import InputError
from lightconv_plugin.models.architectures import use_registered_architecture

Order = Sequence[tuple[str | None, tuple[int, ...]]]
# {what is said: entries of extra_state}
_DROPPED = {
    "the exponential moving average of the parameters is dropped: it is in the old layout": ("ema", "ema_fp32_params"),
    "the meters of its training are dropped: not every fairseq has their classes": ("train_meters",),
}


class CannotReorder(Exception):
    """Why an optimizer state cannot be kept; the text completes the message 'dropped: …'."""


def convert(source: Path, layout: str) -> tuple[dict, list[str]]:
    """(the checkpoint or exported model `source` in another layout, one of LAYOUTS; one-line notes for the user).

    Raises InputError if it is neither, or cannot be expressed in the layout.
    """
    notes: list[str] = []
    if source.is_dir():
        state, notes = fairseq_checkpoint(source)
        if layout == "plugin":
            said = [f"exported model → {state['cfg']['model']['_name']} in the layout plugin", *notes]
            return state, [*said, f"options of fairseq-train for it: {command_line(state['cfg'])}"]
    else:
        state = load_model_checkpoint(source)
        use_registered_architecture(state)
    settings, architecture = _settings(state, source)
    try:
        model = read_model(settings, architecture, state["model"])
        present = layout_of(model, state["model"])
        options, left_out = options_in(layout, model)
        ours = our_state(model, state["model"])
        converted = {**state, "model": state_in(layout, model, ours)}
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    if present == layout:
        raise InputError(f"{source} is already in the layout {layout}")
    name = architecture_in(layout, model)
    said = [*notes, f"{architecture} in the layout {present} → {name} in the layout {layout}"]
    if left_out:
        said.append(f"left out, as they only matter in training: {', '.join(left_out)}")
    if layout != "plugin" and (changed := _with_upstreams_task(state)):
        state = {**state, **changed}
        said.append("the task translation_fast becomes translation, without its options")
    converted |= _container(state, layout, name, options)
    if state.get("last_optimizer_state"):
        try:
            converted["last_optimizer_state"] = reorder(
                state["last_optimizer_state"], parameter_order(present, model), parameter_order(layout, model)
            )
            said.append("the optimizer state is kept")
        except CannotReorder as error:
            converted["last_optimizer_state"] = None
            said.append(f"the optimizer state is dropped: {error}; resume with a new one (fairseq's --reset-optimizer)")
    for dropped, keys in _DROPPED.items():
        extra = converted.get("extra_state") or {}
        if any(key in extra for key in keys):
            converted["extra_state"] = {key: value for key, value in extra.items() if key not in keys}
            said.append(dropped)
    return converted, said


def _settings(state: dict, source: Path) -> tuple[dict, str]:
    """The model's options as stored in the file, and the name of its architecture."""
    cfg, args = state.get("cfg"), state.get("args")
    if not cfg and not args:
        raise InputError(f"{source} has neither cfg nor args: the model is unknown")
    settings = as_mapping(cfg.get("model") if cfg else args)
    architecture = next((settings[name] for name in ("_name", "arch") if settings.get(name) is not None), None)
    if architecture is None:
        raise InputError(f"{source} does not name its architecture")
    if not isinstance(architecture, str):
        raise InputError(f"{source}: the name of the architecture must be a text, got {shown(repr(architecture))}")
    if cfg:
        # Options of a language model that belong to its task.
        task = as_mapping(cfg.get("task"))
        for name in ("tokens_per_sample", "max_target_positions"):
            if str(settings.get(name, "${")).startswith("${") and name in task:
                settings[name] = task[name]
    return settings, architecture


def _container(state: dict, layout: str, architecture: str, options: dict) -> dict[str, Any]:
    """The settings with the new model: as "cfg" if the file had one and the layout's code supports it, else "args"."""
    cfg, args = state.get("cfg"), state.get("args")
    if cfg and layout != "talk":
        model: Any = {"_name": architecture, **options}
        common = cfg.get("common")
        if layout != "plugin":
            model = Namespace(arch=architecture, **model)  # like fairseq does for models without a dataclass
            common = {**as_mapping(common), "user_dir": None}
        return {"cfg": {**cfg, "model": model, "common": common}, "args": None}
    settings = _flat(cfg) if cfg else as_mapping(args)
    settings = {**settings, **options, "arch": architecture}
    if layout != "plugin":
        settings["user_dir"] = None
    return {"args": Namespace(**settings), "cfg": None}


def _with_upstreams_task(state: dict) -> dict[str, Any] | None:
    """The settings with the task translation, if the task is translation_fast, which only the plugin has."""
    cfg, args = state.get("cfg"), state.get("args")
    task, name = (as_mapping(cfg.get("task")), "_name") if cfg else (as_mapping(args), "task")
    if task.get(name) != "translation_fast":
        return None
    left_out = search_settings(task)
    task = {key: value for key, value in task.items() if key not in left_out} | {name: "translation"}
    return {"cfg": {**cfg, "task": task}} if cfg else {"args": Namespace(**task)}


def _flat(cfg: dict) -> dict[str, Any]:
    """fairseq's sections of settings as one flat list of arguments, as in fairseq until 2020."""
    out: dict[str, Any] = {}
    for name, section in cfg.items():
        if isinstance(section, (dict, Namespace)):
            values = as_mapping(section)
            chosen = values.pop("_name", None)
            out |= values
            if chosen is not None:
                out[name] = chosen  # task, criterion, optimizer, lr_scheduler …
    out.pop("model", None)
    return out


def reorder(optimizer: dict, source: Order, target: Order) -> dict:
    """Reorder an optimizer state, whose entries follow the order of the parameters, for another parameter order.

    The state has one entry per parameter or, with fairseq's --fp16, one for all parameters concatenated. Parameters
    that only the target has start without a state. An order is a list of (name, shape); the name is None for a
    parameter without a counterpart.

    Raises CannotReorder if the state has neither form.
    """
    groups, entries = (optimizer.get(k) if isinstance(optimizer, dict) else None for k in ("param_groups", "state"))
    if not isinstance(entries, dict) or not isinstance(groups, list) or len(groups) != 1:
        raise CannotReorder("it does not belong to one optimizer over one group of parameters")
    parameters = groups[0].get("params") if isinstance(groups[0], dict) else None
    if not isinstance(parameters, list) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise CannotReorder("its parameters are not listed as torch's optimizers do")
    number = len(parameters)
    if number == len(source):
        entries, count = _by_entry(entries, source, target), len(target)
    elif number == 1:
        entries, count = _in_a_row(entries, source, target), 1
    else:
        raise CannotReorder(f"it has {number} parameters, the model {len(source)}")
    return {**optimizer, "state": entries, "param_groups": [{**groups[0], "params": list(range(count))}]}


def _by_entry(entries: dict, source: Order, target: Order) -> dict:
    by_name = {}
    for index, (name, shape) in enumerate(source):
        entry = entries.get(index, {})
        for key, value in entry.items():
            if getattr(value, "ndim", 0) and tuple(value.shape) != shape:
                raise CannotReorder(f"its {key} of {name} has shape {tuple(value.shape)}, the parameter {shape}")
        if name is not None and entry:
            by_name[name] = entry
    return {index: by_name[name] for index, (name, _) in enumerate(target) if name in by_name}


def _in_a_row(entries: dict, source: Order, target: Order) -> dict:
    sizes = [math.prod(shape) for _, shape in source]
    out = {}
    for index, entry in entries.items():
        out[index] = dict(entry)
        for key, value in entry.items():
            if not getattr(value, "ndim", 0):
                continue  # the step
            if tuple(value.shape) != (sum(sizes),):
                raise CannotReorder(f"its {key} has shape {tuple(value.shape)}, the model {sum(sizes)} parameters")
            parts = {name: part for (name, _), part in zip(source, value.split(sizes), strict=True) if name}
            out[index][key] = torch.cat(
                [parts[name] if name else value.new_zeros(math.prod(shape)) for name, shape in target]
            )
    return out
