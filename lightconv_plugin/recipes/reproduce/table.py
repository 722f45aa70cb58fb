"""The table of all rows: RESULTS.md.

It is made only from the rows and the protocols next to their configurations, so that it is the same on every machine.
Systems and tasks without a row are listed as not run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import locked, write_text
from lightconv_plugin.paths import configs_dir, workspace
from lightconv_plugin.recipes.reproduce.protocol import (
    PAPER_NAMES,
    Protocol,
    load_yaml,
    read_protocol,
    row_digest,
    settings_of,
)
from lightconv_plugin.recipes.reproduce.rows import ROUGE, main_scores, read_rows

RELEASED = "released"  # the folder of the rows of released models, which were trained by others
SMOKE = "smoke"  # the miniature task that tests every step; not a result
SEEDS = (1, 2, 3)
DASH = "–"

HEAD = """\
# Results

Made by `lightconv reproduce --table` from the files in `{results}`. Do not edit.

Each row is one command, listed below its table: it prepares the data, trains the configuration with each seed, chooses
the number of averaged checkpoints and the length penalty on the validation set, and scores the test set with them.

- **seeds**: the number of seeds; {dash} means not run. A score without ± is from one seed, so a difference between two
  such rows may be chance.
- **valid**: the score on the validation set, with the settings chosen on it. **test**: mean ± sample standard deviation
  (n − 1) over the seeds. **best on valid**: the test score of the seed with the best validation score, as in
  the papers; it may be the lowest of the test scores.
- **paper**: the test score that a paper reports for its own training of this system on this task (source below the
  table), not measured here; {dash} if none is known.
- **average**, **lenpen**: the values chosen for each seed (a single value if all agree).
- **training**, below a table: speed and time of the training runs. Other runs may have shared the machine.
- `*` after a system: its configuration or protocol has changed since the row was made.
"""


def default_results() -> Path:
    """Where rows go: benchmarks/results/reproduction in a checkout, results/reproduction in any other workspace."""
    of_checkout = workspace() / "benchmarks/results/reproduction"
    return of_checkout if of_checkout.is_dir() else workspace() / "results/reproduction"


def check_table(table: Path) -> None:
    """Raise InputError for a file in the place of the table that is not one, such as a user's own RESULTS.md."""
    text = table.read_text(encoding="utf-8", errors="replace") if table.exists() else ""
    if text and not re.match("# Results\n\nMade by `[^`]*reproduce", text):
        raise InputError(f"{table} is not a table of lightconv reproduce, which would replace it: give `results`")


def default_table() -> Path:
    """Where the table of all rows goes."""
    return workspace() / "RESULTS.md"


@dataclass(frozen=True)
class Section:
    """A task of the table: its protocol, if its configurations still have one, and its rows by system.

    own: the protocol of each row, next to the configuration that the row names; a system is missing if it is gone.
    place: the folder of the configurations. published: they are found by name.
    """

    task: str
    protocol: Protocol | None
    rows: Mapping[str, Mapping[str, Any]]
    own: Mapping[str, Protocol]
    place: str
    published: bool

    def systems(self) -> list[str]:
        """The papers' systems first, then the others in the protocol's order, then old rows' systems by name."""
        names = dict.fromkeys([*(self.protocol.systems if self.protocol else ()), *sorted(self.rows)])
        first = [*PAPER_NAMES]
        return sorted(names, key=lambda name: first.index(name) if name in first else len(first))

    def about(self, key: str) -> str:
        """`metric`, `measure`, `test` or `title`: from the protocol, or from the rows if it no longer exists."""
        return getattr(self.protocol, key) if self.protocol else next(iter(self.rows.values()))[key]

    def protocol_of(self, system: str) -> Protocol | None:
        """The protocol of a system; None if it no longer has the system."""
        protocol = self.own.get(system) if system in self.rows else self.protocol
        return protocol if protocol and system in protocol.systems else None

    def config_of(self, system: str) -> str:
        """The configuration's name in a command."""
        if system in self.rows:
            return self.rows[system]["config"]
        return f"{self.task}/{system}" if self.published else f"{self.place}/{system}.yaml"

    def title_of(self, system: str) -> str:
        protocol = self.protocol_of(system)
        title = protocol.title_of(system) if protocol else self.rows[system]["system_title"]
        return title + ("*" if self.is_old(system) else "")

    def is_old(self, system: str) -> bool:
        """Whether the row was made with settings other than the current ones."""
        row, protocol = self.rows.get(system), self.protocol_of(system)
        if row is None or protocol is None:
            return row is not None
        # The user's file may have been damaged since.
        with contextlib.suppress(InputError):
            config = load_yaml(protocol.path.parent / f"{system}.yaml")
            if isinstance(config, Mapping):
                return row["digest"] != row_digest(protocol, system, settings_of(config, row["overrides"]))
        return True

    def paper(self, system: str) -> tuple[str, str]:
        """(the published score or a dash, its source)."""
        protocol = self.protocol_of(system)
        if protocol is None:
            return DASH, ""
        figures, source = protocol.published(system)
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
    cells = {
        "system": section.title_of(system),
        "seeds": str(len(runs)) if runs else DASH,
        "valid": with_sd(summary.get("valid")),
        "test": " / ".join(with_sd(test[name]) for name in names) or DASH,
        "best on valid": " / ".join(number(best[name]) for name in names) or DASH,
        "paper": section.paper(system)[0],
        "average": each([run["average"] for run in runs]) if runs else DASH,
    }
    if metric != "perplexity":
        cells["lenpen"] = each([run["lenpen"] for run in runs]) if runs else DASH
    if metric == "bleu":
        cells |= {"sacreBLEU": with_sd(test.get("sacrebleu")), "chrF2": with_sd(test.get("chrf"))}
    cells["parameters"] = each([run["parameters"] for run in runs]) if runs else DASH
    cells["updates"] = each([run["updates"] for run in runs]) if runs else DASH
    return cells


def markdown(rows: Sequence[Mapping[str, str]], left: int = 1) -> str:
    """A Markdown table: the first `left` columns are left-aligned, the others right-aligned."""
    columns = list(rows[0])
    align = ["left" if i < left else "right" for i in range(len(columns))]
    return tabulate(
        [[row[name] for name in columns] for row in rows], columns, "pipe", disable_numparse=True, colalign=align
    )


def grouped(of: Mapping[str, Sequence[str]], section: Section | None = None) -> list[tuple[str, str]]:
    """[(text, " (the systems it applies to, by their titles in `section`)"), …]; no systems if it applies to all."""
    texts: dict[str, list[str]] = {}
    for system, values in of.items():
        for text in dict.fromkeys(values):
            texts.setdefault(text, []).append(section.title_of(system).rstrip("*") if section else system)
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
    lines = [f"## {section.about('title')}", "", f"{measure}; test: {test}. Configurations: `{section.place}`."]
    if section.protocol and section.protocol.note:
        lines += ["", " ".join(section.protocol.note.split())]
    lines += ["", markdown([cells(section, system) for system in systems]), "", "```sh"]
    for system in systems:
        row = section.rows.get(system)
        if row:
            lines.append(command_of(row))
        else:
            lines.append(f"{command(section.config_of(system), SEEDS)}  # not run")
    lines += ["```", ""]
    rows = {system: section.rows[system] for system in systems if system in section.rows}
    papers = {system: [source] for system in systems if (source := section.paper(system)[1])}
    lines += [f"- paper: {text}{of}." for text, of in grouped(papers, section)]
    signatures = {system: row["signatures"] for system, row in rows.items()}
    lines += [f"- signature: `{text}`{of}" for text, of in grouped(signatures, section)]
    for system, row in rows.items():
        speeds = [(run["seed"], text) for run in row["runs"] if (text := speed(run))]
        if speeds:
            said = "; ".join(f"seed {seed}: {text}" for seed, text in speeds)
            lines.append(f"- training of {section.title_of(system).rstrip('*')}: {said}.")
    versions = {system: [_versions(v) for v in row["versions"]] for system, row in rows.items()}
    lines += [f"- versions: {text}{of}." for text, of in grouped(versions, section)]
    return "\n".join(lines).rstrip() + "\n"


def render_released(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The section of the released models: scores beside the paper's, time and machine."""
    table = []
    for row in rows.values():
        scores = [number(row["scores"].get(name)) for name in ("bleu_tok", "sacrebleu", "chrf")]
        cells = {"model": row["model"], "task": row["title"], "test set": row["test"]}
        cells |= dict(zip(("tokenised BLEU", "sacreBLEU", "chrF2"), scores, strict=True))
        cells |= {"paper": row["paper"] or DASH, "beam": str(row["beam"]), "lenpen": f"{row['lenpen']:g}"}
        cells |= {"parameters": f"{row['parameters']:,}", "seconds": f"{row['seconds']:,.0f}"}
        table.append(cells | {"sentences/s": f"{row['sentences_per_second']:,.1f}"})
    lines = [
        "## Released weights",
        "",
        "Trained by the papers' authors, searched and scored here. Tokenised BLEU is what the paper reports"
        "; compounds are split for WMT16 En-De. Seconds include loading.",
        "",
        markdown(table, left=3),
        "",
        "```sh",
        *(f"lightconv reproduce released/{row['model']}{' --from-text' * row['from_text']}" for row in rows.values()),
        "```",
        "",
    ]
    for label, texts in (
        ("machine", {name: [row["machine"]] for name, row in rows.items()}),
        ("signature", {name: row["signatures"] for name, row in rows.items()}),
        ("versions", {name: [_versions(v) for v in row["versions"]] for name, row in rows.items()}),
    ):
        lines += [f"- {label}: {text}{of}." for text, of in grouped(texts)]
    return "\n".join(lines).rstrip() + "\n"


def render_not_run(rest: Sequence[Section]) -> str:
    """One table of the tasks without any row: the published scores, and the command that would make a row."""
    rows = []
    for section in rest:
        row = {"task": section.about("title"), "configurations": f"`{section.place}`"}
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
        command(f"{rest[0].task}/{rest[0].systems()[0]}", SEEDS),
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


def command(config: str, seeds: Sequence[int], *more: str) -> str:
    """The command that makes a row; one of changes or of an unpublished configuration needs its own folder."""
    place = ["--runs", "DIR"] if more or config.endswith(".yaml") else []
    return shlex.join(["lightconv", "reproduce", config, "--seeds", *map(str, seeds), *place, *more])


def command_of(row: Mapping[str, Any]) -> str:
    """The command that made a row."""
    preparing = row.get("prepare_options")  # older rows do not say
    options = [f"--prepare-options={preparing}"] if preparing else []
    return command(row["config"], [run["seed"] for run in row["runs"]], *options, *row["overrides"])


def sections(results: Path, configs: Path, not_run: bool = True) -> list[Section]:
    """The tasks with a row, sorted by name; with `not_run`, also those in `configs`, and without the miniature."""
    rows = read_rows(results)
    rows.pop(RELEASED, None)
    names = set(rows)
    if not_run:
        names |= {str(path.parent.relative_to(configs)) for path in configs.rglob("protocol.yaml")}
        names -= {SMOKE}
    return [_section(name, rows.get(name, {}), configs) for name in sorted(names)]


def _section(task: str, rows: Mapping[str, Mapping[str, Any]], configs: Path) -> Section:
    own = {}
    for system, row in rows.items():
        path = Path(row["config"])
        if path.suffix != ".yaml":
            folder = configs / path.parent
            if (folder / "protocol.yaml").is_file():
                own[system] = read_protocol(folder)
        else:
            # The user's file may have been moved or damaged; that must not keep the other rows from the table.
            with contextlib.suppress(InputError):
                own[system] = read_protocol(path.parent)
    published = configs / task
    folders = {protocol.path.parent: protocol for protocol in own.values()}
    if (published / "protocol.yaml").is_file() and (not folders or published in folders):
        return Section(task, read_protocol(published), rows, own, f"configs/{task}", True)
    protocol = next(iter(folders.values()), None)
    place = f"configs/{task}" if protocol is None else str(protocol.path.parent)
    return Section(task, protocol, rows, own, place, protocol is None)


def table_text(results: Path, configs: Path, root: Path, not_run: bool = True) -> str:
    """The text of RESULTS.md: a table for each of the `sections`. root: it names `results` relative to this folder."""
    shown = os.path.relpath(results, root) if results.is_relative_to(root) else results.name
    text = HEAD.format(results=shown, dash=DASH)
    known = sections(results, configs, not_run)
    text += "".join(f"\n{render_section(section)}" for section in known if section.rows)
    if released := read_rows(results).get(RELEASED):
        text += f"\n{render_released(released)}"
    if rest := [section for section in known if not section.rows]:
        text += f"\n{render_not_run(rest)}"
    return text


def write_table(results: Path, table: Path, configs: Path, not_run: bool = True) -> str:
    """Write `table_text`; returns it. Writers take turns, so that the last one has read every row.

    Raises InputError as `check_table` does.
    """
    results.mkdir(parents=True, exist_ok=True)
    with locked(results):
        check_table(table)
        text = table_text(results, configs, workspace(), not_run)
        write_text(table, text)
    return text
