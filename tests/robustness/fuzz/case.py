"""One case of the fuzzer: sizes, type, options, memory layouts and pieces, from which all tensors follow.

A case is a frozen dataclass of plain values: what hypothesis prints of a failure can be pasted into test_fuzz.py.
"""

from __future__ import annotations

import dataclasses
import random
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tests.cuda.calls import lay_out
from tests.robustness.fuzz.views import random_view

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# `planes`: the channels are not contiguous (for which the public functions make a copy).
ROWS = ("tbc", "btc", "sliced", "odd", "still", "planes")
FILTERS = ("plain", "btc", "sliced", "odd", "still", "taps_first")
# What the weights are before normalisation.
LOGITS = ("normal", "small", "large", "zero", "equal", "extreme", "masked")


@dataclasses.dataclass(frozen=True)
class Case(ABC):
    """What the convolutions and talkconv have in common.

    `pieces`: None for a full pass, else how many tokens each call of the step function is given, whose sum is `steps`;
    `seen`: rows of the state before the first of them. `reorder`: the batch is shuffled between calls, with repetition.
    `views`: the seed of a memory layout for every tensor, instead of those that `rows`, `grads` and `filters` name.
    """

    steps: int
    batch: int
    heads: int
    per_head: int
    dtype: str = "float32"
    lengths: tuple[int, ...] | None = None
    long_lengths: bool = True
    edges: tuple[int, ...] | None = None
    rows: str = "tbc"
    grads: str = "tbc"
    pieces: tuple[int, ...] | None = None
    seen: int = 0
    reorder: bool = False
    views: int | None = None
    seed: int = 0

    @property
    def channels(self) -> int:
        return self.heads * self.per_head

    @property
    @abstractmethod
    def history(self) -> int:
        """Rows that a state can hold."""

    def sequences(self) -> dict[str, Tensor]:
        """The arguments `lengths` and `cu_seqlens`, where there are any."""
        if self.lengths is not None:
            lengths = torch.tensor(self.lengths, dtype=torch.int64 if self.long_lengths else torch.int32)
            return {"lengths": self._lay("lengths", lengths, keep=True)}
        if self.edges is not None:
            return {"cu_seqlens": self._lay("edges", torch.tensor(self.edges, dtype=torch.int32), keep=True)}
        return {}

    def spans(self) -> Tensor:
        """(T, B, 2): the first row and the one after the last of each row's sequence."""
        span = torch.tensor([0, self.steps]).repeat(self.steps, self.batch, 1)
        if self.lengths is not None:
            span[..., 1] = torch.tensor(self.lengths, dtype=torch.int64)
        for first, last in zip((self.edges or ())[:-1], (self.edges or ())[1:], strict=True):
            span[first:last] = torch.tensor([first, last])
        return span

    def orders(self) -> list[Tensor]:
        """Where each sentence of the batch comes from, before each piece but the first."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        count = len(self.pieces or ()) - 1
        if not self.reorder:
            return [torch.arange(self.batch)] * count
        return [torch.randint(max(self.batch, 1), (self.batch,), generator=generator) for _ in range(count)]

    def _normal(self, *shape: int, offset: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + offset)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def _lay(self, name: str, dense: Tensor, layout: str = "plain", keep: bool = False) -> Tensor:
        """A tensor in a memory layout, or in a random one; floating tensors in the case's type."""
        dense = dense.to(DTYPES[self.dtype]) if dense.is_floating_point() else dense
        if self.views is not None:
            return random_view(dense, random.Random(f"{self.views} {name}"), keep=keep)
        if layout == "planes":
            return dense.movedim(-1, 0).contiguous().movedim(0, -1)
        return lay_out(dense, layout)

    def grad(self) -> Tensor:
        """The gradient of the output, (T, B, C)."""
        return self._lay("grad", self._normal(self.steps, self.batch, self.channels, offset=3), self.grads)

    def grad_state(self) -> Tensor:
        """The gradient of the last state of a case in pieces."""
        rows = min(self.seen + self.steps, self.history)
        return self._lay("grad_state", self._normal(rows, self.batch, self.channels, offset=4))

    def state(self) -> Tensor:
        """The rows before the first piece."""
        return self._lay("state", self._normal(self.seen, self.batch, self.channels, offset=5))


@dataclasses.dataclass(frozen=True)
class Convolution(Case):
    """A case of lightconv or dynamicconv. `filters`: memory layout of the weight; `logits`: one of LOGITS."""

    operator: str = "lightconv"
    size: int = 3
    padding_l: int = 1
    normalize: str = "softmax"
    dropout: float = 0.0
    bias: bool = False
    glu: bool = False
    renorm: bool = False
    logits: str = "normal"
    filters: str = "plain"

    @property
    def dynamic(self) -> bool:
        return self.operator == "dynamicconv"

    @property
    def history(self) -> int:
        return self.size - 1

    def options(self) -> dict:
        """Keyword arguments of the public functions, but for bias and sequences."""
        options = {"normalize": self.normalize, "dropout": self.dropout, "glu": self.glu}
        return options | ({"renorm_padding": self.renorm} if self.dynamic else {})

    def x(self) -> Tensor:
        width = self.channels * (2 if self.glu else 1)
        return self._lay("x", self._normal(self.steps, self.batch, width), self.rows)

    def weight(self) -> Tensor:
        shape = (*(self.steps, self.batch) * self.dynamic, self.heads, self.size)
        weight = self._normal(*shape, offset=1)
        if self.logits == "masked":
            # As a model masks taps: some weights −∞, but never a whole filter.
            banned = self._normal(*shape, offset=6) > 0.5
            banned[..., 0] = False
            weight = weight.masked_fill(banned, float("-inf"))
        else:
            scale = {"normal": 1, "small": 1e-2, "large": 6, "zero": 0, "equal": 0, "extreme": 1e4}[self.logits]
            weight = weight * scale + (3 if self.logits == "equal" else 0)
        if self.dynamic:
            return self._lay("weight", weight, self.filters)
        # Layouts of a (H, K) tensor: its heads in the place of time.
        return self._lay("weight", weight[:, None], self.filters)[:, 0]

    def bias_tensor(self) -> Tensor | None:
        return self._lay("bias", self._normal(self.channels, offset=2)) if self.bias else None


@dataclasses.dataclass(frozen=True)
class Talk(Case):
    """A case of talkconv: windows of up to `left` and `right` rows times offsets in 0 … `most`.

    `ends`: "between" rows, or "whole" numbers of rows and offsets 0 and 1 among them. `far`: some offsets are negative,
    some infinite.
    """

    left: int = 3
    right: int = 0
    most: float = 1.0
    ends: str = "between"
    far: bool = False
    filters: str = "plain"

    @property
    def history(self) -> int:
        return self.left

    def x(self) -> Tensor:
        return self._lay("x", self._normal(self.steps, self.batch, self.channels), self.rows)

    def offsets(self) -> tuple[Tensor, Tensor | None]:
        """offset_left and offset_right (T, B, H); the second None for right = 0."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 1)
        sides = []
        for reach in (self.left, self.right):
            shape = (self.steps, self.batch, self.heads)
            offset = torch.rand(shape, generator=generator, dtype=torch.float64) * self.most
            kind = torch.randint(8, shape, generator=generator)
            if self.ends == "whole":
                # Quarters are exact in every type.
                offset = (offset * 4).round() / 4
            else:
                rows = offset * reach
                offset = (rows.floor() + 0.1 + 0.8 * (rows - rows.floor())) / max(reach, 1)
                offset = offset.clamp(max=self.most)
            if self.far:
                offset = torch.where(kind == 0, -offset, offset)
                if self.most > 1:
                    offset = torch.where(kind == 1, torch.inf, offset)
            layout = "tbc" if self.filters in ("plain", "taps_first") else self.filters
            sides.append(self._lay(f"offset {len(sides)}", offset, layout) if reach or not sides else None)
        return sides[0], sides[1]
