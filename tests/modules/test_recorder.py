"""CUDA graphs without a GPU: what torch has for them is replaced. On a GPU: tests/gpu/test_step.py."""

import contextlib
import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightconv_plugin.modules.recorder import CudaGraphs

GPU = torch.device("cuda")


class Graph:
    def replay(self):
        pass


class Stream:
    def __init__(self):
        self.waited_for = []
        self.of_torch = threading.Lock()  # which cannot be copied either

    def wait_stream(self, other):
        self.waited_for.append(other)


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    """The pools that graphs were recorded with, by torch's stand-ins. The current stream is always the same."""
    used, current = [], Stream()

    def graph(_, pool, **more):
        used.append(pool)
        return contextlib.nullcontext()

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: contextlib.nullcontext())
    makes = {"Stream": Stream, "graph_pool_handle": object, "CUDAGraph": Graph, "graph": graph}
    for name, replacement in (makes | {"current_stream": lambda: current}).items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return used


def test_threads_record_one_at_a_time():
    """torch waits for the whole GPU before it records, which breaks what another thread records meanwhile."""
    both = threading.Barrier(2)

    def record(_):
        with pytest.raises(threading.BrokenBarrierError):  # the other thread has not come
            CudaGraphs(GPU).record(lambda: both.wait(0.2) and None)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(record, range(2)))


def test_a_copy_has_its_own_stream():
    """With a deep copy of a Translator."""
    recorder = CudaGraphs(GPU)
    copied = copy.deepcopy(recorder)
    assert copied._device == GPU and copied._stream is not recorder._stream


def test_what_follows_waits_for_a_step_that_failed():
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    recorder = CudaGraphs(GPU)
    with pytest.raises(torch.OutOfMemoryError):
        recorder.warm_up(fail)
    assert torch.cuda.current_stream().waited_for == [recorder._stream]


def test_cudas_own_lack_of_memory_is_torchs():
    """CUDA makes the graph in memory that torch's allocator does not manage."""

    def fail():
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="CUDA error: out of memory"):
        CudaGraphs(GPU).record(fail)


def test_recordings_share_a_pool_until_all_are_gone(pools):
    """torch then fails with a pool that it has not freed yet: use_count > 0 INTERNAL ASSERT FAILED."""
    recorder = CudaGraphs(GPU)
    replays = [recorder.record(int) for _ in range(2)]
    del replays[0]
    replays.append(recorder.record(int))
    replays.clear()
    recorder.record(int)
    assert pools[0] is pools[1] is pools[2] is not pools[3]
