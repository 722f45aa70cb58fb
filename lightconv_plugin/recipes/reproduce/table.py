"""Rows of reproductions and the table of all of them: means over seeds, and RESULTS.md.

A row is a JSON file RESULTS/TASK/SYSTEM.json. The table is made only from these files and the protocols in configs/,
so that it is the same on every machine. Systems and tasks without a row are listed as not run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from lightconv_plugin.errors import InputError
from lightconv_plugin.paths import configs_dir, workspace
from lightconv_plugin.recipes.reproduce.protocol import (
    PAPER_NAMES,
    Protocol,
    load_yaml,
    read_protocol,
    row_digest,
    settings_of,
)
from lightconv_plugin.recipes.steps import write_text

SMOKE = "smoke"  # the miniature task that tests every step; not a result
SEEDS = (1, 2, 3)
DASH = "–"
ROUGE = ("rouge1", "rouge2", "rougeLsum")
_UNITED = ("signatures", "versions")  # a row's lists of what was used for any of its seeds

HEAD = """\
# Results

Made by `lightconv reproduce --table` from the files in `{results}`; not written by hand.

Each row is one command, listed below its table: it prepares the data, trains the configuration with each seed, chooses
the number of averaged checkpoints and the length penalty on the validation set, and scores the test set with them.

- **seeds**: how many were run; {dash} means not run. A mean without ± is of one seed: a difference between two such
  rows may be chance.
- **valid**: the score on the validation set, with the settings chosen on it. **test**: mean ± sample standard deviation
  (n − 1) over the seeds. **best seed**: the test score of the seed with the best validation score, as the papers do.
- **paper**: the test score that a paper reports for its own training of this system on this task (source below);
  {dash} if none is known. It was not measured here.
- **average**, **lenpen**: what was chosen for each seed (once if all agree).
- **training**, below a table: speed and time as they were. Other trainings may have shared the machine.
- `*` after a system: its configuration or protocol has changed since the row was made.
"""


def default_results() -> Path:
    """Where rows go: benchmarks/results/reproduction in a checkout, results/reproduction in any other workspace."""
    of_checkout = workspace() / "benchmarks/results/reproduction"
    return of_checkout if of_checkout.is_dir() else workspace() / "results/reproduction"


def default_table() -> Path:
    """Where the table of all rows goes."""
    return workspace() / "RESULTS.md"


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

    Earlier seeds are kept only if they were made with the same configuration, overrides and protocol. If a seed is in
    both, the new run replaces the earlier one.
    """
    new = {run["seed"] for run in row["runs"]}
    try:
        known = json.loads(row_path(results, row).read_text(encoding="utf-8"))
        earlier = [run for run in known["runs"] if run["seed"] not in new]
    except (OSError, ValueError, KeyError, TypeError):  # no file, or not a row: it is replaced
        return dict(row)
    if not earlier or any(known.get(key) != row[key] for key in ("digest", "config", "overrides")):
        return dict(row)
    runs = sorted([*earlier, *row["runs"]], key=lambda run: run["seed"])
    together = {key: known[key] + [item for item in row[key] if item not in known[key]] for key in _UNITED}
    return {**row, "runs": runs, "summary": summarise(runs, row["metric"]), **together}


def write_row(results: Path, row: Mapping[str, Any]) -> Path:
    """Write RESULTS/TASK/SYSTEM.json atomically."""
    path = row_path(results, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(row, ensure_ascii=False, indent=1) + "\n")
    return path


def read_rows(results: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """{task: {system: row}} of all rows.

    Raises:
        InputError: a file is not a row, or is in the wrong place.
    """
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(results.rglob("*.json")):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            place = row_path(results, row)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is not a row of lightconv reproduce ({type(error).__name__}: {error})") from None
        if place != path:
            raise InputError(f"{path} has the row of {row['task']}/{row['system']}, which belongs in {place}")
        rows.setdefault(row["task"], {})[row["system"]] = row
    return rows


@dataclass(frozen=True)
class Section:
    """A task of the table: its protocol, if its configurations still have one, and its rows by system."""

    task: str
    protocol: Protocol | None
    rows: Mapping[str, Mapping[str, Any]]

    def systems(self) -> list[str]:
        """The papers' systems first, then the others in the protocol's order, then old rows' systems by name."""
        names = dict.fromkeys([*(self.protocol.systems if self.protocol else ()), *sorted(self.rows)])
        first = [*PAPER_NAMES]
        return sorted(names, key=lambda name: first.index(name) if name in first else len(first))

    def about(self, key: str) -> str:
        """`metric`, `measure`, `test` or `title`: from the protocol, or from the rows if it no longer exists."""
        return getattr(self.protocol, key) if self.protocol else next(iter(self.rows.values()))[key]

    def title_of(self, system: str) -> str:
        if self.protocol and system in self.protocol.systems:
            return self.protocol.title_of(system) + ("*" if self.is_old(system) else "")
        return self.rows[system]["system_title"] + "*"

    def is_old(self, system: str) -> bool:
        """Whether the row was made with settings other than the current ones."""
        row = self.rows.get(system)
        if row is None:
            return False
        if self.protocol is None or system not in self.protocol.systems:
            return True
        config = load_yaml(self.protocol.path.parent / f"{system}.yaml")
        return row["digest"] != row_digest(self.protocol, system, settings_of(config, row["overrides"]))

    def paper(self, system: str) -> tuple[str, str]:
        """(the published score or a dash, its source)."""
        if self.protocol is None or system not in self.protocol.systems:
            return DASH, ""
        figures, source = self.protocol.published(system)
        metric = self.about("metric")
        names = ROUGE if metric == "rouge" else (metric,)
        return "/".join(figures[name] for name in names) if figures else DASH, source


def number(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def with_sd(summary: Mapping[str, float | None] | None) -> str:
    """A mean, with ± its deviation if there is one."""
    if summary is None:
        return DASH
    return number(summary["mean"]) + ("" if summary["sd"] is None else f" ± {summary['sd']:.2f}")


def each(values: Sequence[Any]) -> str:
    """A value for each seed, or a single value if all agree."""
    shown = [DASH if value is None else f"{value:,}" if isinstance(value, int) else f"{value:g}" for value in values]
    return shown[0] if len(set(shown)) == 1 else ", ".join(shown)


def cells(section: Section, system: str) -> dict[str, str]:
    """A system's table cells, by column title."""
    metric, row = section.about("metric"), section.rows.get(system)
    runs = row["runs"] if row else []
    summary = row["summary"] if row else {}
    names = main_scores(row["metric"], row["by"]) if row else ()
    test, best = summary.get("test", {}), summary.get("test_of_best_seed", {})
    found = {
        "system": section.title_of(system),
        "seeds": str(len(runs)) if runs else DASH,
        "valid": with_sd(summary.get("valid")),
        "test": " / ".join(with_sd(test[name]) for name in names) or DASH,
        "best seed": " / ".join(number(best[name]) for name in names) or DASH,
        "paper": section.paper(system)[0],
        "average": each([run["average"] for run in runs]) if runs else DASH,
    }
    if metric != "perplexity":
        found["lenpen"] = each([run["lenpen"] for run in runs]) if runs else DASH
    if metric == "bleu":
        found |= {"sacreBLEU": with_sd(test.get("sacrebleu")), "chrF2": with_sd(test.get("chrf"))}
    found["parameters"] = each([run["parameters"] for run in runs]) if runs else DASH
    found["updates"] = each([run["updates"] for run in runs]) if runs else DASH
    return found


def markdown(rows: Sequence[Mapping[str, str]], left: int = 1) -> str:
    """A Markdown table: the first `left` columns are left-aligned, the others right-aligned."""
    columns = list(rows[0])
    align = ["left" if i < left else "right" for i in range(len(columns))]
    return tabulate(
        [[row[name] for name in columns] for row in rows], columns, "pipe", disable_numparse=True, colalign=align
    )


def grouped(section: Section, of: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """[(text, " (the systems it applies to)"), …]; without the systems if a text applies to all."""
    texts: dict[str, list[str]] = {}
    for system, values in of.items():
        for text in dict.fromkeys(values):
            texts.setdefault(text, []).append(section.title_of(system).rstrip("*"))
    return [(text, "" if len(names) == len(of) else f" ({', '.join(names)})") for text, names in texts.items()]


def speed(run: Mapping[str, Any]) -> str:
    """One training's target tokens per second, time spent in updates, and hardware.

    Empty if its log does not say, or if the hardware is unknown (the threads of a training that was taken over).
    """
    if run["tokens_per_second"] is None or not (run["gpus"] or run["threads"]):
        return ""
    if run["gpus"]:
        place = f"{len(run['gpus'])} × {run['gpus'][0]}"
    else:
        place = f"{run['threads']} thread{'s' if run['threads'] != 1 else ''}"
    return f"{run['tokens_per_second']:,.0f} tokens/s, {run['train_seconds'] / 60:,.1f} min ({place})"


def render_section(section: Section) -> str:
    """A task's heading, table, commands and notes about its rows."""
    systems = section.systems()
    test, measure = section.about("test"), section.about("measure")
    lines = [f"## {section.about('title')}", "", f"{measure}; test: {test}. Configurations: `configs/{section.task}`."]
    if section.protocol and section.protocol.note:
        lines += ["", " ".join(section.protocol.note.split())]
    lines += ["", markdown([cells(section, system) for system in systems]), "", "```sh"]
    for system in systems:
        row = section.rows.get(system)
        if row:
            lines.append(command(row["config"], [run["seed"] for run in row["runs"]], row["overrides"]))
        else:
            lines.append(f"{command(f'{section.task}/{system}', SEEDS, ())}  # not run")
    lines += ["```", ""]
    rows = {system: section.rows[system] for system in systems if system in section.rows}
    papers = {system: [source] for system in systems if (source := section.paper(system)[1])}
    lines += [f"- paper: {text}{of}." for text, of in grouped(section, papers)]
    signatures = {system: row["signatures"] for system, row in rows.items()}
    lines += [f"- signature: `{text}`{of}" for text, of in grouped(section, signatures)]
    for system, row in rows.items():
        speeds = [(run["seed"], text) for run in row["runs"] if (text := speed(run))]
        if speeds:
            said = "; ".join(f"seed {seed}: {text}" for seed, text in speeds)
            lines.append(f"- training of {section.title_of(system).rstrip('*')}: {said}.")
    versions = {system: [_versions(v) for v in row["versions"]] for system, row in rows.items()}
    lines += [f"- versions: {text}{of}." for text, of in grouped(section, versions)]
    return "\n".join(lines).rstrip() + "\n"


def render_not_run(rest: Sequence[Section]) -> str:
    """One table of the tasks without any row: the published scores, and the command that would make a row."""
    rows = []
    for section in rest:
        row = {"task": section.about("title"), "configurations": f"`configs/{section.task}`"}
        row |= {"test": section.about("test"), "measure": section.about("measure")}
        row |= {title: section.paper(system)[0] for system, title in PAPER_NAMES.items()}
        extra = [system for system in section.systems() if system not in PAPER_NAMES]
        row["others"] = "; ".join(f"{section.title_of(system)}: {section.paper(system)[0]}" for system in extra) or DASH
        rows.append(row)
    of: dict[str, list[str]] = {}
    for section in rest:
        for system in section.systems():
            if source := section.paper(system)[1]:
                of.setdefault(source, []).append(f"{section.title_of(system)} on {section.about('title')}")
    lines = [
        "## Not run",
        "",
        "One command each, such as the one below; costs: `benchmarks/COSTS.md`. The figures are the papers'.",
        "",
        markdown(rows, left=4),
        "",
        "```sh",
        command(f"{rest[0].task}/{rest[0].systems()[0]}", SEEDS, ()),
        "```",
        "",
        *(f"- paper: {source}: {', '.join(whose)}." for source, whose in of.items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _versions(known: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {value}" for name, value in known.items() if value)


def config_name(config: Path) -> str:
    """A configuration's name in a command: TASK/SYSTEM if it is in `configs_dir()`, otherwise its path."""
    configs = configs_dir()
    return config.relative_to(configs).with_suffix("").as_posix() if config.is_relative_to(configs) else str(config)


def command(config: str, seeds: Sequence[int], overrides: Sequence[str]) -> str:
    """The command that makes a row; an unpublished configuration needs its own folder."""
    place = ["--runs", "DIR"] if overrides or config.endswith(".yaml") else []
    return shlex.join(["lightconv", "reproduce", config, "--seeds", *map(str, seeds), *place, *overrides])


def sections(results: Path, configs: Path, tasks: Sequence[str] | None = None) -> Iterator[Section]:
    """All tasks in `configs` with a protocol, and those with a row, sorted by name; or only `tasks`."""
    rows = read_rows(results)
    if tasks is None:
        found = [str(path.parent.relative_to(configs)) for path in configs.rglob("protocol.yaml")]
        tasks = sorted({*found, *rows} - {SMOKE})
    for name in tasks:
        protocol = read_protocol(configs / name) if (configs / name / "protocol.yaml").is_file() else None
        yield Section(name, protocol, rows.get(name, {}))


def write_table(results: Path, table: Path, configs: Path, tasks: Sequence[str] | None = None) -> str:
    """Write the table of all rows and return its text. Writers take turns, so that the last one has read every row."""
    results.mkdir(parents=True, exist_ok=True)
    with _locked(results):
        shown = os.path.relpath(results, workspace()) if results.is_relative_to(workspace()) else results.name
        text = HEAD.format(results=shown, dash=DASH)
        known = list(sections(results, configs, tasks))
        text += "".join(f"\n{render_section(section)}" for section in known if section.rows)
        if rest := [section for section in known if not section.rows]:
            text += f"\n{render_not_run(rest)}"
        write_text(table, text)
    return text


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
