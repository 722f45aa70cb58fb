"""CUDA graphs: operations that are recorded once and then launched together, at the same addresses every time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

Step = Callable[[], None]
# torch records one graph at a time in a process: before, it waits for the whole device, which breaks another recording.
_recording = threading.Lock()


class Recorder(Protocol):
    """Records functions without arguments that return nothing and work on tensors that stay in place."""

    def warm_up(self, function: Step) -> None:
        """Run the function normally, which is necessary once before `record`. What follows waits for it to end."""

    def record(self, function: Step) -> Step:
        """Run the function, and return one that repeats the same operations on the same tensors.

        Raises:
            torch.OutOfMemoryError: there is too little memory; nothing was run.
        """


class CudaGraphs:
    """The Recorder for a GPU.

    Recordings share the memory for their allocations: only one of them runs at a time, and none leaves anything there
    for another.
    """

    def __init__(self, device: torch.device):
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()  # those recorded with the pool

    def __reduce__(self) -> tuple[type[CudaGraphs], tuple[torch.device]]:
        """For copies: a stream cannot be copied."""
        return type(self), (self._device,)

    def warm_up(self, function: Step) -> None:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    function()
            finally:
                current.wait_stream(self._stream)

    def record(self, function: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        # Where a recording fails in its end, torch leaves its stream the current one.
        with _recording, torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream()):
            if not self._graphs:  # torch does not take a pool again when all of its graphs are gone
                self._pool = torch.cuda.graph_pool_handle()
            try:
                # Threads that load data or search may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    function()
                graph.replay()  # capturing runs nothing
            except RuntimeError as error:
                if "out of memory" in str(error):  # CUDA's own, when it makes the graph, has no type
                    raise torch.OutOfMemoryError(str(error)) from error
                raise
        self._graphs.add(graph)
        return graph.replay
