"""Pruning of models trained with LayerDrop (Fan et al. 2019): --encoder-layers-to-keep and --decoder-layers-to-keep."""

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from omegaconf import DictConfig, open_dict
from torch import Tensor

from lightconv_plugin.mixers import LAYER_OPTIONS, OUR_OPTIONS, readers
from lightconv_plugin.models.checks import SIDES, kinds

# The options that may have an entry for each layer.
_PER_LAYER = ("conv_type", "kernel_size_list", *(option.field for option in LAYER_OPTIONS if option.per_layer))
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.*)")


class Prunable:
    """A fairseq model whose state may come from one with more layers; before the model's class in its bases."""

    def load_state_dict(
        self, state_dict: dict[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Namespace | None = None
    ):
        """As fairseq's; prunes the state to the layers that `model_cfg` keeps.

        fairseq's own pruning comes after it has renamed the parameters of old layouts, which it does only for the
        layers that the model has, and drops all layers of a side of which nothing is said. `model_cfg` describes the
        pruned model afterwards: it is saved with the checkpoints of a training that starts from the pruned model.
        """
        state_dict = _prune(state_dict, model_cfg)
        return super().load_state_dict(state_dict, strict, model_cfg, args)  # type: ignore[misc]


def kept_layers(c: Any, side: str) -> list[int] | None:
    """The layers of one side to keep, in order; None if all are kept. Raises ValueError naming the option."""
    given = getattr(c, f"{side}_layers_to_keep", None)
    if given is None or given == "":
        return None
    layers = getattr(c, f"{side}_layers")
    try:
        kept = sorted(int(layer) for layer in (str(given).split(",") if isinstance(given, str | int) else given))
    except (TypeError, ValueError):
        kept = []
    if not kept or len(set(kept)) < len(kept) or not set(kept) <= set(range(layers)):
        raise ValueError(
            f"--{side}-layers-to-keep must be some of the layers 0 to {layers - 1}, each once, as in 0,2: got {given!r}"
        )
    return kept


def keep_layers(c: Any, side: str) -> None:
    """Reduce the options of one side to the layers to keep, in place; `c` is a Namespace, dataclass or DictConfig."""
    kept = kept_layers(c, side)
    if kept is None:
        return
    with open_dict(c) if isinstance(c, DictConfig) else nullcontext():
        for name in (f"{side}_{name}" for name in _PER_LAYER):
            given = getattr(c, name, None)
            values = given.split(",") if isinstance(given, str) else list(given or [])
            if len(values) == getattr(c, f"{side}_layers"):
                values = [values[layer] for layer in kept]
                setattr(c, name, ",".join(values) if isinstance(given, str) else values)
        setattr(c, f"{side}_layers", len(kept))
        setattr(c, f"{side}_layers_to_keep", None)
        for name, usual in _without_layers(c, side):
            if hasattr(c, name):
                setattr(c, name, usual)


def _without_layers(c: Any, side: str) -> Iterator[tuple[str, Any]]:
    """The options of which `c` has no layer, which would be refused, and their usual values."""
    types = {each: set(kinds(c, each)) for each in SIDES if getattr(c, f"{each}_conv_type", None)}
    if side not in types:
        return
    for name, usual in OUR_OPTIONS.items():
        field = name.removeprefix(f"{side}_")
        having = set().union(*types.values()) if field == name else types[side]
        if readers(field) and having.isdisjoint(readers(field)):
            yield name, usual


def _prune(state: dict[str, Tensor], cfg: Any) -> dict[str, Tensor]:
    """The state without the layers that `cfg` does not keep; `cfg` is changed as by keep_layers."""
    for side in SIDES:
        kept = kept_layers(cfg, side)
        if kept is None:
            continue
        keep_layers(cfg, side)
        numbers = {int(found[2]) for key in state if (found := _LAYER.match(key)) and found[1] == side}
        # A training that started from the pruned model has saved only those layers.
        if numbers != set(range(len(kept))):
            state = _renumbered(state, side, {layer: number for number, layer in enumerate(kept)})
    return state


def _renumbered(state: dict[str, Tensor], side: str, numbers: dict[int, int]) -> dict[str, Tensor]:
    """The state with the layers of one side that are in `numbers`, under their new numbers."""
    pruned = {}
    for key, value in state.items():
        found = _LAYER.match(key)
        if found is None or found[1] != side:
            pruned[key] = value
        elif int(found[2]) in numbers:
            pruned[f"{side}.layers.{numbers[int(found[2])]}.{found[3]}"] = value
    return pruned
