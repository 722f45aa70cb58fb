"""Draws the block and its four mixers: what each position reads, computed by the operators from random numbers.

    python -m benchmarks.diagram [--out FILE]

The output of an operator for the rows of a unit matrix is the matrix of its weights: row t has what position t reads.
Needs torch and matplotlib (pip install '.[report]').
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.plots import chosen_file, figure_of
from lightconv_plugin import ops

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUT = Path("docs/images/block.png")
_T, _K = 14, 5  # positions, kernel size
_SEED = 3
_RESIDUAL = "#0072B2"


@dataclass(frozen=True)
class Mixer:
    """weights: gives the matrix (T,T). about: what decides them. cost: of T positions."""

    name: str
    weights: Callable[[], Tensor]
    about: str
    cost: str


def _unit() -> Tensor:
    """(T,1,T): channel s is 1 at position s."""
    return torch.eye(_T).unsqueeze(1)


def attention() -> Tensor:
    return (1.6 * torch.randn(_T, _T)).softmax(-1)


def lightconv() -> Tensor:
    return ops.lightconv(_unit(), (1.6 * torch.randn(1, _K)).softmax(-1), _K // 2).squeeze(1)


def dynamicconv() -> Tensor:
    return ops.dynamicconv(_unit(), (1.6 * torch.randn(_T, 1, 1, _K)).softmax(-1), _K // 2).squeeze(1)


def talkconv() -> Tensor:
    left, right = torch.rand(2, _T, 1, 1)
    return ops.talkconv(_unit(), left, right, 4, 4).squeeze(1)


MIXERS = (
    Mixer("self-attention", attention, "all positions;\nweights from pairs of words", "T² · d"),
    Mixer("LightConv", lightconv, "K neighbours;\nthe same weights at every position", "T · K · d"),
    Mixer("DynamicConv", dynamicconv, "K neighbours;\nweights predicted from each word", "T · K · d"),
    Mixer("TaLK", talkconv, "a window; its ends predicted\nfrom each word, equal weights", "T · d"),
)
# From the input to the output; None: the place of the mixer. The second entry adds the input of the part again.
BLOCK = (
    ("words, T × d", False),
    ("linear, gated (GLU)", False),
    (None, False),
    ("linear", True),
    ("decoder: attention over the source", True),
    ("feed-forward", True),
    ("to the next block, T × d", False),
)


def _block(axis: Axes) -> None:
    """The parts as boxes from top to bottom, each residual connection as an arrow around its part."""
    arrow = {"arrowstyle": "->", "color": "#555555"}
    begin = 0
    for place, (name, adds) in enumerate(BLOCK):
        ends = place in (0, len(BLOCK) - 1)
        box = {"boxstyle": "round,pad=0.45", "facecolor": "#F4F4F4" if name else "#FBE3D4", "edgecolor": "#888888"}
        text = name or "mixer over the positions:\none of the four"
        axis.text(0, -place, text, ha="center", va="center", fontsize=10, bbox=None if ends else box)
        if place:
            axis.annotate("", (0, 0.25 - place), (0, 0.75 - place), arrowprops=arrow)
        if adds:
            above, below = -begin - 0.62, -place - 0.38
            axis.plot([0, 1.5, 1.5], [above, above, below], color=_RESIDUAL, linewidth=1.2)
            axis.annotate("", (0.02, below), (1.5, below), arrowprops={"arrowstyle": "->", "color": _RESIDUAL})
            axis.text(1.56, below, "add,\nnormalise", fontsize=8, color=_RESIDUAL, va="center")
            begin = place
    axis.set_xlim(-1.5, 2.3)
    axis.set_ylim(0.4 - len(BLOCK), 0.4)
    axis.axis("off")


def _matrix(axis: Axes, mixer: Mixer) -> None:
    weights = mixer.weights()
    axis.imshow(weights.numpy(), cmap="Oranges", vmin=0, vmax=float(weights.max()))
    axis.set_title(mixer.name, fontsize=11, fontweight="bold")
    axis.set_xlabel(f"{mixer.about}\ncost: {mixer.cost}", fontsize=8.5)
    axis.set_xticks([])
    axis.set_yticks([])


def draw(file: Path) -> None:
    torch.manual_seed(_SEED)
    figure = figure_of((10, 5.8))
    grid = figure.add_gridspec(2, 3, width_ratios=(1.5, 1, 1))
    _block(figure.add_subplot(grid[:, 0]))
    for place, mixer in enumerate(MIXERS):
        axis = figure.add_subplot(grid[place // 2, 1 + place % 2])
        _matrix(axis, mixer)
        if place % 2 == 0:
            axis.set_ylabel("position", fontsize=8.5)
    figure.savefig(file, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    """Draw the picture and print its name."""
    out = chosen_file("diagram", __doc__, OUT, arguments)
    draw(out)
    print(out)


if __name__ == "__main__":
    sys.exit(report.run(main))
