"""Loads the 8-bit weights of an exported directory into transformers, as floating-point numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import cached_file

from lightconv_plugin.checkpoints.exported import GENERATION, WEIGHTS_FILE, skeleton
from lightconv_plugin.checkpoints.weights import Int8, Weights, read_kinds

_WHERE = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def where(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained` that determine where files are."""
    return {name: kwargs[name] for name in _WHERE if name in kwargs}


def int8_arguments(
    config_class: type[PretrainedConfig], path: str | os.PathLike, kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """For a directory `path` with 8-bit weights: the arguments of `from_pretrained` that replace `path` and `kwargs`.

    None if the weights are of another type. InputError if they are damaged or do not match the configuration.
    """
    given = kwargs.get("config")
    if isinstance(given, PretrainedConfig):
        config, rest = given, {name: value for name, value in kwargs.items() if name != "config"}
    else:
        others = {name: value for name, value in kwargs.items() if name not in ("config", "generation_config")}
        config, rest = config_class.from_pretrained(given or path, return_unused_kwargs=True, **others)
    if getattr(config, "weights", None) != "int8":
        return None
    file = Path(cached_file(path, WEIGHTS_FILE, **where(kwargs)))
    weights = Weights.check(file, read_kinds(file), skeleton(config.model_config(), str(path)), "int8").read()
    tensors = {name: stored.dequantise() if isinstance(stored, Int8) else stored for name, stored in weights.items()}
    generation = kwargs.get("generation_config")
    if generation is None and (file.parent / GENERATION).exists():
        generation = GenerationConfig.from_pretrained(file.parent)
    return {**rest, "config": config, "state_dict": tensors, "generation_config": generation}
