"""The device under test. On the CPU the same tests run as well, as far as they mean something there."""

import fcntl
import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch

from lightconv_plugin.ops import backends

GIB = 2**30
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


def pytest_collection_modifyitems(config, items):
    """LIGHTCONV_TEST_SHARE=1/4: the second of four processes that share the tests (benchmarks/gpu.sh)."""
    share = os.environ.get("LIGHTCONV_TEST_SHARE")
    if share is None:
        return
    number, _, count = share.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise pytest.UsageError(f"LIGHTCONV_TEST_SHARE must be NUMBER/COUNT with NUMBER below COUNT, got {share!r}")
    kept = items[int(number) :: int(count)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _device(name):
    if name == "cuda":
        decided = backends.decision("cuda")
        # LIGHTCONV_BACKEND=reference puts the reference's plain PyTorch to these tests; else they are for the kernels.
        assert decided.backend == "cuda" or "LIGHTCONV_BACKEND" in decided.reason, decided.reason
        torch.cuda.empty_cache()
    return torch.device(name)


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    return _device(request.param)


@pytest.fixture(params=[CUDA])
def cuda(request):
    """For what there is on a GPU only."""
    return _device(request.param)


@pytest.fixture
def roomy(cuda):
    """The device with 40 GiB free; of the processes that share the tests one at a time has them."""
    with Path(tempfile.gettempdir(), "lightconv-tests-gpu-memory").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        free, _ = torch.cuda.mem_get_info()
        if free < 40 * GIB:
            pytest.skip(f"needs 40 GiB of GPU memory, {free / GIB:.0f} are free")
        yield cuda
        gc.collect()
        torch.cuda.empty_cache()
