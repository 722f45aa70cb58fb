"""Which rows of a beam search are alive, and from which earlier rows each of them descends."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_CAPACITY = 32


class Beams:
    """The hypotheses of a search, `width` for each of the live sentences, and their ancestry.

    What a model keeps of a step (a convolution's inputs, self-attention's keys and values) is written once, at the
    place of its hypothesis in that step, and stays there. When hypotheses are reordered, only this table of ancestors
    changes, one for all layers. A hypothesis never changes its sentence, so the table holds beam numbers.

    Finished sentences leave through `keep`: the last sentences move into their places, so that the live ones always
    come first and the rest stay where they are.

    Args:
        sentences: S, how many there are at first.
        width: hypotheses of a sentence.
        device: of all tensors.

    Attributes:
        capacity: how many sentences tensors have room for, all that there were at first.
        live: how many are still searched.
        time: the current step, −1 before the first `advance`.
        active: hypotheses of a sentence in the current step: 1 in a first step that was given one, else `width`.
    """

    def __init__(self, sentences: int, width: int, device: torch.device):
        self.capacity = self.live = sentences
        self.width = self.active = width
        self.time = -1
        self._ancestors = torch.zeros(self.capacity, width, _FIRST_CAPACITY, dtype=torch.int64, device=device)
        self._itself = torch.arange(width, device=device)
        self._first_row = torch.arange(0, self.capacity * width, width, device=device).view(-1, 1, 1)
        self._cache: dict[tuple, Tensor] = {}

    @property
    def rows(self) -> int:
        """N, the rows of the current step."""
        return self.live * self.active

    def advance(self, rows: int) -> None:
        """The next step begins, with `rows` hypotheses: live · width, or in the first step one for each sentence.

        Raises ValueError for another number.
        """
        if rows == self.live and self.time < 0:
            self.active = 1
        elif rows == self.live * self.width:
            self.active = self.width
        else:
            raise ValueError(f"tokens: got {rows} for {self.live} sentences × {self.width} hypotheses")
        self.time += 1
        if self.time == self._ancestors.shape[2]:
            self._ancestors = torch.cat([self._ancestors, torch.zeros_like(self._ancestors)], dim=2)
        self._ancestors[: self.live, :, self.time] = self._itself
        self._cache.clear()

    def reorder(self, parents: Tensor) -> None:
        """Row n now continues what row parents[n] was; parents (live · width,) int64, each in n's own sentence.

        Rows are numbered sentence · width + beam, after a first step with one row a sentence too.
        """
        steps = self.time + 1
        table = self._ancestors.view(self.capacity * self.width, -1)
        table[: parents.shape[0], :steps] = table[:, :steps].index_select(0, parents)
        self._cache.clear()

    def keep(self, sentences: Tensor) -> tuple[Tensor, Tensor]:
        """From now on sentence i is what sentences[i] was; (live',) int64, without repetition.

        Returns (sources, targets): the sentences that really moved. Each tensor of the state has to be moved likewise
        by `move`.
        """
        self.live = sentences.shape[0]
        places = torch.arange(self.live, device=sentences.device)
        moved = sentences != places
        sources, targets = sentences[moved], places[moved]
        move(self._ancestors, 0, sources, targets)
        self._cache.clear()
        return sources, targets

    def addresses(self, taps: int, slots: int, heads: int) -> Tensor:
        """Where the last `taps` inputs of each row lie in a ring (slots, capacity, width, heads, …) flattened to rows.

        The input of step t is in slot t mod `slots`. → (N · heads, taps) int64, the current step's first. taps may
        reach before the beginning: those addresses are of slots not written yet.
        """
        key = (taps, slots, heads)
        if key not in self._cache:
            device = self._ancestors.device
            times = torch.arange(self.time, self.time - taps, -1, device=device)
            beams = self._ancestors[: self.live, : self.active].index_select(2, times.clamp_min(0))
            rows = (beams + self._first_row[: self.live]) + times.remainder(slots) * (self.capacity * self.width)
            if heads > 1:
                rows = (rows * heads).unsqueeze(2) + torch.arange(heads, device=device).unsqueeze(1)
            self._cache[key] = rows.view(self.rows * heads, taps)
        return self._cache[key]

    def mask(self, steps: int, dtype: torch.dtype) -> Tensor:
        """Which of the inputs of a sentence's last `steps` steps, of all its hypotheses, each row descends from.

        → (live, 1, active, steps · width) in `dtype`, 0 for ancestors (the current step's own among them), else −∞;
        the oldest step first.
        """
        key = (steps, dtype)
        if key not in self._cache:
            first = self.time + 1 - steps
            beams = self._ancestors[: self.live, : self.active, first : self.time + 1]
            others = beams.unsqueeze(-1) != self._itself
            mask = torch.zeros(others.shape, dtype=dtype, device=others.device).masked_fill_(others, -torch.inf)
            self._cache[key] = mask.view(self.live, 1, self.active, steps * self.width)
        return self._cache[key]


def move(tensor: Tensor, dim: int, sources: Tensor, targets: Tensor) -> None:
    """tensor's slices `sources` of dimension `dim` are copied to `targets`; both (n,) int64."""
    if sources.shape[0]:
        tensor.index_copy_(dim, targets, tensor.index_select(dim, sources))
