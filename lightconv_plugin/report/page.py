"""The report as one HTML page. Everything that comes from a run is escaped here, in one place."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from lightconv_plugin.report import paper, plots
from lightconv_plugin.report.kernels import FIXED, Layer
from lightconv_plugin.report.loading import Sentence
from lightconv_plugin.report.runs import Run
from lightconv_plugin.report.scores import MEASURES
from lightconv_plugin.report.style import STYLE
from lightconv_plugin.report.translate import Group, differences

# Nothing may be loaded and nothing may run, whatever should slip into the text.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass
class Shown:
    """What a run's model did. sentences: those whose kernels are drawn over time; read: how many gave the means."""

    layers: list[Layer]
    sentences: list[Sentence] = field(default_factory=list)
    read: int = 0
    subset: str = ""


def build(runs: Sequence[Run], kernels: dict[str, Shown], groups: Sequence[Group], made: str) -> str:
    """The page. kernels: by the run's name. made: a line about the page's origin."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} trainings"
    sections = [
        ("runs", "Runs", _runs(runs)),
        ("curves", "Learning curves", _curves(runs)),
        ("scores", "Scores", _scores(runs)),
        ("kernels", "Learned kernels", _kernels(runs, kernels)),
        ("translations", "Sample translations", _translations(runs, groups)),
    ]
    links = "".join(f'<a href="#{key}">{heading}</a>' for key, heading, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{heading}</h2>{content}</section>' for key, heading, content in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} – lightconv report</title><style>{STYLE}</style></head>"
        f'<body><header><h1>{escape(title)}</h1><p class="soft">{escape(made)}</p>'
        f'<nav aria-label="Sections">{links}</nav></header><main>{body}</main></body></html>\n'
    )


def _table(
    head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], name: str, numbers: Sequence[int] = ()
) -> str:
    """A table in a box that scrolls by itself. head, cells: HTML; rows: (class, cells), the first heads the row."""

    def kind(column: int) -> str:
        return ' class="number"' if column in numbers else ""

    top = "".join(f'<th scope="col"{kind(i)}>{cell}</th>' for i, cell in enumerate(head))
    lines = []
    for style, cells in rows:
        first = f'<th scope="row">{cells[0]}</th>'
        rest = "".join(f"<td{kind(i)}>{cell}</td>" for i, cell in enumerate(cells[1:], start=1))
        lines.append(f'<tr class="{style}">{first}{rest}</tr>' if style else f"<tr>{first}{rest}</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table><caption>{escape(name)}'
        f"</caption><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


# ------------------------------------------------------------------------------------------------ runs


def _runs(runs: Sequence[Run]) -> str:
    facts = [_facts(run) for run in runs]
    rows = [("", [name, *(of[name] for of in facts)]) for name in facts[0]]
    table = _table(["", *(escape(run.name) for run in runs)], rows, "What was trained, on what, for how long")
    return f'<div class="runs">{table}</div>{_problems(runs)}'


def _facts(run: Run) -> dict[str, str]:
    """Name → HTML of what is known about a run; a dash where nothing is."""
    settings, training = run.settings, run.training
    mixers = "; ".join(f"{side}: {_grouped(kinds)}" for side, kinds in settings.mixers.items())
    data = str(settings.task.get("data") or "")
    size = ", ".join(f"{subset} {number:,}" for subset, number in training.examples.items()) if training else ""
    frequency = settings.optimization.get("update_freq")
    batch = settings.dataset.get("max_tokens")
    checkpoint = run.checkpoint.name if run.checkpoint else ""
    if run.checkpoint_updates is not None:
        checkpoint += f" ({run.checkpoint_updates:,} updates)"
    if run.averaged_from:
        checkpoint += f", mean of {len(run.averaged_from)}"
    seed = settings.common.get("seed")
    known = {
        "architecture": settings.architecture,
        "token mixers": mixers,
        "parameters": f"{run.parameters:,}" if run.parameters else "",
        "languages": " → ".join(settings.pair) if settings.pair else "",
        "data": data,
        "sentences": size,
        "seed": "" if seed is None else str(seed),
        "tokens a batch × update_freq": f"{batch} × {_plain(frequency)}" if batch else "",
        "updates": f"{training.updates:,}" if training else "",
        "time, validation included": _duration(training.seconds) if training and training.seconds else "",
        "target tokens/s": f"{training.tokens_per_second:,.0f}" if training and training.tokens_per_second else "",
        "device, as the log says": "; ".join(training.devices) if training else "",
        "checkpoint looked into": checkpoint,
    }
    return {name: escape(str(value)) if value else "–" for name, value in known.items()}


def _plain(value) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _grouped(kinds: Sequence[str]) -> str:
    if len(set(kinds)) == 1:
        return f"{len(kinds)} × {kinds[0]}"
    return ", ".join(kinds)


def _problems(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        if run.problems:
            items = "".join(f"<li>{escape(problem)}</li>" for problem in run.problems)
            parts.append(
                f"<p><strong>{escape(run.name)}</strong>: what is missing here, or to be known</p><ul>{items}</ul>"
            )
    return f'<div class="problems" role="note">{"".join(parts)}</div>' if parts else ""


# ------------------------------------------------------------------------------------------------ curves


def _curves(runs: Sequence[Run]) -> str:
    trainings = {run.name: (number, run.training) for number, run in enumerate(runs) if run.training}
    pictures = plots.curves(trainings)
    if not pictures:
        return "<p>No run has a log with statistics.</p>"
    legend = "".join(f"<li>{_swatch(number)}{escape(name)}</li>" for name, (number, _) in trainings.items())
    figures = "".join(f"<figure><h3>{escape(heading)}</h3>{svg}</figure>" for heading, svg in pictures)
    return (
        f'<ul class="legend">{legend}</ul><p class="soft">Thick: validation. Thin: training. Loss is what the '
        "criterion minimises, with its label smoothing; perplexity is without. A training that was resumed is one "
        f'line; updates that its checkpoint had not kept are left out.</p><div class="grid curves">{figures}</div>'
    )


def _swatch(number: int) -> str:
    dashes = ("", ' stroke-dasharray="6 3"', ' stroke-dasharray="2 2"')[number // plots.RUN_COLOURS % len(plots.DASHES)]
    line = (
        f'<line x1="0" y1="5" x2="26" y2="5" stroke="var(--run{number % plots.RUN_COLOURS})" stroke-width="3"{dashes}/>'
    )
    return f'<svg width="26" height="10" aria-hidden="true">{line}</svg>'


# ------------------------------------------------------------------------------------------------ scores


def _scores(runs: Sequence[Run]) -> str:
    measures = [key for key in MEASURES if any(key in score.values for run in runs for score in run.scores)]
    if not measures:
        return (
            "<p>No run has a score file (scripts/score.sh leaves CHECKPOINT.SUBSET.score) or a log of fairseq-generate."
            "</p>"
        )
    rows, notes, sources = [], {}, []
    for run in runs:
        for score in sorted(run.scores, key=lambda s: (s.subset != "test", s.subset, s.checkpoint)):
            number = notes.setdefault("; ".join(score.details), len(notes) + 1) if score.details else None
            label = f"{escape(run.name)}{f'<sup> [{number}]</sup>' if number else ''}"
            values = [f"{score.values[key]:.2f}" if key in score.values else "" for key in measures]
            rows.append(("", [label, escape(score.checkpoint) or "–", escape(score.subset) or "–", *values]))
        rows += _published(run, measures, sources)
    head = ["run", "checkpoint", "subset", *(MEASURES[key] for key in measures)]
    name = "Scores, and in italics the papers'" if sources else "Scores"
    table = _table(head, rows, name, range(3, len(head)))
    listed = "".join(f'<li value="{number}">{escape(text)}</li>' for text, number in notes.items())
    cited = "".join(f'<p class="soft">{escape(text)}</p>' for text in dict.fromkeys(sources))
    return f'{table}<ol class="soft">{listed}</ol>{cited}'


def _published(run: Run, measures: Sequence[str], sources: list[str]) -> list[tuple[str, list[str]]]:
    """Rows of the papers' numbers for the run's task and system, below its own; their sources are added."""
    settings = run.settings
    mixers = [kind for kinds in settings.mixers.values() for kind in kinds]
    task = paper.find_task(str(settings.task.get("data") or ""), settings.pair)
    fact = paper.find_fact(task, paper.system_of(mixers))
    rows = []
    subsets = {score.subset for score in run.scores}
    if fact and "test" in subsets:
        rows.append(_row(f"paper: {fact.system}", task.name, "test", fact.values, measures))
        note = f" ({fact.note})" if fact.note else ""
        sources.append(f"{fact.system} on {task.name}: {task.how}{note}. {fact.source}.")
    row = paper.ablation_row(mixers, settings.model) if task and task.name == "WMT14 En-De" else None
    if row and "valid" in subsets:
        rows.append(_row(f"paper, ablation: {row}", task.name, "valid", {"bleu": paper.ABLATION[row]}, measures))
        sources.append(f"Ablation, newstest2013, mean and standard deviation of three seeds: {paper.ABLATION_SOURCE}.")
    return rows


def _row(label: str, task: str, subset: str, values, measures: Sequence[str]) -> tuple[str, list[str]]:
    return "paper", [escape(label), escape(task), subset, *(escape(values.get(key, "")) for key in measures)]


# ------------------------------------------------------------------------------------------------ kernels


def _kernels(runs: Sequence[Run], kernels: dict[str, Shown]) -> str:
    parts = [
        '<p class="soft">Across: the position that is read, relative to the current token (negative: before it). Down: '
        "heads. Blue is positive, orange negative, full colour is the layer's largest, which is said above it. "
        "<i>lightweight</i>: the filter after normalisation. <i>dynamic</i>: the mean of the filters predicted at all "
        "positions. <i>talk</i>: how often the window ends there, on either side. <i>attention</i>: mean attention. "
        "<i>depthwise</i> and <i>conv</i>: the norm of each tap's weights.</p>"
    ]
    for run in runs:
        shown = kernels.get(run.name)
        parts.append(f"<h3>{escape(run.name)}</h3>")
        parts.append(_run_kernels(run, shown) if shown else "<p>No kernels: see the notes of this run above.</p>")
    return "".join(parts)


def _run_kernels(run: Run, shown: Shown) -> str:
    figures, maps = [], []
    for side in ("encoder", "decoder"):
        layers = [layer for layer in shown.layers if layer.side == side]
        if layers:
            picture = plots.kernels(layers, f"the {side} of {run.name}")
            figures.append(f"<figure><h4>{side}</h4>{picture}{_shares(layers)}</figure>")
    about = run.checkpoint.name if run.checkpoint else ""
    if shown.read and any(layer.kind not in FIXED for layer in shown.layers):
        pieces = "blocks" if run.settings.language_model else "sentences"
        about += f"; what depends on the text: over {shown.read} {pieces} of {shown.subset}"
    for i, sentence in enumerate(shown.sentences):
        maps.append(_over_time(run, shown.layers, i, sentence))
    return f'<p class="soft">{escape(about)}.</p><div class="grid">{"".join(figures)}</div>{"".join(maps)}'


def _shares(layers: Sequence[Layer]) -> str:
    """How much attention the picture leaves out."""
    far = [f"layer {layer.number + 1}: {layer.outside.mean():.1%}" for layer in layers if layer.outside is not None]
    return f"<figcaption>Attention further off than shown: {', '.join(far)}.</figcaption>" if far else ""


def _scrolling(picture: str, name: str) -> str:
    """A picture that may be wider than a phone."""
    return f'<figure class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">{picture}</figure>'


def _over_time(run: Run, layers: Sequence[Layer], number: int, sentence: Sentence) -> str:
    parts = []
    for side in ("encoder", "decoder"):
        mapped = [layer for layer in layers if layer.side == side and layer.maps]
        if not mapped:
            continue
        whole = sentence.tokens[side]
        tokens = whole[: len(mapped[0].maps[number][0])]
        cut = f" … (the first {len(tokens)} of {len(whole)})" if len(tokens) < len(whole) else ""
        where = f"the {side} of {run.name} on “{' '.join(tokens)}”"
        parts.append(f"<h4>{side}: {escape(' '.join(tokens))}{cut}</h4>")
        parts.append(_scrolling(plots.overview(mapped, number, where), "all layers and heads"))
        boxes = "".join(
            _scrolling(plots.time_maps(layer, number, tokens, where), f"layer {layer.number + 1}") for layer in mapped
        )
        parts.append(f'<div class="maps">{boxes}</div>')
    if not parts:
        return ""
    return (
        f"<details><summary>Kernels over time, sentence {number + 1}</summary>"
        '<p class="soft">Each row is a position and shows what it reads. First every head, each with a scale of its '
        "own; then each layer's mean over heads, with the tokens. Taps outside the sentence are not drawn.</p>"
        f"{''.join(parts)}</details>"
    )


# ------------------------------------------------------------------------------------------------ translations


def _translations(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    if not groups:
        return "<p>None: see the notes of the runs above. A language model translates nothing.</p>"
    parts = ['<p class="soft">Marked is what differs from the reference; what a translation leaves out is not.</p>']
    order = [run.name for run in runs]
    for group in groups:
        origins = "; ".join(f"{name}: {text}" for name, text in group.origins.items())
        subset = group.subset or "sentences"
        parts.append(f'<h3>{escape(subset)}</h3><p class="soft">{escape(origins)}</p>')
        for sample in group.samples:
            rows = [("source", escape(sample.source) or "–"), ("reference", escape(sample.reference))]
            rows += [
                (escape(name), _marked(sample.reference, sample.hypotheses[name]))
                for name in order
                if name in sample.hypotheses
            ]
            items = "".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in rows)
            parts.append(f'<div class="sample"><dl>{items}</dl></div>')
    return "".join(parts)


def _marked(reference: str, hypothesis: str) -> str:
    pieces = differences(reference, hypothesis)
    return " ".join(f"<mark>{escape(words)}</mark>" if differs else escape(words) for words, differs in pieces) or "–"
