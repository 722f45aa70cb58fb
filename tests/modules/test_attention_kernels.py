"""Which of torch's attention kernels are taken: never cuDNN's, whose results with masks have been wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightconv_plugin.modules import attention

SETTING = "cudnn_sdp_enabled"
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
pytestmark = pytest.mark.skipif(not hasattr(torch.backends.cuda, SETTING), reason="this torch has no cuDNN attention")


@pytest.mark.parametrize("before", [True, False])
def test_not_cudnns(before, monkeypatch):
    """On what passes for a GPU; the setting remains as it was."""
    enabled, seen = getattr(torch.backends.cuda, SETTING), []
    original = F.scaled_dot_product_attention
    kept = enabled()

    def noted(*args, **kwargs):
        seen.append(enabled())
        return original(*args, **kwargs)

    monkeypatch.setattr(attention, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        x = torch.randn(2, 3, 5, 8)
        mask = torch.zeros(2, 1, 1, 5).masked_fill_(torch.arange(5) > 3, -torch.inf)
        found = attention.dot_product_attention(x, x, x, mask)
        assert seen == [False] and enabled() is before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(kept)
    torch.testing.assert_close(found, original(x, x, x, attn_mask=mask))


@pytest.mark.parametrize("allowed", [["math"], ["flash", "math"], ["mem_efficient"], []])
def test_kernels_that_are_turned_off_stay_off(allowed, monkeypatch):
    """On what passes for a GPU; math where cuDNN's is the only one that is on."""
    seen = []

    def noted(*args, **kwargs):
        seen.extend(name for name in KERNELS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")())

    monkeypatch.setattr(attention, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    x = torch.randn(2, 3, 5, 8)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *(KERNELS[name] for name in allowed)]):
        attention.dot_product_attention(x, x, x)
    assert seen == (allowed or ["math"])


@pytest.mark.parametrize("before", [True, False])
def test_one_graph_when_compiled(before):
    """Tensors on "meta" stand in for a GPU's."""
    x, mask = torch.empty(2, 3, 5, 8, device="meta"), torch.empty(2, 1, 1, 5, device="meta")
    kept = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        torch._dynamo.reset()
        explained = torch._dynamo.explain(attention.dot_product_attention)(x, x, x, mask)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(kept)
    assert explained.graph_count == 1, explained.break_reasons
