"""The report's pictures: SVG elements whose text and lines take the page's colours, in light and dark mode.

Values are drawn as one colour of varying opacity, so that the page's background shows through where they are 0.
Pictures are designed for a width of 370 to 500 CSS pixels.
"""

import io
import itertools
import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from lightconv_plugin.progress import say
from lightconv_plugin.records.trainings import Record, Training
from lightconv_plugin.report.kernels import Layer

RUN_COLOURS = 8
DASHES = ("solid", (0, (4, 2)), (0, (1, 1.5)))
# Placeholder colours, replaced by the page's colours in the finished SVG.
_INK, _GRID = "#010203", "#030201"
_RUNS = [f"#0102{n:02x}" for n in range(0x10, 0x10 + RUN_COLOURS)]
_NORMS = ("conv", "depthwise", "gated_short")  # kinds of layers whose rows are norms, drawn as bars
_POSITIVE, _NEGATIVE = (0.16, 0.49, 0.88), (0.87, 0.42, 0.10)
_BOTH = "#808890"  # for a picture that may be shown on white or on black
_WIDTH = 5.2  # inches of 96 CSS pixels
_TITLE = 0.36  # inches above a panel
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lightconv",  # otherwise ids are random
    "font.size": 9,
    "text.parse_math": False,  # a token may be "$"
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.facecolor": "none",
    "axes.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}
# Of .png and .pdf, the first that has a character: matplotlib's own, and those of Chinese, Japanese and Korean.
_FONTS = (
    "DejaVu Sans", "Noto Sans CJK JP", "Source Han Sans", "IPAexGothic", "IPAGothic",
    "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback",
)  # fmt: skip
_numbers = itertools.count()


def start_page() -> None:
    """Number the pictures anew: the same page gets the same ids each time."""
    global _numbers
    _numbers = itertools.count()


def _svg(figure: Figure, alt: str, minimum: int = 0) -> Markup:
    """The figure as an <svg> element; alt: alternative text for screen readers; minimum: width in CSS pixels."""
    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about glyphs missing from matplotlib's font: the page's fonts have them
        figure.savefig(out, format="svg", metadata=nothing)
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", out.getvalue(), flags=re.DOTALL)
    colours = {_INK: "currentColor", _GRID: "var(--grid)"}
    colours |= {colour: f"var(--run{number})" for number, colour in enumerate(_RUNS)}
    for colour, name in colours.items():
        text = re.sub(rf"(fill|stroke): {colour}", rf"\1: {name}", text)
    text = re.sub(r"(style=\"[^\"]*?font: [^\";]*?px) [^\";]*", r"\1 sans-serif", text)
    prefix = f"p{next(_numbers)}-"  # makes ids unique within the page
    own = re.compile(r"(\bid=\"|url\(#|href=\"#)")
    text = re.sub("<[^>]*>", lambda tag: own.sub(rf"\1{prefix}", tag[0]), text)  # and not in the words that are shown
    view, inner = re.findall(r'<svg[^>]*?(viewBox="[^"]+")[^>]*>(.*)', text, re.DOTALL)[0]
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    head = Markup(
        '<svg class="plot" role="img" aria-label="{}" style="max-width: {}px; min-width: {}px" width="{}" height="{}" '
        'xmlns:xlink="http://www.w3.org/1999/xlink" '
    ).format(alt, width, minimum, width, height)
    return head + Markup(f"{view}>{inner}")  # matplotlib has escaped the text in it


def _context():
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    return matplotlib.rc_context(_STYLE)


def run_style(number: int) -> tuple[str, object]:
    """(colour, dashes) of the run with this number."""
    return _RUNS[number % RUN_COLOURS], DASHES[number // RUN_COLOURS % len(DASHES)]


# ------------------------------------------------------------------------------------------------ learning curves


def series(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    """(updates, values) of a statistic, only where it was logged and is finite."""
    known = [(r.update, r.values[name]) for r in records if name in r.values and np.isfinite(r.values[name])]
    return [update for update, _ in known], [value for _, value in known]


def curves(trainings: dict[str, tuple[int, Training]]) -> list[tuple[str, Markup]]:
    """Pictures with the curves of all trainings, (heading, SVG) for each logged statistic.

    trainings: (number, training) by run name.
    """
    kinds = [
        ("Loss", "loss", "loss, bits a token", False),
        ("Perplexity", "ppl", "perplexity", True),
        ("BLEU on the validation set", "bleu", "BLEU", False),
        ("Learning rate", "lr", "learning rate", False),
    ]
    found = []
    for heading, key, label, logarithmic in kinds:
        lines = []
        for name, (number, training) in trainings.items():
            lines.append((name, number, "train", *series(training.train, key)))
            lines += [(name, number, subset, *series(training.part(subset), key)) for subset in training.subsets]
        lines = [line for line in lines if line[3] and (key != "bleu" or line[2] != "train")]
        if lines:
            found.append((heading, _curve(heading, key, label, logarithmic, lines)))
    return found


def _curve(heading: str, key: str, label: str, logarithmic: bool, lines) -> Markup:
    with _context():
        figure = Figure((_WIDTH, 3.3), layout="constrained")
        axes = figure.subplots()
        for place, (_, number, subset, updates, values) in enumerate(lines):
            colour, dashes = run_style(number)
            thin = subset == "train" and len({line[2] for line in lines}) > 1
            style: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.65} if thin else {"linewidth": 1.8}
            if key == "lr":
                # Schedules are often identical: earlier lines must show through the gaps of later ones.
                here = set(zip(updates, values, strict=True))
                hidden = sum(bool(here & set(zip(*line[3:], strict=True))) for line in lines[:place])
                dashes, style["linewidth"] = (0, (4, 4 * hidden)) if hidden else dashes, 2.2
            marker = "o" if not thin and key != "lr" and len(updates) <= 30 else None
            axes.plot(updates, values, color=colour, linestyle=dashes, marker=marker, markersize=3, **style)
        # The first updates of a training from scratch would compress everything else.
        late = [v for _, _, _, xs, values in lines for x, v in zip(xs, values, strict=True) if 20 * x >= max(xs)]
        if logarithmic:
            axes.set_yscale("log")
            axes.set_ylim(min(late) * 0.9, max(late) * 1.1)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        elif key == "loss":
            axes.set_ylim(min(late) - 0.1, max(late) + 0.1)
        axes.set_xlabel("updates")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        return _svg(figure, f"{heading} by update. " + " ".join(_described(line, key == "bleu") for line in lines))


def _described(line, most: bool) -> str:
    name, _, subset, updates, values = line
    best = (max if most else min)(values)
    at = updates[values.index(best)]
    ends = f"{values[0]:.4g} at update {updates[0]}, {values[-1]:.4g} at {updates[-1]}"
    return f"{name}, {subset}: {ends}, {'highest' if most else 'lowest'} {best:.4g} at {at}."


# ------------------------------------------------------------------------------------------------ kernels


def shade(values: np.ndarray, largest: float) -> np.ndarray:
    """Values (rows, columns) → RGBA: opacity |value| / largest, blue where positive, orange where negative."""
    out = np.zeros((*values.shape, 4))
    out[..., :3] = np.where((values >= 0)[..., None], _POSITIVE, _NEGATIVE)
    out[..., 3] = np.clip(np.abs(values) / largest, 0, 1) if largest > 0 else 0
    return out


def kernels(layers: Sequence[Layer], where: str) -> Markup:
    """The layers of one side, one below the other and aligned at the current token; `where` names the side."""
    with _context():
        figure = Figure((_WIDTH, _height(layers) + 0.4))
        _column(figure, layers, 0.085 * _WIDTH, 0.895 * _WIDTH)
        return _svg(figure, f"Kernels of {where}. " + " ".join(describe(layer) for layer in layers))


def kernel_figure(columns: Sequence[tuple[str, Sequence[Layer], Sequence[str]]], form: str) -> bytes:
    """An image file with the kernels of several models side by side, each (title, layers of one side, tokens).

    If kernels depend on the text, the middle one of these layers is drawn over the tokens of the first sentence. The
    background is transparent; text and lines are in a grey that is legible on white and on black.

    form: "png", "svg" or "pdf".
    """
    mapped = [[layer for layer in layers if layer.maps] for _, layers, _ in columns]
    height = max(3.2, *(_height(layers) for _, layers, _ in columns))
    widths = [height + 0.75 if over_time else 4.2 for over_time in mapped]
    style = {name: _BOTH if value in (_INK, _GRID) else value for name, value in _STYLE.items()}
    if form != "svg":
        style["font.family"] = list(_FONTS)
    with _context(), matplotlib.rc_context(style), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure = Figure((sum(widths), height + 0.75))
        wide, high = figure.get_size_inches()
        for (title, layers, tokens), over_time, width, end in zip(
            columns, mapped, widths, np.cumsum(widths), strict=True
        ):
            left = end - width + (0.8 if over_time else 0.3)
            figure.text(left / wide, 1 - 0.1 / high, title, fontsize=11, va="top", weight="bold")
            if over_time:
                axes = figure.add_axes((left / wide, 0.65 / high, (height - 0.5) / wide, (height - 0.5) / high))
                _map(axes, over_time[len(over_time) // 2], 0, tokens)
                axes.tick_params(labeltop=False, labelbottom=True)
            else:
                _column(figure, layers, left, width - 0.6, 0.25)
        out = io.BytesIO()
        figure.savefig(out, format=form, dpi=200, metadata={"Date": None} if form == "svg" else None)
    texts = [str(warning.message) for warning in caught]
    missing = sorted({chr(int(text.split()[1])) for text in texts if text.startswith("Glyph ")})
    if missing and form != "svg":  # whose text is drawn with the reader's fonts
        shown = " ".join(missing[:5]) + " …" * (len(missing) > 5)
        say(f"no font for {shown}: the .{form} has boxes in their place; install Noto Sans CJK, or write a .svg")
    return out.getvalue()


def _heights(layers: Sequence[Layer]) -> list[float]:
    """The height of each layer's panel in inches, without its title."""
    return [max(0.30, 0.115 * len(layer.rows)) if len(layer.rows) > 2 else 0.45 for layer in layers]


def _height(layers: Sequence[Layer]) -> float:
    return sum(_heights(layers)) + _TITLE * len(layers)


def _column(figure: Figure, layers: Sequence[Layer], left: float, width: float, top: float = 0) -> None:
    """Draw layers one below the other, `left` and `top` inches from the figure's corner."""
    whole, high = figure.get_size_inches()
    first, last = min(layer.positions[0] for layer in layers), max(layer.positions[-1] for layer in layers)
    for layer, height in zip(layers, _heights(layers), strict=True):
        top += _TITLE + height
        axes = figure.add_axes((left / whole, 1 - top / high, width / whole, height / high))
        _panel(axes, layer)
        axes.set_xlim(first - 0.75, last + 0.75)
        axes.axvline(0, color=matplotlib.rcParams["text.color"], linewidth=0.6, linestyle=(0, (2, 2)), zorder=3)
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
        axes.tick_params(labelbottom=layer is layers[-1], labelsize=8, length=2)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    axes.set_xlabel("position relative to the current token", fontsize=8.5)


def _panel(axes, layer: Layer) -> None:
    title = f"layer {layer.number + 1} · {_kind(layer)}"
    rows = len(layer.rows)
    if layer.reach is not None:
        edges, density = reach_density(layer)
        _image(axes, density, (edges[0], edges[-1]), density.max())
        marks = {"color": matplotlib.rcParams["text.color"], "markersize": min(7, 60 / rows)}
        for sign, reach in zip((-1, 1) if layer.limits[1] else (-1,), layer.reach, strict=False):
            axes.plot(sign * np.median(reach, 1), range(rows), "|", **marks)
        title += " · |: median"
    elif layer.mean is None:
        axes.text(0.5, 0.5, "needs data", transform=axes.transAxes, ha="center", va="center")
    elif layer.kind in _NORMS:
        for row in range(rows):
            shift = 0.4 * row - 0.2 * (rows - 1)
            axes.bar(layer.positions + shift, layer.mean[row], width=0.8 / rows, color=(_POSITIVE, _NEGATIVE)[row])
        axes.set_ylim(0, layer.mean.max() * 1.1 or 1)
        axes.yaxis.set_major_locator(MaxNLocator(2))
        axes.set_title(title, fontsize=8.5, loc="left", pad=3)
        return
    else:
        largest = np.abs(layer.mean).max()
        _image(axes, layer.mean, (layer.positions[0] - 0.5, layer.positions[-1] + 0.5), largest)
        title += f" · max {largest:.2g}"
    axes.set_title(title, fontsize=8.5, loc="left", pad=3)
    axes.set_ylim(rows - 0.5, -0.5)
    step = max(1, rows // 4)
    axes.set_yticks(range(0, rows, step), [str(row + 1) for row in range(0, rows, step)])


def _kind(layer: Layer) -> str:
    size = len(layer.positions)
    return {
        "talk": f"talk, L = {layer.limits[0]}" + (f", R = {layer.limits[1]}" if layer.limits[1] else ""),
        "attention": "attention",
        "window_attention": f"attention, window {size}",
    }.get(layer.kind, f"{layer.kind}, K = {size}")


def _image(axes, values: np.ndarray, extent: tuple[float, float], largest: float) -> None:
    axes.imshow(
        shade(values, largest),
        extent=(*extent, len(values) - 0.5, -0.5),
        interpolation="none",
        aspect="auto",
    )
    edge = matplotlib.rcParams["grid.color"]
    axes.add_patch(Rectangle((extent[0], -0.5), extent[1] - extent[0], len(values), fill=False, edgecolor=edge))


def reach_density(layer: Layer, bins: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """TaLK's window ends: (edges in relative positions, share of the windows that end there, (H, bins)).

    bins: per token of the longest reach. Left of 0 are the left ends of the windows, right of 0 the right ends.
    """
    assert layer.reach is not None  # as in every layer that has read text
    edges, shares = [], []
    for sign, reach, limit in zip((-1, 1), layer.reach, layer.limits, strict=True):
        if not limit:
            continue
        cuts = np.linspace(0, limit, bins * limit + 1)
        share = np.stack([np.histogram(np.clip(row, 0, limit), cuts)[0] / len(row) for row in reach])
        edges.append(np.sort(sign * cuts))
        shares.append(share[:, ::sign])
    return np.unique(np.concatenate(edges)), np.concatenate(shares, 1)


def describe(layer: Layer) -> str:
    """A sentence for the picture's alternative text."""
    name = f"Layer {layer.number + 1}, {_kind(layer)}:"
    if layer.reach is not None:
        left, right = (np.median(side, 1) for side in layer.reach)
        ends = [f"{row} {a:.1f} left" + (f", {b:.1f} right" if layer.limits[1] else "")
                for row, a, b in zip(layer.rows, left, right, strict=True)]  # fmt: skip
        return f"{name} median reach in tokens: {'; '.join(ends)}."
    if layer.mean is None:
        return f"{name} not known without data."
    peaks = [
        f"{row} at {layer.positions[np.abs(values).argmax()]:+d}"
        for row, values in zip(layer.rows, layer.mean, strict=True)
    ]
    return f"{name} strongest {'; '.join(peaks)}."


# ------------------------------------------------------------------------------------------------ over time


def overview(layers: Sequence[Layer], sentence: int, where: str) -> Markup:
    """All heads of all layers for one sentence: t downwards, s to the right, each picture with its own scale."""
    layers = [layer for layer in layers if layer.maps]
    columns = max(len(layer.rows) for layer in layers)
    cell = max(0.62, (_WIDTH - 0.35) / max(columns, 4))
    size = (0.35 + cell * max(columns, 4), 0.3 + cell * len(layers))
    least = int(0.75 * 96 * size[0]) if size[0] > _WIDTH else 0
    with _context():
        figure = Figure(size)
        for i, layer in enumerate(layers):
            for j, values in enumerate(layer.maps[sentence]):
                bottom = size[1] - 0.3 - cell * (i + 1)
                box = (0.35 + cell * j + 0.03, bottom + 0.03, cell - 0.06, cell - 0.06)
                axes = figure.add_axes((box[0] / size[0], box[1] / size[1], box[2] / size[0], box[3] / size[1]))
                axes.imshow(shade(values, np.abs(values).max()), interpolation="none", aspect="auto")
                axes.set_xticks([])
                axes.set_yticks([])
                if i == 0:
                    axes.set_title(f"head {j + 1}", fontsize=8, pad=3)
                if j == 0:
                    axes.set_ylabel(f"layer {layer.number + 1}", fontsize=8, labelpad=3)
        return _svg(figure, f"Which position (down) reads which (across), for every layer and head of {where}.", least)


def time_map(layer: Layer, sentence: int, tokens: Sequence[str], where: str) -> Markup:
    """One layer's mean over heads for one sentence, with its tokens: each row's token reads the columns' tokens."""
    values = layer.maps[sentence].mean(0)
    length = len(values)
    size = 0.9 + 0.19 * length
    with _context():
        figure = Figure((size, size), layout="constrained")
        _map(figure.subplots(), layer, sentence, tokens)
        reads = [f"{tokens[t]} reads {tokens[int(np.abs(row).argmax())]}" for t, row in enumerate(values)]
        alt = f"Layer {layer.number + 1} of {where}, mean over heads; each position's strongest: {'; '.join(reads)}."
        return _svg(figure, alt, minimum=int(size * 96 * 0.8))


def _map(axes, layer: Layer, sentence: int, tokens: Sequence[str]) -> None:
    values = layer.maps[sentence].mean(0)
    largest = np.abs(values).max()
    axes.imshow(shade(values, largest), interpolation="none", aspect="equal")
    axes.set_xticks(range(len(values)), tokens, rotation=90, fontsize=7.5)
    axes.set_yticks(range(len(values)), tokens, fontsize=7.5)
    axes.tick_params(length=0, labeltop=True, labelbottom=False, pad=2)
    axes.set_title(f"layer {layer.number + 1} · {_kind(layer)} · max {largest:.2g}", fontsize=8.5, loc="left")
