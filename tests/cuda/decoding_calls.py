"""The calls of the kernels for a step of beam search in the tests; their answers are the oracle's."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from tests.ops import oracle

from .calls import lay_out
from .operators import Operators

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def ring_step(
    on_host: Operators,
    x: Tensor,
    ring: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ancestors: Tensor,
    now: Tensor,
    softmax: bool,
) -> Tensor:
    """The registered operator, run on the host."""
    heads, taps = weight.shape[-2:]
    numbers = {
        "type": TYPES[x.dtype],
        "float_weight": weight.dtype == torch.float32,
        "rows": len(x),
        "beams": ancestors.shape[1],
        "channels": x.shape[1],
        "heads": heads,
        "taps": taps,
        "softmax": softmax,
    }
    numbers |= dict(zip(("slots", "sentences", "width"), ring.shape, strict=False))
    inputs = {"x": x, "weight": weight.expand(len(x), -1, -1), "bias": bias, "ancestors": ancestors, "now": now}
    out = torch.full(x.shape, math.nan, dtype=x.dtype)
    on_host.runner.call(numbers | on_host.device, {}, inputs, {"out": out, "ring": ring})
    return out


def best_words(
    on_host: Operators,
    logits: Tensor,
    normalisers: Tensor | None,
    scores: Tensor | None,
    count: int,
    penalised: list[int],
    penalties: list[float],
) -> tuple[Tensor, Tensor]:
    """The registered operator, run on the host."""
    found = torch.full((len(logits), count), math.nan)
    best = torch.full(found.shape, -1, dtype=torch.int64)
    numbers = {"type": TYPES[logits.dtype], "rows": len(logits), "vocabulary": logits.shape[1], "count": count}
    numbers |= {f"penalised{i}": word for i, word in enumerate(penalised)}
    numbers |= {"penalties": len(penalised), **on_host.device}
    fractions = {f"penalty{i}": penalty for i, penalty in enumerate(penalties)}
    inputs = {"logits": logits, "normalisers": normalisers, "scores": scores}
    on_host.runner.call(numbers, fractions, inputs, {"log_probabilities": found, "best": best})
    return found, best


@dataclasses.dataclass(frozen=True)
class RingCase:
    """A step at time `now`. spare: slots, sentences and hypotheses that the ring has room for besides.

    shared: a filter (H, K) for all rows. float_weight: it is float32 whatever the inputs are. rows, filters: layouts of
    the inputs and of the filters (calls.lay_out).
    """

    taps: int = 5
    heads: int = 2
    per_head: int = 8
    now: int = 7
    sentences: int = 3
    beams: int = 2
    spare: int = 0
    dtype: torch.dtype = torch.float32
    softmax: bool = True
    shared: bool = False
    float_weight: bool = False
    bias: bool = False
    rows: str = "plain"
    filters: str = "plain"
    compute_capability: int = 80

    RESULTS: ClassVar = {"forward": ("out", "ring")}

    def tensors(self) -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(self.taps + self.now)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        count, channels = self.sentences * self.beams, self.heads * self.per_head
        slots, width = self.taps + self.spare, self.beams + self.spare
        ring = normal(slots, self.sentences + self.spare, width, channels)
        # What no step has written yet may be anything, and so may the sentences that are not searched any more.
        ring[self.now :] = math.nan
        ring[:, self.sentences :] = math.nan
        shape = (self.sentences, self.beams, 2 * (self.now + 2))
        ancestors = torch.randint(width, shape, generator=generator)[:, :, ::2]
        ancestors[:, :, self.now] = torch.arange(self.beams)
        weight = normal(*(() if self.shared else (count,)), self.heads, self.taps)
        return {
            "x": lay_out(normal(count, channels), self.rows)[:count],
            "ring": ring,
            "weight": lay_out(weight.float() if self.float_weight else weight, self.filters),
            "ancestors": ancestors,
            "now": torch.tensor([self.now]),
            "bias": normal(channels) if self.bias else None,
        }

    def forward(self, on_host: Operators, made: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        ring = made["ring"].clone()
        given = [made[name] for name in ("bias", "ancestors", "now")]
        return ring_step(on_host, made["x"], ring, made["weight"], *given, self.softmax), ring

    def expected(self, what: str, made: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        given = [made[name] for name in ("x", "ring", "weight", "ancestors")]
        return oracle.ring_step(*given, self.now, made["bias"], self.softmax)


@dataclasses.dataclass(frozen=True)
class BestCase:
    """pitch: elements from one row of the logits to the next. ties: the logits have few different values.

    crowded: the best words belong to one thread, and are more than it keeps.
    """

    words: int
    count: int = 8
    pitch: int = 0
    rows: int = 3
    dtype: torch.dtype = torch.float32
    penalties: tuple[tuple[int, float], ...] = ()
    normalisers: bool = False
    scores: bool = False
    ties: bool = False
    crowded: bool = False
    compute_capability: int = 80

    RESULTS: ClassVar = {"forward": ("log_probabilities", "best")}

    def tensors(self) -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(self.words)
        wide = torch.randn(self.rows, max(self.pitch, self.words), generator=generator) * 3
        for first in range(0, self.words, 2048) if self.crowded else ():
            wide[:, first : first + 4] += 20
        numbers = torch.rand(2, self.rows, 2, generator=generator)[:, :, 1]
        return {
            "logits": (wide.round() if self.ties else wide).to(self.dtype)[:, : self.words],
            "normalisers": numbers[0] if self.normalisers else None,
            "scores": -numbers[1] if self.scores else None,
        }

    def forward(self, on_host: Operators, made: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        words, penalties = ([pair[i] for pair in self.penalties] for i in range(2))
        found, best = best_words(on_host, *made.values(), self.count, words, penalties)
        return found, best.float()

    def expected(self, what: str, made: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        given = made["normalisers"], made["scores"], dict(self.penalties)
        found, words = oracle.best_words(made["logits"], self.count, *given)
        return found, words.double()
