"""Converts checkpoints between layouts: upstream's for the plugin, and the plugin's for upstream's code (layouts.py).

The plugin also loads upstream's files directly; converting them just gives all files one layout. An option that a
layout cannot express is an error, and so is a parameter that the model does not have.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from lightconv_plugin.checkpoints.layouts import (
    architecture_in,
    as_mapping,
    layout_of,
    options_in,
    our_state,
    read_model,
    state_in,
)
from lightconv_plugin.checkpoints.loading import load_model_checkpoint, search_settings
from lightconv_plugin.checkpoints.optimizer_order import CannotReorder, parameter_order, reorder
from lightconv_plugin.checkpoints.to_fairseq import command_line, fairseq_checkpoint
from lightconv_plugin.checkpoints.untrusted import shown
from lightconv_plugin.errors import InputError
from lightconv_plugin.models.architectures import use_registered_architecture

# {what is said: entries of extra_state}
_DROPPED = {
    "the exponential moving average of the parameters is dropped: it is in the old layout": ("ema", "ema_fp32_params"),
    "the meters of its training are dropped: not every fairseq has their classes": ("train_meters",),
}


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
        source_order, order = (parameter_order(name, model.module.named_parameters()) for name in (present, layout))
        try:
            converted["last_optimizer_state"] = reorder(state["last_optimizer_state"], source_order, order)
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
    cfg = state.get("cfg") or {}
    task = as_mapping(cfg.get("task"))
    if task.get("_name") != "translation_fast":
        return None
    left_out = search_settings(task)
    task = {key: value for key, value in task.items() if key not in left_out} | {"_name": "translation"}
    return {"cfg": {**cfg, "task": task}}


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
