"""The order of a model's parameters in each layout (layouts.py), and optimizer states, which follow it."""

import math
from collections.abc import Iterable, Sequence

import torch

from lightconv_plugin.checkpoints.layouts import DYNAMIC_WEIGHT

Order = Sequence[tuple[str | None, tuple[int, ...]]]
_FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col")  # Adafactor's, of other shapes than the parameter


class CannotReorder(Exception):
    """Why an optimizer state cannot be kept; the text completes the message 'dropped: …'."""


def parameter_order(layout: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> Order:
    """(our name, shape) of a model's parameters, in the order of a layout's code, as used by optimizer states.

    The name is None for a parameter that we do not have.

    Args:
        parameters: the model's `named_parameters()`, in our order
    """
    order: list[tuple[str | None, tuple[int, ...]]] = []
    for name, parameter in parameters:
        if layout == "fairseq" and name.endswith(DYNAMIC_WEIGHT):
            order.append((None, (1, 1, parameter.shape[1])))
        order.append((name, tuple(parameter.shape)))
    output = next((entry for entry in order if entry[0] == "decoder.output_projection.weight"), None)
    if output and layout in ("fairseq-0.12.2", "talk"):
        # There it is a parameter of the decoder itself, and a module's own parameters come before its submodules'.
        order.remove(output)
        decoders = (place for place, (name, _) in enumerate(order) if name and name.startswith("decoder."))
        first = next(decoders, len(order))  # the others may be frozen
        order.insert(first, output)
    return order


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
    if not (
        isinstance(parameters, list)
        and all(isinstance(key, int) for key in parameters)
        and all(isinstance(entry, dict) for entry in entries.values())
    ):
        raise CannotReorder("its parameters are not listed as torch's optimizers do")
    # torch in 2019 called the parameters by their addresses, not 0, 1, …
    entries = {place: entries[key] for place, key in enumerate(parameters) if key in entries}
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
            if getattr(value, "ndim", 0) and key not in _FACTORS and tuple(value.shape) != shape:
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
