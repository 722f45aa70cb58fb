"""The tables of what a step asks of a GPU, counted without one (counting.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables import Cell, Form, Table, cell, load, source

FILE = "counted_steps"
_COUNT, _MS = Form(0), Form(None, 1e-3)
_SINGLE = ("encoder layer", "decoder layer", "decoding", "repeated graph")


def seconds(counts: dict[str, Any], content: dict[str, Any]) -> tuple[float, float, float]:
    """Of a step: its products, attention and convolutions, the bytes of everything else, and the host's launches."""
    rates = content["rates"]
    others = sum(counts["bytes"].values()) - counts["product_bytes"]
    return (
        max(counts["flops"] / rates["flops_per_s"], counts["product_bytes"] / rates["bytes_per_s"]),
        others / rates["bytes_per_s"],
        sum(counts["launches"].values()) * content["host_s_per_launch"],
    )


def training(content: dict[str, Any] | None = None) -> Table:
    """A training step of each system and batch, and the times of its parts."""
    content = content or load(FILE)
    rows: list[list[Cell | str]] = []
    for system, steps in content["steps"].items():
        for name, counts in steps.items():
            if name.startswith("training"):
                times = seconds(counts, content)
                launches, waits = sum(counts["launches"].values()), len(counts["waits"])
                numbers = [cell(number, _COUNT) for number in (launches, waits)]
                rows.append([f"{system}, {name.split()[1]}", *numbers, *(cell(t, _MS) for t in (*times, sum(times)))])
    headers = ["system, tokens", "launches", "waits", "products, ms", "other bytes, ms", "launches, ms", "sum, ms"]
    return Table(source(FILE), headers, rows)


def single(content: dict[str, Any] | None = None) -> Table:
    """Launches of a layer of each side, forward and backward, of a decoding step, and of an update outside graphs."""
    content = content or load(FILE)
    rows: list[list[Cell | str]] = []
    for system, steps in content["steps"].items():
        counts = [steps.get(name) for name in _SINGLE]
        rows.append([system, *(cell(c and sum(c["launches"].values()), _COUNT) for c in counts)])
    return Table(source(FILE), ["launches", "encoder layer", "decoder layer", "decoding step", "update, graph"], rows)


TABLES: dict[str, Callable[[], Table]] = {"counted training": training, "counted layers": single}
