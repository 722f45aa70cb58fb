"""The search in torch with its steps captured in CUDA graphs, so that the host launches one thing a step.

A step of a small batch is some hundred kernels of a few microseconds, and launching them takes longer than running
them. A graph has all of them in one launch, but it replays the same operations at the same addresses:

- Batches are rounded up to powers of two, in sentences and in source length, and tables have room for a power of two
  of steps. Batches of the same sizes share their tensors.
- Steps of the same Kind are the same operations. How many steps are read doubles with the time, and the sentences
  are halved when half of them have been found, so there are few kinds.
- Looking whether hypotheses ended, keeping them and moving sentences remains outside.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightconv_plugin.generation.beam_search import Hypotheses, Kind, Search, SearchOptions
from lightconv_plugin.generation.beams import power_of_two
from lightconv_plugin.generation.steps import StepModel
from lightconv_plugin.modules.transformer import EncoderDecoder

_SIZES = 4
_LEAST_ROOM = 32

Step = Callable[[], None]


class Recorder(Protocol):
    """Makes recordings of functions without arguments that return nothing and work on tensors that stay."""

    def warm_up(self, function: Step) -> None:
        """Runs the function as it is, as is needed once before `record`."""

    def record(self, function: Step) -> Step:
        """Runs the function, and returns what runs the same operations on the same tensors again."""


class CudaGraphs:
    """The Recorder of a GPU.

    Recordings share the memory for what they allocate: only one of them runs at a time, and none leaves anything there
    for another.
    """

    def __init__(self, device: torch.device):
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Step) -> None:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()
            current.wait_stream(self._stream)

    def record(self, function: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            # Threads that load data may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                function()
            graph.replay()  # capturing runs nothing
        return graph.replay


class CapturedSearch:
    """TorchSearch, whose steps are recorded and replayed. Its results are the same.

    Args:
        models, options, dtype: as for TorchSearch; the weights may not move.
        recorder: CudaGraphs, or what stands in for it.
        sizes: of how many sizes of batches tensors and recordings are kept; those used last.
    """

    def __init__(
        self,
        models: Sequence[EncoderDecoder],
        options: SearchOptions,
        *,
        recorder: Recorder,
        dtype: str = "float32",
        sizes: int = _SIZES,
    ):
        self._models = [StepModel(model, dtype) for model in models]
        self._options, self._recorder, self._sizes = options, recorder, sizes
        self._searches: OrderedDict[tuple[int, ...], _Recorded] = OrderedDict()

    @torch.no_grad()
    def search(
        self, source: Tensor, lengths: Tensor, max_len: int, *, prefix: Tensor | None = None, begin: int | None = None
    ) -> Hypotheses:
        """See BatchSearch.search."""
        room = max(_LEAST_ROOM, power_of_two(max_len + 1))
        states = [model.start(source, self._options.beam_size, room) for model in self._models]
        search = Search(self._models, states, lengths, self._options, max_len, prefix=prefix, begin=begin, columns=room)
        size = (states[0].beams.capacity, states[0].source_length, room)
        kept = self._searches.pop(size, None)
        if kept is None:
            while len(self._searches) >= self._sizes:
                self._searches.popitem(last=False)
            kept = _Recorded(search, self._recorder)
        else:
            kept.search.copy_(search)
        self._searches[size] = kept
        return kept.search.find(kept.run)


class _Recorded:
    """The tensors of batches of one size, and the recordings of their steps."""

    def __init__(self, search: Search, recorder: Recorder):
        self.search, self._recorder = search, recorder
        self._replays: dict[Kind, Step | None] = {}

    def run(self, kind: Kind, step: Step) -> None:
        """The first step of a kind is run as it is, the second is recorded, and the others replay that."""
        if kind.first or kind.forced:  # once a search, or the host reads the prefix
            step()
        elif kind not in self._replays:
            self._recorder.warm_up(step)
            self._replays[kind] = None
        elif (replay := self._replays[kind]) is None:
            self._replays[kind] = self._recorder.record(step)
        else:
            replay()
