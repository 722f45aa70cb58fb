"""Rows of reproductions: means over seeds. A row is a JSON file RESULTS/TASK/SYSTEM.json."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import locked, write_text

ROUGE = ("rouge1", "rouge2", "rougeLsum")
_UNITED = ("signatures", "versions")  # a row's lists of what was used for any of its seeds
_MERGED = ("runs", *_UNITED)  # what a row must have that seeds are added to


def mean_sd(values: Sequence[float]) -> dict[str, float | None]:
    """The mean and the sample standard deviation (n − 1); the latter is None for a single value."""
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}


def main_scores(metric: str, by: str) -> tuple[str, ...]:
    """The scores in the test column: ROUGE-1, -2 and summary-level -L for summaries, otherwise the tuned score."""
    return ROUGE if metric == "rouge" else (by,)


def best_seed(runs: Sequence[Mapping[str, Any]], metric: str) -> Mapping[str, Any]:
    """The run with the best validation score; the first one if several are equal."""
    return (min if metric == "perplexity" else max)(runs, key=lambda run: run["valid"])


def summarise(runs: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """Means over seeds of `valid` and of every `test` score, and the test scores of the seed that is best on valid.

    runs: each with seed, valid (a number) and test (scores by name).
    """
    best = best_seed(runs, metric)
    return {
        "valid": mean_sd([run["valid"] for run in runs]),
        "test": {name: mean_sd([run["test"][name] for run in runs]) for name in best["test"]},
        "best_seed": best["seed"],
        "test_of_best_seed": dict(best["test"]),
    }


def row_path(results: Path, row: Mapping[str, Any]) -> Path:
    """RESULTS/TASK/SYSTEM.json."""
    return results / row["task"] / f"{row['system']}.json"


def with_earlier_seeds(results: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row, plus earlier seeds from its file in `results`, for example run on another day or another machine.

    Earlier seeds are kept only if they were made with the same configuration, settings, protocol and data. If a seed
    is in both, the new run replaces the earlier one.

    Raises InputError if the file is not a row: one with the marks of a git conflict, say, has seeds to rescue.
    """
    new, path = {run["seed"] for run in row["runs"]}, row_path(results, row)
    if not path.exists():
        return dict(row)
    known = _read_row(results, path, _MERGED)
    earlier = [run for run in known["runs"] if run["seed"] not in new and _same_data(run, row["runs"][0])]
    if not earlier or _made_of(known) != _made_of(row):
        return dict(row)
    runs = sorted([*earlier, *row["runs"]], key=lambda run: run["seed"])
    together = {key: known[key] + [item for item in row[key] if item not in known[key]] for key in _UNITED}
    return {**row, "runs": runs, "summary": summarise(runs, row["metric"]), **together}


def _made_of(row: Mapping[str, Any]) -> list[Any]:
    """What rows have in common if their seeds belong together. The digest has what the overrides change."""
    return [row.get("digest"), row.get("config")]


def _same_data(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two runs had the same data and raw references; older ones do not say, and count as if they had."""
    return all(one.get(key) == other.get(key) for key in ("data", "references") if key in one and key in other)


def add_row(results: Path, row: Mapping[str, Any]) -> Path:
    """Write a row with the earlier seeds of its file. Writers take turns, so that none loses the seeds of another."""
    results.mkdir(parents=True, exist_ok=True)
    with locked(results):
        return write_row(results, with_earlier_seeds(results, row))


def write_row(results: Path, row: Mapping[str, Any]) -> Path:
    """Write RESULTS/TASK/SYSTEM.json atomically."""
    path = row_path(results, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(row, ensure_ascii=False, indent=1) + "\n")
    return path


def check_row(results: Path, task: str, system: str) -> None:
    """Raise InputError if there is a file of this row, and no seeds can be added to it."""
    path = row_path(results, {"task": task, "system": system})
    if path.exists():
        _read_row(results, path, _MERGED)


def _read_row(results: Path, path: Path, needed: Sequence[str] = ()) -> dict[str, Any]:
    """The row in a file. InputError if it is none, or has not all keys that are `needed`."""
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        place, _ = row_path(results, row), [row[key] for key in needed]
        _ = [run["seed"] for run in row.get("runs", ())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a row of lightconv reproduce ({type(error).__name__}: {error})") from None
    if place != path:
        raise InputError(f"{path} has the row of {row['task']}/{row['system']}, which belongs in {place}")
    return row


def read_rows(results: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """{task: {system: row}} of all rows. InputError for a file that is not a row."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(results.rglob("*.json")):
        row = _read_row(results, path)
        rows.setdefault(row["task"], {})[row["system"]] = row
    return rows
