"""The report as one HTML page: the values for templates/page.html.jinja."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightconv_plugin.mixers import system_of
from lightconv_plugin.report import plots
from lightconv_plugin.report.kernels import Layer
from lightconv_plugin.report.loading import Sentence
from lightconv_plugin.report.runs import Run
from lightconv_plugin.report.scores import MEASURES
from lightconv_plugin.report.translate import Group, differences
from lightconv_plugin.scoring import paper


@dataclass
class Shown:
    """The kernels of a run's model. sentences: those whose kernels are drawn over time; origin: the files read."""

    layers: list[Layer]
    sentences: list[Sentence] = field(default_factory=list)
    origin: str = ""

    def sides(self, mapped: bool = False) -> dict[str, list[Layer]]:
        """The layers of "encoder" and "decoder", without empty sides; `mapped`: only those with kernels over time."""
        layers = [layer for layer in self.layers if layer.maps or not mapped]
        sides = {side: [layer for layer in layers if layer.side == side] for side in ("encoder", "decoder")}
        return {side: found for side, found in sides.items() if found}


@dataclass
class Table:
    """rows: (CSS class, cells). notes: footnotes, numbered from 1; sources: references for the published rows."""

    head: list[str]
    rows: list[tuple[str, list[str]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


def build(runs: Sequence[Run], kernels: Mapping[str, Shown], groups: Sequence[Group], made: str) -> str:
    """Render the page. kernels: by run name. made: a line about how the page was made."""
    plots.start_page()
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.jinja").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} trainings",
        made=made,
        runs=runs,
        facts=_facts(runs),
        curves=plots.curves({run.name: (number, run.training) for number, run in enumerate(runs) if run.training}),
        scores=_scores(runs),
        kernels=kernels,
        groups=groups,
        plots=plots,
        differences=differences,
    )


def _facts(runs: Sequence[Run]) -> Table:
    facts = [_facts_of(run) for run in runs]
    rows = [("", [name, *(str(of[name] or "–") for of in facts)]) for name in facts[0]]
    return Table(["", *(run.name for run in runs)], rows)


def _facts_of(run: Run) -> dict:
    """The facts about a run, by name; "" or None if unknown."""
    settings, training = run.settings, run.training
    batch, frequency = settings.dataset.get("max_tokens"), settings.optimization.get("update_freq")
    if isinstance(frequency, (list, tuple)):
        frequency = ",".join(map(str, frequency))
    seed = settings.common.get("seed")
    checkpoint = run.checkpoint.name if run.checkpoint else ""
    if run.checkpoint_updates is not None:
        checkpoint += f" ({run.checkpoint_updates:,} updates)"
    if run.averaged_from:
        checkpoint += f", mean of {len(run.averaged_from)}"
    return {
        "architecture": settings.architecture,
        "token mixers": "; ".join(f"{side}: {_grouped(kinds)}" for side, kinds in settings.mixers.items()),
        "parameters": run.parameters and f"{run.parameters:,}",
        "languages": " → ".join(settings.pair or ()),
        "data": settings.data,
        "sentences": training and ", ".join(f"{subset} {number:,}" for subset, number in training.sentences.items()),
        "seed": None if seed is None else str(seed),
        "max_tokens × update_freq": batch and f"{batch} × {frequency}",
        "updates": training and f"{training.updates:,}",
        "time, with validation": training and training.seconds and _duration(training.seconds),
        "target tokens/s": training and training.tokens_per_second and f"{training.tokens_per_second:,.0f}",
        "trained on": training and "; then ".join(training.devices),
        "checkpoint shown": checkpoint,
    }


def _grouped(kinds: Sequence[str]) -> str:
    return f"{len(kinds)} × {kinds[0]}" if len(set(kinds)) == 1 else ", ".join(kinds)


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def _scores(runs: Sequence[Run]) -> Table:
    measures = [key for key in MEASURES if any(key in score.values for run in runs for score in run.scores)]
    table = Table(["run", "checkpoint", "subset", *(MEASURES[key] for key in measures)])
    for run in runs:
        for score in sorted(run.scores, key=lambda score: (score.subset != "test", score.subset, score.checkpoint)):
            label = run.name
            if note := "; ".join(score.details):
                if note not in table.notes:
                    table.notes.append(note)
                label += f" [{table.notes.index(note) + 1}]"
            values = [f"{score.values[key]:.2f}" if key in score.values else "" for key in measures]
            table.rows.append(("", [label, score.checkpoint or "–", score.subset or "–", *values]))
        for label, task, subset, published, source in _published(run):
            cells = [f"paper: {label}", task, subset, *(published.get(key, "") for key in measures)]
            table.rows.append(("paper", cells))
            if source not in table.sources:
                table.sources.append(source)
    return table


def _published(run: Run) -> list[tuple[str, str, str, Mapping[str, str], str]]:
    """The published scores for the run's task and system: (label, task, subset, values by measure, source)."""
    settings = run.settings
    mixers = [kind for kinds in settings.mixers.values() for kind in kinds]
    task = paper.find_task(str(settings.task.get("data") or ""), settings.pair)
    if task is None:
        return []
    fact = paper.find_fact(task, system_of(mixers), len(mixers))
    found = []
    subsets = {score.subset for score in run.scores}
    if fact and "test" in subsets:
        note = f" ({fact.note})" if fact.note else ""
        source = f"{fact.system} on {task.name}: {task.how}{note}. {fact.source}."
        found.append((fact.system, task.name, "test", fact.values, source))
    row = paper.ablation_row(mixers, settings.model) if task.name == "WMT16 En-De" else None
    if row and "valid" in subsets:
        source = f"Ablation, newstest2013, mean and standard deviation of three seeds: {paper.ABLATION_SOURCE}."
        found.append((f"ablation, {row}", task.name, "valid", {"bleu": paper.ABLATION[row]}, source))
    return found
