"""Which rows of a beam search are alive, and from which earlier rows each of them descends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST_ROOM = 32
_LEAST_STEPS = 8
# There are more numbers than taps or heads of most models.
_NUMBERS = 1024


class Beams:
    """The hypotheses of a search, `width` for each of the live sentences, and their ancestry.

    What a model stores in a step (a convolution's inputs, self-attention's keys and values) is written once, at the
    place of its hypothesis in that step, and stays there. When hypotheses are reordered, only this table of ancestors
    changes; all layers share it. A hypothesis never changes its sentence, so the table holds beam numbers.

    Finished sentences are removed by `keep`: the last sentences move into their places, so that the live ones always
    come first and the rest stay where they are.

    The time is both a number on the host, on which shapes may depend, and a tensor, on which values depend. Steps with
    the same `steps` and `live` therefore run the same operations on the same tensors at any time, so the CUDA graph of
    one serves the others.

    Args:
        sentences: S, the number of sentences at the beginning.
        width: hypotheses per sentence.
        device: device of all tensors.
        room: maximum number of steps; `steps` is then a power of two. None for tables that grow.

    Attributes:
        capacity: number of sentences that tensors have room for: S.
        live: number of sentences that are still being searched.
        time: the current step, −1 before the first `advance`. now: the same, (1,) int64 on the device.
        active: hypotheses per sentence in the current step: 1 in a first step that was given one, otherwise `width`.
        room: number of steps that tables have room for.
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
        self._numbers = torch.arange(_NUMBERS, device=device)
        self._first_row = torch.arange(0, self.capacity * width, width, device=device).view(-1, 1, 1)
        self._cache: dict[tuple, Tensor] = {}
        self._most_taps = 1

    @property
    def rows(self) -> int:
        """N, the rows of the current step."""
        return self.live * self.active

    @property
    def ancestors(self) -> Tensor:
        """(live, active, room) int64: the beam number of each row's ancestor in each step so far."""
        return self._ancestors[: self.live, : self.active]

    @property
    def steps(self) -> int:
        """How many steps are read: all steps so far or, with a given room, also some that are still to come."""
        steps = self.time + 1
        return min(self.room, max(_LEAST_STEPS, power_of_two(steps))) if self._fixed else steps

    def size(self, sentences: int) -> int:
        """How many sentences to keep if `sentences` are still being searched: these or, with a given room, more."""
        return power_of_two(sentences) if self._fixed else sentences

    def advance(self, rows: int) -> None:
        """Begin the next step, with `rows` hypotheses: live · width, or in the first step one for each sentence.

        Raises ValueError for any other number.
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
        """Drop what `slot`, `addresses` and `mask` computed for this step; necessary before anything else changes."""
        self._cache.clear()

    def begin(self) -> None:
        """Make every hypothesis its own ancestor in the current step."""
        itself = self._itself.view(1, -1, 1).expand(self.live, -1, 1)
        self._ancestors[: self.live].index_copy_(2, self.now, itself)

    def reorder(self, parents: Tensor) -> None:
        """Let row n continue the former row parents[n]; parents (live · width,) int64, each from n's own sentence.

        Rows are numbered sentence · width + beam, even after a first step with one row per sentence.
        """
        table = self._ancestors.view(self.capacity * self.width, -1)
        table[: parents.shape[0], : self.steps] = table[:, : self.steps].index_select(0, parents)

    def keep(self, sentences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Replace sentence i with the former sentence sentences[i], without repetition. The host waits for nothing.

        Returns (sources, targets): the sentences that actually moved. Apply `move` with them to every other tensor of
        the state.
        """
        self.live = len(sentences)
        moves = [(source, target) for target, source in enumerate(sentences) if source != target]
        # Not from pinned memory, so the list's copy may go as soon as this returns.
        pairs = torch.tensor(moves, dtype=torch.int64).view(-1, 2).to(self.now.device, non_blocking=True)
        sources, targets = pairs.unbind(1)
        move(self._ancestors, 0, sources, targets)
        return sources, targets

    def copy_(self, other: Beams) -> None:
        """Copy the state of `other`, of the same sizes and before its first step, into these tensors."""
        self.live, self.time, self.active = other.live, other.time, other.active
        self.now.copy_(other.now)

    def slot(self, slots: int) -> Tensor:
        """(1,) int64: the current step's slot in a ring of `slots`."""
        return self._slots(slots, 1)

    def ages(self, taps: int) -> Tensor:
        """(taps,) int64: 0, 1, 2 …"""
        return self._numbers[:taps] if taps <= _NUMBERS else torch.arange(taps, device=self.now.device)

    def _times(self) -> Tensor:
        """The last steps, this one first, as many as any layer has asked for; negative before the beginning."""
        key = ("times", self._most_taps)
        if key not in self._cache:
            self._cache[key] = self.now - self.ages(self._most_taps)
        return self._cache[key]

    def _slots(self, slots: int, taps: int) -> Tensor:
        """(taps,) int64: the slots of the last steps in a ring of `slots`."""
        key = ("slots", slots, self._most_taps)
        if key not in self._cache:
            self._cache[key] = self._times().remainder(slots)
        return self._cache[key][:taps]

    def _past(self, taps: int) -> Tensor:
        """The beam numbers of each row's ancestors in the last steps, (live, active, taps); before the beginning, those
        in the first step."""
        key = ("past", self._most_taps)
        if key not in self._cache:
            self._cache[key] = self.ancestors.index_select(2, self._times().clamp_min(0))
        return self._cache[key][:, :, :taps]

    def addresses(self, taps: int, slots: int) -> Tensor:
        """Where the last `taps` inputs of each row lie in a ring (slots, capacity, width, …) flattened to rows.

        The input of step t is in slot t mod `slots`. → (N, taps) int64, the current step's first. Taps may reach
        before the beginning; their addresses are those of slots that are not written yet.
        """
        key = (taps, slots)
        if key not in self._cache:
            self._most_taps = max(self._most_taps, taps)
            slot_size = self.capacity * self.width
            first_rows = torch.add(self._first_row[: self.live], self._slots(slots, taps), alpha=slot_size)
            self._cache[key] = (first_rows + self._past(taps)).view(self.rows, taps)
        return self._cache[key]

    def mask(self, taken: int, slots: int, dtype: torch.dtype) -> Tensor:
        """Which inputs each row descends from, among those of all hypotheses of its sentence in the first `taken` slots
        of a ring of `slots`.

        → (live, 1, active, taken · width) in `dtype`, ordered by slot: 0 for ancestors (including the current step's
        own), −∞ for all others and for slots that are not written yet.
        """
        key = (taken, slots, dtype)
        if key not in self._cache:
            ages = (self.now - self.ages(taken)).remainder_(slots)
            ancestors = self.ancestors.index_select(2, (self.now - ages).clamp_min_(0))
            others = (ancestors.unsqueeze(-1) != self._itself) | (ages > self.now).unsqueeze(1)
            mask = torch.zeros(others.shape, dtype=dtype, device=others.device).masked_fill_(others, -torch.inf)
            self._cache[key] = mask.view(self.live, 1, self.active, taken * self.width)
        return self._cache[key]


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def move(tensor: Tensor, dim: int, sources: Tensor, targets: Tensor) -> None:
    """Copy tensor's slices `sources` of dimension `dim` to `targets`, in place; both (n,) int64."""
    if sources.shape[0]:
        tensor.index_copy_(dim, targets, tensor.index_select(dim, sources))
