"""How other people's kernels are called: layouts, order of taps, normalisation. Plain PyTorch stands in for them."""

import argparse
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from benchmarks import candidates, gpu_peers
from benchmarks.report import BenchmarkError
from benchmarks.shapes import Case

CPU = torch.device("cpu")


def same(peer, ours):
    """Outputs and gradients of x; of the filters too, if they have the same shape."""
    out, theirs = ours.run(), peer.run()
    torch.testing.assert_close(peer.to_tbc(theirs), out, rtol=1e-2, atol=1e-2)
    dx, dweight = torch.autograd.grad(out, ours.inputs, ours.grad)
    their_dx, their_dweight = torch.autograd.grad(theirs, peer.inputs, peer.grad)
    torch.testing.assert_close(peer.to_tbc(their_dx), dx, rtol=1e-2, atol=1e-2)
    return dweight, their_dweight


HEADWISE = """
    import torch
    import torch.nn.functional as F

    def headwise_dynamic_convolution(x, weight, static_w=None, residual=False):
        # y[b, t, d] = Σ_w weight[b, t, d // head_size, w] · x[b, t − w, d]
        assert x.is_contiguous() and weight.is_contiguous()
        B, T, D = x.shape
        H, W = weight.shape[2:]
        y = 0
        for w in range(W):
            y = y + F.pad(x, (0, 0, w, 0))[:, :T] * weight[..., w].repeat_interleave(D // H, 2)
        return y
"""
JET = """
    import torch
    import torch.nn.functional as F
    from einops import rearrange

    def dynamic_conv_triton_autograd(x, kernels, cu_seqlens=None):
        # out[b, t, d] = Σ_w kernels[b, t, d, w] · x[b, t + w − W + 1, d]
        B, T, D = x.shape
        W = kernels.shape[3]
        padded = F.pad(x, (0, 0, W - 1, 0))
        return sum(padded[:, w : w + T] * kernels[..., w] for w in range(W))
"""


@pytest.mark.parametrize("per_head", [1, 4, 32])
def test_dynamic_conv1d(per_head, tmp_path, modules):
    (tmp_path / "headwise.py").write_text(textwrap.dedent(HEADWISE), encoding="utf-8")
    case = Case(10, 2, 32, 32 // per_head, 4, causal=True, normalize="none", batch_first=True)
    a = candidates.arguments("dynamicconv", case, CPU, torch.float32)
    (peer,) = gpu_peers._dynamic_conv1d(a, tmp_path)
    dweight, theirs = same(peer, candidates.ours(a))
    torch.testing.assert_close(theirs.flip(-1).transpose(0, 1), dweight)


@pytest.fixture
def modules():
    """Takes away again what is put among the imported modules."""
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if name == "einops" or name.startswith("lightconv_benchmarks_"):
            del sys.modules[name]


@pytest.mark.parametrize("per_head", [1, 4])
def test_jet_nemotron(per_head, tmp_path, modules):
    file = tmp_path / "jetai" / "modeling" / "hf" / "dconv_fwdbwd.py"
    file.parent.mkdir(parents=True)
    file.write_text(textwrap.dedent(JET), encoding="utf-8")
    case = Case(10, 2, 8, 8 // per_head, 4, causal=True, normalize="none", batch_first=True)
    a = candidates.arguments("dynamicconv", case, CPU, torch.float32)
    for _ in range(2):  # einops is or is made importable once
        (peer,) = gpu_peers._jet_nemotron(a, tmp_path)
    dweight, theirs = same(peer, candidates.ours(a))
    torch.testing.assert_close(theirs.unflatten(2, (-1, per_head)).sum(3).transpose(0, 1), dweight)


@pytest.mark.parametrize(
    "changes",
    [{"causal": False}, {"normalize": "softmax"}, {"glu": True}, {"dropout": 0.1}],
    ids=lambda changes: next(iter(changes)),
)
def test_short_convolutions_only(changes, tmp_path):
    options = {"causal": True, "normalize": "none"} | changes
    a = candidates.arguments("dynamicconv", Case(6, 2, 8, 8, 4, **options), CPU, torch.float32)
    assert not list(gpu_peers._dynamic_conv1d(a, tmp_path)) and not list(gpu_peers._jet_nemotron(a, tmp_path))


class Layer:
    """What fairseq's extension modules offer: x (B,C,T), filters (H,K) or (B,H,K,T); both must be contiguous."""

    @staticmethod
    def _convolve(x, filters, padding_l):
        assert x.is_contiguous() and filters.is_contiguous()
        size = filters.shape[1] if filters.dim() == 2 else filters.shape[2]
        padded = F.pad(x, (padding_l, size - 1 - padding_l))
        out = 0
        for k in range(size):
            tap = filters[None, :, k, None] if filters.dim() == 2 else filters[:, :, k]
            out = out + padded[..., k : k + x.shape[2]] * tap.repeat_interleave(x.shape[1] // tap.shape[1], 1)
        return out

    def forward(self, x, filters, padding_l):
        return [self._convolve(x, filters, padding_l)]

    def backward(self, grad, padding_l, x, filters):
        with torch.enable_grad():
            x, filters = x.detach().requires_grad_(), filters.detach().requires_grad_()
            return torch.autograd.grad(self._convolve(x, filters, padding_l), (x, filters), grad)


@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("causal", [False, True], ids=["centred", "causal"])
@pytest.mark.parametrize("operator", gpu_peers.LAYERS)
def test_fairseqs_layers(operator, causal, glu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_peers, "_fairseq_layer", lambda layer, source: Layer())
    a = candidates.arguments(operator, Case(9, 2, 12, 3, 5, causal=causal, glu=glu), CPU, torch.float16)
    (peer,) = gpu_peers._fairseq_layers(a, tmp_path)
    dweight, theirs = same(peer, candidates.ours(a))
    torch.testing.assert_close(theirs, dweight, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(9, 2, 12, 3, 5), torch.bfloat16),
        (Case(9, 2, 12, 3, 9), torch.float16),
        (Case(9, 2, 12, 3, 5, normalize="tanh"), torch.float16),
    ],
    ids=["type", "kernel", "normalisation"],
)
def test_what_fairseqs_layers_cannot_compute_is_left_out(case, dtype, tmp_path):
    a = candidates.arguments("lightconv", case, CPU, dtype)
    assert not list(gpu_peers._fairseq_layers(a, tmp_path))


def test_one_that_does_not_compile_costs_the_others_nothing(capsys, monkeypatch, tmp_path):
    """`python -m benchmarks.gpu_peers`; each in a thread here instead of a process."""

    def prepare(task):
        if task[0] == gpu_peers.DYNAMIC_CONV1D:
            raise RuntimeError("no triton")
        return f"{task[0]} {task[1]} is compiled"

    monkeypatch.setattr(gpu_peers, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(count))
    monkeypatch.setattr(gpu_peers, "_prepare", prepare)
    (tmp_path / "headwise.py").touch()
    jet = tmp_path / "jetai" / "modeling" / "hf"
    jet.mkdir(parents=True)
    (jet / "dconv_fwdbwd.py").touch()
    with pytest.raises(BenchmarkError, match=r"did not compile: dynamic-conv1d$"):
        gpu_peers.main(["--dynamic-conv1d", str(tmp_path), "--jet-nemotron", str(tmp_path)])
    out = capsys.readouterr().out
    assert out.count("dynamic-conv1d: RuntimeError: no triton") == 4
    assert all(f"Jet-Nemotron {number} is compiled" in out for number in range(4))


def test_peers_need_a_gpu(tmp_path):
    (tmp_path / "headwise.py").write_text("", encoding="utf-8")
    options = argparse.Namespace(fairseq_source=None, dynamic_conv1d=tmp_path, jet_nemotron=None, device="cpu")
    with pytest.raises(BenchmarkError, match="--dynamic-conv1d needs --device cuda"):
        gpu_peers.check(options)
