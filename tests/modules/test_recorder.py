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


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """A stream is a lock, which cannot be copied either."""
    blocks = {name: lambda *given, **more: contextlib.nullcontext() for name in ("device", "stream", "graph")}
    makes = {"Stream": threading.Lock, "graph_pool_handle": object, "CUDAGraph": Graph, "current_stream": object}
    for name, replacement in (blocks | makes).items():
        monkeypatch.setattr(torch.cuda, name, replacement)


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
