"""The linear layer by oneDNN: products and all derivatives are those of torch; where it is taken and where not."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("fairseq")

from lightconv_plugin.modules import linear, products
from lightconv_plugin.modules.linear import Linear, replace_linear
from tests.models.toys import batch, build

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def onednn(monkeypatch):
    """oneDNN for every size, whatever the processor; a list of the products that it computed."""
    computed = []
    product = products.product

    def counted(*args):
        computed.append(args)
        return product(*args)

    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(linear, "_ROWS", 1)
    monkeypatch.setattr(linear, "_WEIGHTS", 1)
    monkeypatch.setattr(products, "product", counted)
    return computed


def layer(inputs, outputs, bias=True):
    torch.manual_seed(inputs + outputs)
    made = Linear(inputs, outputs, bias=bias)
    if bias:
        nn.init.normal_(made.bias)
    return made


@needs_onednn
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 4), (130,), (0,)])
@pytest.mark.parametrize("inputs, outputs", [(1, 1), (16, 48), (48, 16), (33, 7), (7, 33)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_and_gradients(onednn, shape, inputs, outputs, bias):
    made = layer(inputs, outputs, bias)
    exact = copy.deepcopy(made).double()
    x = torch.randn(*shape, inputs, requires_grad=True)
    y = x.detach().double().requires_grad_()
    out, expected = made(x), nn.functional.linear(y, exact.weight, exact.bias)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert bool(onednn) == bool(x.numel())
    for ours, theirs in zip((x, *made.parameters()), (y, *exact.parameters()), strict=True):
        assert ours.grad.is_contiguous()
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("view", ["transposed", "part", "every-other", "expanded"])
def test_any_strides(onednn, view):
    made = layer(24, 40)
    whole = torch.randn(12, 10, 48)
    x = {
        "transposed": whole[..., :24].transpose(0, 1),
        "part": whole[..., 24:],
        "every-other": whole[..., ::2],
        "expanded": whole[:1, :, :24].expand(12, 10, 24),
    }[view]
    x.requires_grad_()
    made(x).sum().backward()  # a gradient that is one number, expanded
    torch.testing.assert_close(made(x), nn.functional.linear(x, made.weight, made.bias), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.weight.grad, x.sum(dim=(0, 1)).expand(40, 24), rtol=1e-5, atol=1e-4)
    assert len(onednn) == 4


@needs_onednn
def test_only_what_is_wanted_is_computed(onednn):
    made = layer(24, 40)
    with torch.no_grad():
        made(torch.randn(5, 24))
    assert len(onednn) == 1
    made.requires_grad_(False)
    made(torch.randn(5, 24, requires_grad=True)).sum().backward()
    assert len(onednn) == 3


@needs_onednn
def test_second_derivatives(onednn):
    made = layer(8, 6, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(made(x).tanh().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), made.weight)
    y = x.detach().requires_grad_()
    out = nn.functional.linear(y, made.weight).tanh().sum()
    (gradient,) = torch.autograd.grad(out, y, create_graph=True)
    (expected,) = torch.autograd.grad(gradient.square().sum(), made.weight)
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-5)


@needs_onednn
def test_gradients_in_a_vmap_and_their_forward_derivatives(onednn):
    x, directions = torch.randn(4, 8, requires_grad=True), torch.randn(3, 4, 6)

    def derivatives(product, leaves):
        out = product(x)
        each = torch.func.vmap(lambda grad: torch.autograd.grad(out, leaves, grad, retain_graph=True))(directions)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(directions[0], directions[1])
            return each, forward_ad.unpack_dual(torch.autograd.grad(out, x, dual)[0])

    made = layer(8, 6)
    leaves = (x, *made.parameters())
    found = derivatives(made, leaves)
    assert len(onednn) == 1
    torch.testing.assert_close(found, derivatives(lambda x: nn.functional.linear(x, *made.parameters()), leaves))


@needs_onednn
def test_a_parametrised_weight_is_computed_once(onednn):
    class Noisy(nn.Module):
        def forward(self, weight):
            return weight + torch.rand_like(weight)

    made, theirs = layer(8, 6), nn.Linear(8, 6)
    theirs.load_state_dict(made.state_dict())
    outputs = []
    for module in (made, theirs):
        parametrize.register_parametrization(module, "weight", Noisy())
        torch.manual_seed(0)
        outputs.append(module(torch.ones(4, 8)))
    torch.testing.assert_close(*outputs)
    assert onednn


@needs_onednn
def test_where_torchs_own_product_is_taken(onednn):
    made = layer(24, 40)
    x = torch.randn(9, 24)
    copy.deepcopy(made).double()(x.double())
    copy.deepcopy(made).bfloat16()(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        made(x)
    assert torch.func.vmap(made)(x[:, None]).shape == (9, 1, 40)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(made(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        torch.testing.assert_close(tangent, made.weight.sum(dim=1).expand(9, 40))
    with FlopCounterMode(display=False) as counter:
        made(x)
    assert counter.get_total_flops() == 2 * 9 * 24 * 40
    exported = torch.export.export(made, (x,)).module()
    assert not onednn
    traced = torch.jit.trace(made, x, check_trace=False)
    onednn.clear()  # tracing looks first what the layer gives
    torch.testing.assert_close(traced(x), exported(x))
    assert not onednn


@needs_onednn
def test_a_weight_that_has_been_widened(onednn):
    """As fairseq's online_backtranslation widens tied embeddings after the model is built."""
    made = layer(16, 48, bias=False)
    made.weight.data = torch.randn(50, 16)
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(made(x), nn.functional.linear(x, made.weight))
    assert onednn


@needs_onednn
@pytest.mark.parametrize("features", [23, 25])
def test_torch_reports_a_wrong_number_of_features(onednn, features):
    made, x = layer(24, 40), torch.randn(9, features)
    with pytest.raises(RuntimeError) as torchs:
        nn.functional.linear(x, made.weight, made.bias)
    with pytest.raises(RuntimeError) as ours:
        made(x)
    assert str(ours.value) == str(torchs.value)


def test_small_products_stay_with_torch(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "product", None)
    layer(512, 512)(torch.randn(2, 31, 512))
    layer(64, 64)(torch.randn(200, 64))


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A machine on which nothing has been measured; the list of measurements, and what the next ones give."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LIGHTCONV_PRODUCTS", raising=False)
    made, results = [], [2.0]

    def measured():
        made.append(results[0])
        return results[0]

    monkeypatch.setattr(products, "measured", measured)
    products.onednn_is_faster.cache_clear()
    yield made, results
    products.onednn_is_faster.cache_clear()


def asked_anew():
    """As a process that starts now."""
    products.onednn_is_faster.cache_clear()
    return products.onednn_is_faster()


@needs_onednn
@pytest.mark.parametrize("ratio, faster", [(2.0, True), (1.11, True), (1.05, False), (0.5, False)])
def test_one_measurement_decides_for_a_machine(fresh, ratio, faster):
    made, results = fresh
    results[0] = ratio
    assert asked_anew() == faster
    results[0] = 1 / ratio
    assert asked_anew() == faster
    assert made == [ratio]


@needs_onednn
@pytest.mark.parametrize("change", ["processor", "instructions", "torch"])
def test_another_machine_is_measured(fresh, monkeypatch, change):
    made, results = fresh
    assert asked_anew()
    if change == "processor":
        monkeypatch.setattr(products, "_machine", lambda: "another")
    elif change == "instructions":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO SIMD")
    else:
        monkeypatch.setattr(torch, "__version__", "0.0")
    results[0] = 0.5
    assert not asked_anew()
    assert len(made) == 2
    monkeypatch.undo()


@needs_onednn
@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"x": "fast"}'])
def test_a_spoilt_cache_is_measured_anew_and_mended(fresh, content):
    made, _ = fresh
    file = products.artifacts.cache_folder() / "lightconv_products.json"
    file.parent.mkdir(parents=True)
    file.write_text(content.replace("x", products._machine()))
    assert asked_anew()
    assert asked_anew()
    assert len(made) == 1


@needs_onednn
def test_a_cache_that_cannot_be_written_is_no_error(fresh, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "cache"))
    assert asked_anew()


@needs_onednn
def test_the_user_may_choose(fresh, monkeypatch):
    made, _ = fresh
    for value, faster in (("torch", False), ("onednn", True), ("OneDNN", True)):
        monkeypatch.setenv("LIGHTCONV_PRODUCTS", value)
        assert asked_anew() == faster
    assert not made
    monkeypatch.setenv("LIGHTCONV_PRODUCTS", "mkl")
    with pytest.raises(ValueError, match="LIGHTCONV_PRODUCTS must be one of torch, onednn, or unset, got 'mkl'"):
        asked_anew()


@needs_onednn
def test_the_measurement_draws_nothing_at_random_and_records_nothing():
    state = torch.get_rng_state()
    assert products.measured() > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_computes_by_it(onednn):
    model = build()
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {Linear}
    model(*batch())
    assert onednn


def test_every_linear_of_a_model_becomes_one():
    tree = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU())})
    before = dict(tree.named_parameters())
    replace_linear(tree)
    assert type(tree["a"]) is type(tree["b"][0]) is Linear
    assert all(parameter is before[name] for name, parameter in tree.named_parameters())
    with pytest.raises(RuntimeError):
        tree["a"](torch.randn(2, 5))
