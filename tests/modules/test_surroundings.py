"""What is in force where a function is called (a default type or device, modes, tracers) changes neither its result nor
what is kept for later calls."""

import json
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from lightconv_plugin import ops
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.modules import linear, products
from lightconv_plugin.modules.config import AdaptiveInputConfig
from lightconv_plugin.modules.embeddings import AdaptiveInput, SinusoidalPositions
from lightconv_plugin.modules.linear import Linear
from lightconv_plugin.modules.mixers import MixerSpec, build_mixer
from lightconv_plugin.ops import backends
from tests.modules.plain_models import model_of, words

X, STATE, STATIC, DYNAMIC = torch.randn(6, 2, 8), torch.randn(2, 2, 8), torch.randn(2, 3), torch.randn(6, 2, 2, 3)
OFFSET, LENGTHS, PACKED = torch.rand(6, 2, 2), torch.tensor([6, 4]), torch.tensor([0, 4, 6], dtype=torch.int32)
WORDS = torch.arange(12).reshape(6, 2)


def mixer(kind):
    spec = MixerSpec(kind, 3, 8, 2, False, 0.0, 0.0, "softmax", 0.0, causal=True)
    module = build_mixer(spec, 8).eval().requires_grad_(False)
    return lambda x: torch.cat([module(x), module.step(x, None)[0]])


def embeddings(module):
    return lambda x: x + module(WORDS)


def model():
    module = model_of("dynamic").eval().requires_grad_(False)
    return lambda x: x.sum() + module(WORDS, WORDS).logits


def steps():
    model = model_of("dynamic", encoder=False, positions="learned").eval().requires_grad_(False)
    return lambda x: x.sum() + model.step(WORDS, model.start(len(WORDS)))[0]


CALLS = {
    "lightconv": lambda x: ops.lightconv(x, STATIC, 1, lengths=LENGTHS),
    "lightconv-packed": lambda x: ops.lightconv(x[:, :1], STATIC, 1, cu_seqlens=PACKED),
    "dynamicconv": lambda x: ops.dynamicconv(x, DYNAMIC, 1, dropout=0.3),
    "talkconv": lambda x: ops.talkconv(x, OFFSET, OFFSET, 2, 2, lengths=LENGTHS),
    "lightconv_step": lambda x: ops.lightconv_step(x, STATE, STATIC)[0],
    "dynamicconv_step": lambda x: ops.dynamicconv_step(x, None, DYNAMIC)[0],
    "talkconv_step": lambda x: ops.talkconv_step(x, STATE, OFFSET, 2)[0],
    "dropout": lambda x: ops.dropout(x, 0.5),
    "SinusoidalPositions": lambda x: x + SinusoidalPositions(8, 1)(WORDS, x.dtype),
    "AdaptiveInput": embeddings(AdaptiveInput(12, 8, 8, 1, AdaptiveInputConfig((4,)))),
    "Linear": Linear(8, 4),
    "EncoderDecoder": model(),
    "LanguageModel.step": steps(),
    **{kind: mixer(kind) for kind in MIXERS},
}


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Observed(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


AROUND = {
    "float64": default_dtype,
    "meta": lambda: torch.device("meta"),
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "dispatch mode": Observed,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "dual level": torch.autograd.forward_ad.dual_level,
}


ORDINARY = (torch.Tensor, torch.float32, "cpu", False)


@pytest.fixture
def measurements(monkeypatch, tmp_path):
    """A machine on which nothing has been measured, where every size is measured; the measured products."""
    assert backends.backend("cpu")  # loaded before its cache is replaced
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("LIGHTCONV_PRODUCTS", raising=False)
    monkeypatch.setattr(linear, "_ROWS", 1)
    monkeypatch.setattr(linear, "_WEIGHTS", 1)
    monkeypatch.setattr(products, "_MARGIN", 0.0)  # oneDNN is always the faster one
    monkeypatch.setattr(products, "_SIZE", 8)
    done, product = [], products.product

    def observed(x, weight, bias=None):
        out = product(x, weight, bias)
        done.append((type(out), out.dtype, out.device.type, torch.is_autocast_enabled("cpu")))
        return out

    monkeypatch.setattr(products, "product", observed)
    products.onednn_is_faster.cache_clear()
    yield done
    products.onednn_is_faster.cache_clear()


def run(call):
    torch.manual_seed(0)
    return call(X)


@pytest.mark.parametrize("name", CALLS)
def test_the_same_result_here_and_afterwards(measurements, name):
    for around, entered in AROUND.items():
        products.onednn_is_faster.cache_clear()
        with entered():
            out = run(CALLS[name])
        plain = run(CALLS[name])
        assert type(plain) is torch.Tensor and plain.dtype == torch.float32 and plain.device.type == "cpu"
        assert out.shape == plain.shape
        if around != "autocast":
            assert out.dtype == plain.dtype
        if around not in ("autocast", "fake"):
            torch.testing.assert_close(out, plain)
    assert set(measurements) <= {ORDINARY}


@pytest.mark.parametrize("name", CALLS)
def test_a_tracer_records_the_call_alone(measurements, name):
    for tracing in ("real", "fake", "symbolic"):
        products.onednn_is_faster.cache_clear()
        torch.manual_seed(0)
        traced = make_fx(CALLS[name], tracing_mode=tracing, _allow_non_fake_inputs=True)(X)
        assert "mkldnn" not in traced.code
        torch.manual_seed(0)
        torch.testing.assert_close(traced(X), run(CALLS[name]))
    assert set(measurements) <= {ORDINARY}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("around", AROUND)
def test_a_measurement_is_of_ordinary_products(measurements, around, tmp_path):
    with AROUND[around]():
        assert products.onednn_is_faster()
    assert set(measurements) == {ORDINARY}
    (file,) = tmp_path.rglob("lightconv_products.json")
    (ratio,) = json.loads(file.read_text()).values()
    assert ratio > 0


def test_tracing_the_measurement_records_nothing(measurements):
    assert len(make_fx(lambda x: x * products.measured())(X).graph.nodes) == 3


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", ["lightweight", "dynamic", "talk"])
def test_gradients_of_each_sentence(kind):
    model, tokens = model_of(kind, encoder=False).eval(), words("cpu")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, tokens):
        return torch.func.functional_call(model, parameters, (tokens[None],)).logits.log_softmax(dim=-1).square().mean()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, tokens)
    for number, sentence in enumerate(tokens):
        model.zero_grad()
        loss(dict(model.named_parameters()), sentence).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(each[name][number], parameter.grad, rtol=1e-3, atol=1e-4)
