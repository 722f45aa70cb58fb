"""CUDA graphs: operations that are recorded once and then launched together, at the same addresses every time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch

Step = Callable[[], None]
# torch records one graph at a time in a process: before, it waits for the whole device, which breaks another recording.
_recording = threading.Lock()


class Recorder(Protocol):
    """Records functions without arguments that return nothing and work on tensors that stay in place."""

    def warm_up(self, function: Step) -> None:
        """Run the function normally, which is necessary once before `record`."""

    def record(self, function: Step) -> Step:
        """Run the function, and return one that repeats the same operations on the same tensors."""


class CudaGraphs:
    """The Recorder for a GPU.

    Recordings share the memory for their allocations: only one of them runs at a time, and none leaves anything there
    for another.
    """

    def __init__(self, device: torch.device):
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()

    def __reduce__(self) -> tuple[type[CudaGraphs], tuple[torch.device]]:
        """For copies: a stream cannot be copied."""
        return type(self), (self._device,)

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
            # Threads that load data or search may use the device meanwhile.
            with (
                _recording,
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                function()
            graph.replay()  # capturing runs nothing
        return graph.replay
