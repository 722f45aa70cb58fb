"""The search in torch with its steps captured in CUDA graphs, so that the host launches a single graph per step.

A step of a small batch is a few hundred kernels of a few microseconds, and launching them takes longer than running
them. A graph launches all of them at once, but it replays the same operations at the same addresses:

- Batches are rounded up to powers of two, in sentences and in source length, and tables have room for a power of two
  of steps. Batches of the same sizes share their tensors.
- Steps of the same Kind are the same operations. There are few kinds: the number of steps that are read doubles over
  time, and the number of sentences is halved when half of them are done.
- The first batch of a size is searched without: a capture costs more than it saves in a single batch.
- A batch for which there is too little memory is searched again, without graphs and without those of other sizes.
- Checking whether hypotheses have ended, storing them and moving sentences stay outside the graphs.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightconv_plugin.generation.beam_search import Kind, Search, SearchOptions
from lightconv_plugin.generation.beams import power_of_two
from lightconv_plugin.generation.finished import Hypotheses
from lightconv_plugin.generation.steps import StepModel, rounded
from lightconv_plugin.modules.recorder import Recorder, Step
from lightconv_plugin.modules.transformer import EncoderDecoder

_logger = logging.getLogger("lightconv_plugin")
_SIZES = 4
_LEAST_ROOM = 32


class CapturedSearch:
    """A TorchSearch whose steps are recorded and replayed, with the same results. Threads that share it take turns.

    Args:
        models, options: as for TorchSearch; the weights must stay at the same addresses.
        recorder: CudaGraphs, or a replacement for it.
        sizes: number of batch sizes for which tensors and recordings are kept; the least recently used are dropped.
        from_batch: of the batches of a size, the first one whose steps are recorded, 1 or 2; the one before it is
            searched as TorchSearch does.
    """

    def __init__(
        self,
        models: Sequence[EncoderDecoder],
        options: SearchOptions,
        *,
        recorder: Recorder,
        sizes: int = _SIZES,
        from_batch: int = 1,
    ):
        self._models = [StepModel(model, options.dtype) for model in models]
        self._options, self._recorder, self._sizes = options, recorder, sizes
        self._searches: OrderedDict[tuple[int, ...], _Recorded] = OrderedDict()
        self._at_once, self._seen = from_batch == 1, set[tuple[int, ...]]()
        self._too_large = set[tuple[int, ...]]()  # sizes for whose recordings there is too little memory
        self._turn = threading.Lock()  # batches of a size share their tensors

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the recordings, which are of the tensors here."""
        return {name: value for name, value in vars(self).items() if name not in ("_searches", "_turn")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _searches=OrderedDict(), _turn=threading.Lock())

    @torch.no_grad()
    def search(
        self, source: Tensor, lengths: Tensor, max_len: int, *, prefix: Tensor | None = None, begin: int | None = None
    ) -> Hypotheses:
        """See BatchSearch.search."""
        with self._turn:
            return self._in_turn(source, lengths, max_len, prefix, begin)

    def _in_turn(
        self, source: Tensor, lengths: Tensor, max_len: int, prefix: Tensor | None, begin: int | None
    ) -> Hypotheses:
        room = max(_LEAST_ROOM, power_of_two(max_len + 1))
        size = (*rounded(source), room)
        records = (self._at_once or size in self._seen) and size not in self._too_large
        self._seen.add(size)
        find = partial(self._find, size, source, lengths, max_len, prefix, begin)
        try:
            return find(records=records)
        except torch.OutOfMemoryError:
            if not (records or self._searches):
                raise
            _logger.warning(
                "too little memory for CUDA graphs: batches of %d × %d words are searched without", *size[:2]
            )
            self._searches.clear()
            self._too_large.add(size)
        return find(records=False)  # here, where the error does not keep what the first search has

    def _find(
        self,
        size: tuple[int, ...],
        source: Tensor,
        lengths: Tensor,
        max_len: int,
        prefix: Tensor | None,
        begin: int | None,
        *,
        records: bool,
    ) -> Hypotheses:
        columns = size[-1] if records else None
        states = [model.start(source, self._options.beam_size, columns) for model in self._models]
        search = Search(
            self._models, states, lengths, self._options, max_len, prefix=prefix, begin=begin, columns=columns
        )
        if not records:
            return search.find()
        kept = self._kept(size, search)
        return kept.search.find(kept.run)

    def _kept(self, size: tuple[int, ...], search: Search) -> _Recorded:
        """The tensors of this size, with the state of `search`."""
        kept = self._searches.pop(size, None)
        if kept is None:
            while len(self._searches) >= self._sizes:
                self._searches.popitem(last=False)
            kept = _Recorded(search, self._recorder)
        else:
            kept.search.copy_(search)
        self._searches[size] = kept
        return kept


class _Recorded:
    """The tensors of batches of one size, and the recordings of their steps."""

    def __init__(self, search: Search, recorder: Recorder):
        self.search, self._recorder = search, recorder
        self._replays: dict[Kind, Step | None] = {}

    def run(self, kind: Kind, step: Step) -> None:
        """Run the first step of a kind normally, record the second, and replay the recording for the others."""
        if kind.first or kind.forced:  # it occurs once per search, or the host reads the prefix
            step()
        elif kind not in self._replays:
            self._recorder.warm_up(step)
            self._replays[kind] = None
        elif (replay := self._replays[kind]) is None:
            self._replays[kind] = self._recorder.record(step)
        else:
            replay()
