"""Which rows of a beam search are alive, and from which earlier rows each of them descends."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_ROOM = 32
_LEAST_STEPS = 8


class Beams:
    """The hypotheses of a search, `width` for each of the live sentences, and their ancestry.

    What a model keeps of a step (a convolution's inputs, self-attention's keys and values) is written once, at the
    place of its hypothesis in that step, and stays there. When hypotheses are reordered, only this table of ancestors
    changes, one for all layers. A hypothesis never changes its sentence, so the table holds beam numbers.

    Finished sentences leave through `keep`: the last sentences move into their places, so that the live ones always
    come first and the rest stay where they are.

    The time is a number on the host, which shapes may depend on, and a tensor, which values depend on. So the
    operations of a step with the same `steps` and `live` are the same at any time, on the same tensors: a CUDA graph
    of one serves the others.

    Args:
        sentences: S, how many there are at first.
        width: hypotheses of a sentence.
        device: of all tensors.
        room: how many steps there will be at most, and `steps` is a power of two; None for tables that grow.

    Attributes:
        capacity: how many sentences tensors have room for, all that there were at first.
        live: how many are still searched.
        time: the current step, −1 before the first `advance`. now: the same, (1,) int64 on the device.
        active: hypotheses of a sentence in the current step: 1 in a first step that was given one, else `width`.
        room: how many steps tables have room for.
    """

    def __init__(self, sentences: int, width: int, device: torch.device, room: int | None = None):
        self.capacity = self.live = sentences
        self.width = self.active = width
        self.time = -1
        self.now = torch.full((1,), -1, dtype=torch.int64, device=device)
        self.room = room or _FIRST_ROOM
        self._fixed = room is not None
        self._ancestors = torch.zeros(self.capacity, width, self.room, dtype=torch.int64, device=device)
        self._itself = torch.arange(width, device=device)
        self._first_row = torch.arange(0, self.capacity * width, width, device=device).view(-1, 1, 1)
        self._cache: dict[tuple, Tensor] = {}

    @property
    def rows(self) -> int:
        """N, the rows of the current step."""
        return self.live * self.active

    @property
    def steps(self) -> int:
        """How many steps are read: all that there were, or with a given room that many or some that are to come."""
        steps = self.time + 1
        return min(self.room, max(_LEAST_STEPS, power_of_two(steps))) if self._fixed else steps

    def size(self, sentences: int) -> int:
        """How many sentences to keep of which so many are still searched: these, or with a given room some more."""
        return power_of_two(sentences) if self._fixed else sentences

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
        self.now.fill_(self.time)
        if self.time == self.room:
            self._ancestors = torch.cat([self._ancestors, torch.zeros_like(self._ancestors)], dim=2)
            self.room *= 2
        self.forget()

    def forget(self) -> None:
        """Lets go of what `slot`, `addresses` and `mask` computed for this step."""
        self._cache.clear()

    def begin(self) -> None:
        """In the current step every hypothesis is its own ancestor."""
        itself = self._itself.view(1, -1, 1).expand(self.live, -1, 1)
        self._ancestors[: self.live].index_copy_(2, self.now, itself)

    def reorder(self, parents: Tensor) -> None:
        """Row n now continues what row parents[n] was; parents (live · width,) int64, each in n's own sentence.

        Rows are numbered sentence · width + beam, after a first step with one row a sentence too.
        """
        table = self._ancestors.view(self.capacity * self.width, -1)
        table[: parents.shape[0], : self.steps] = table[:, : self.steps].index_select(0, parents)
        self.forget()

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
        self.forget()
        return sources, targets

    def copy_(self, other: Beams) -> None:
        """Becomes what `other`, of the same sizes and before its first step, is, in the same tensors."""
        self.live, self.time, self.active = other.live, other.time, other.active
        self.now.copy_(other.now)
        self.forget()

    def slot(self, slots: int) -> Tensor:
        """(1,) int64: where the current step is in a ring of so many."""
        key = (slots,)
        if key not in self._cache:
            self._cache[key] = self.now.remainder(slots)
        return self._cache[key]

    def _ancestors_of(self, ages: Tensor) -> Tensor:
        """The beam numbers (live, active, n) of the ancestors so many steps ago, (n,) int64; before the beginning those
        of the first step."""
        beams = self._ancestors[: self.live, : self.active]
        return beams.index_select(2, (self.now - ages).clamp_min_(0))

    def ages(self, taps: int) -> Tensor:
        """(taps,) int64: 0, 1, 2 …"""
        return torch.arange(taps, device=self.now.device)

    def addresses(self, taps: int, slots: int, heads: int) -> Tensor:
        """Where the last `taps` inputs of each row lie in a ring (slots, capacity, width, heads, …) flattened to rows.

        The input of step t is in slot t mod `slots`. → (N · heads, taps) int64, the current step's first. taps may
        reach before the beginning: those addresses are of slots not written yet.
        """
        key = (taps, slots, heads)
        if key not in self._cache:
            ages = self.ages(taps)
            rows = self._ancestors_of(ages) + self._first_row[: self.live]
            rows += (self.now - ages).remainder_(slots) * (self.capacity * self.width)
            if heads > 1:
                rows = (rows * heads).unsqueeze(2) + self.ages(heads).unsqueeze(1)
            self._cache[key] = rows.view(self.rows * heads, taps)
        return self._cache[key]

    def mask(self, taken: int, slots: int, dtype: torch.dtype) -> Tensor:
        """Which inputs each row descends from, among those of all hypotheses of its sentence in the first `taken` slots
        of a ring of `slots`.

        → (live, 1, active, taken · width) in `dtype`, 0 for ancestors (the current step's own among them), else −∞,
        as for slots that are not written yet; slot by slot.
        """
        key = (taken, slots, dtype)
        if key not in self._cache:
            ages = (self.now - self.ages(taken)).remainder_(slots)
            others = (self._ancestors_of(ages).unsqueeze(-1) != self._itself) | (ages > self.now).unsqueeze(1)
            mask = torch.zeros(others.shape, dtype=dtype, device=others.device).masked_fill_(others, -torch.inf)
            self._cache[key] = mask.view(self.live, 1, self.active, taken * self.width)
        return self._cache[key]


def power_of_two(least: int) -> int:
    """The smallest that is at least this."""
    return 1 << (least - 1).bit_length()


def move(tensor: Tensor, dim: int, sources: Tensor, targets: Tensor) -> None:
    """tensor's slices `sources` of dimension `dim` are copied to `targets`; both (n,) int64."""
    if sources.shape[0]:
        tensor.index_copy_(dim, targets, tensor.index_select(dim, sources))
