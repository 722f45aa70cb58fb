"""Checks the weights that transformers loads and saves; loads 8-bit weights as floating-point numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import cached_file, find_adapter_config_file, is_peft_available

from lightconv_plugin.checkpoints.exported import CONFIG, GENERATION, WEIGHTS_FILE, skeleton
from lightconv_plugin.checkpoints.weights import DTYPES, Int8, Weights, read_kinds
from lightconv_plugin.errors import InputError

_FLOATING = ("F64", "F32", "F16", "BF16")
_OF_MODELS = ("config", "generation_config", "dtype", "torch_dtype", "quantization_config")
_WHERE = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def where(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained` that determine where files are."""
    return {name: kwargs[name] for name in _WHERE if name in kwargs}


def checked_arguments(
    config_class: type[PretrainedConfig], path: str | os.PathLike, kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """For a directory `path` with 8-bit weights: the arguments of `from_pretrained` that replace `path` and `kwargs`.

    None if the weights are of another type. InputError if they are damaged or do not match the configuration, or if
    `path` is a PEFT adapter of a model with 8-bit weights: transformers would adapt the 8-bit numbers, or nothing.
    """
    if kwargs.get("state_dict") is not None:
        return None  # the directory's own weights are not read
    adapter, path, kwargs = _adapted(path, kwargs)
    given = kwargs.get("config")
    if isinstance(given, PretrainedConfig):
        config, rest = given, {name: value for name, value in kwargs.items() if name != "config"}
    else:
        others = {name: value for name, value in kwargs.items() if name not in _OF_MODELS}
        config, rest = config_class.from_pretrained(given or path, return_unused_kwargs=True, **others)
        rest |= {name: value for name, value in kwargs.items() if name in _OF_MODELS}
    is_int8 = getattr(config, "weights", None) == "int8"
    try:
        file = Path(cached_file(path, WEIGHTS_FILE, **where(kwargs)))
    except OSError:
        if is_int8:
            raise
        return None  # transformers also reads other kinds of files, and says if there is none
    kinds = read_kinds(file)
    if not is_int8:
        # transformers converts between floating types.
        kinds = {name: kind._replace(code="F32") if kind.code in _FLOATING else kind for name, kind in kinds.items()}
    checked = Weights.check(file, kinds, skeleton(config.model_config(), str(path)), "int8" if is_int8 else "float32")
    if not is_int8:
        return None
    if adapter is not None:
        raise InputError(
            f"{path} has 8-bit weights: load it first, and then its adapter, model.load_adapter('{adapter}')"
        )
    weights = checked.read()
    tensors = {name: stored.dequantise() if isinstance(stored, Int8) else stored for name, stored in weights.items()}
    generation = kwargs.get("generation_config")
    if generation is None:
        generation = _generation(path, where(kwargs))
    return {**rest, "config": config, "state_dict": tensors, "generation_config": generation}


def _generation(path: str | os.PathLike, places: dict[str, Any]) -> GenerationConfig | None:
    """What generation_config.json says, fetched from the hub like the other files; None without one."""
    try:
        file = cached_file(path, GENERATION, **places)
    except OSError:
        return None
    return GenerationConfig.from_pretrained(Path(file).parent)


def _adapted(
    path: str | os.PathLike, kwargs: dict[str, Any]
) -> tuple[str | os.PathLike | None, str | os.PathLike, dict[str, Any]]:
    """The PEFT adapter at `path`, if there is one, and where the model is that it adapts, as transformers finds it."""
    adapter = (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path")
    if adapter is not None or not is_peft_available():
        return adapter, path, kwargs  # the auto classes have found it
    found = find_adapter_config_file(path, **where(kwargs))
    if found is None or os.path.isfile(os.path.join(path, CONFIG)):
        return found and path, path, kwargs  # an adapter may be in the directory of its model
    base = json.loads(Path(found).read_text(encoding="utf-8"))["base_model_name_or_path"]
    return path, base, {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}


def check_saved(state: Mapping[str, Any], max_shard_size: int | str) -> str:
    """The type of the weights to be saved, by its name in config.json.

    Raises:
        ValueError: they are of several types, or of one that an exported directory cannot have, or need several files.
    """
    types = {tensor.dtype for tensor in state.values() if isinstance(tensor, Tensor) and tensor.is_floating_point()}
    names = sorted(str(dtype).removeprefix("torch.") for dtype in types)
    if len(names) != 1 or names[0] not in DTYPES:
        raise ValueError(
            f"the weights must be all {', '.join([*DTYPES][:-1])} or {[*DTYPES][-1]} to be saved, got "
            f"{', '.join(names) or 'none'}: convert them first, such as by model.float()"
        )
    plan = split_torch_state_dict_into_shards(dict(state), max_shard_size=max_shard_size)
    if plan.is_sharded:
        raise ValueError(
            f"max_shard_size must be at least {plan.metadata['total_size']:,} bytes, as an exported directory has one "
            f"file of weights, got {max_shard_size!r}"
        )
    return names[0]
