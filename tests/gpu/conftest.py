"""The device under test. On the CPU the same tests run as well, as far as they mean something there."""

import pytest
import torch

from lightconv_plugin.ops import backends

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


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
