"""--amp: an update is that of torch's own mixed precision."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.optim.amp_optimizer import AMPOptimizer
from fairseq.optim.nag import NAG, FairseqNAG

import lightconv_plugin.models  # noqa: F401 (the patches)

SCALE = 1024.0


def made(monkeypatch, **common):
    """A parameter, and fairseq's optimizer of it with a loss scale that also works on a CPU."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", lambda **options: scaler("cpu", **options))
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    inner = FairseqNAG.__new__(FairseqNAG)
    inner._optimizer = NAG([parameter], lr=0.1, momentum=0.9)
    settings = {"fp16_init_scale": SCALE, "min_loss_scale": 1e-4, "amp_init_scale": 128, "amp_scale_window": None}
    return parameter, AMPOptimizer(
        SimpleNamespace(optimizer=None, common=SimpleNamespace(**settings | common)), [], inner
    )


@pytest.mark.parametrize("limit", [None, 0.0, 0.5], ids=["no-norm", "no-clipping", "clipping"])
def test_gradients_are_unscaled_once(limit, monkeypatch):
    """Without amp_scales_once, they are divided by the loss scale again."""
    parameter, optimizer = made(monkeypatch)
    plain = nn.Parameter(parameter.detach().clone())
    torchs = NAG([plain], lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.backward(parameter.square().sum())
        plain.square().sum().backward()
        if limit is not None:
            norm = optimizer.clip_grad_norm(limit)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_([plain], limit or torch.inf))
        optimizer.step()
        torchs.step()
        parameter.grad = plain.grad = None
        torch.testing.assert_close(parameter, plain)


def test_an_overflow_halves_the_scale_and_changes_nothing_else(monkeypatch):
    parameter, optimizer = made(monkeypatch)
    before = parameter.detach().clone()
    optimizer.backward((parameter * torch.inf).sum())
    assert not optimizer.clip_grad_norm(0.0).isfinite()
    optimizer.step()
    assert torch.equal(parameter, before) and optimizer.scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("window, wanted", [(None, 2000), (3, 3)])
def test_the_scale_grows_after_its_window(window, wanted, monkeypatch):
    """Without amp_scales_once, after as many updates as --amp-init-scale says."""
    assert made(monkeypatch, amp_scale_window=window)[1].scaler.get_growth_interval() == wanted
