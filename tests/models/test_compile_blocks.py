"""--compile-blocks: the numbers of the uncompiled model, its checkpoints, its dropout."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lightconv_plugin.models import layers
from tests.models.language_model_toys import build_lm
from tests.models.toys import batch, build

NO_DROPOUT = {"dropout": 0.0, "input_dropout": 0.0, "attention_dropout": 0.0, "relu_dropout": 0.0}
LAYER = {
    f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("kernel_size_list", [5]))
}


@pytest.fixture(scope="module")
def counter():
    """The graphs are traced and differentiated, and run as they are: inductor's code would take minutes to compile."""
    found, compile = CompileCounterWithBackend("aot_eager"), torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda f, **options: compile(f, backend=found, **options))
        torch._dynamo.reset()
        layers._compiled.cache_clear()
        yield found
    torch._dynamo.reset()
    layers._compiled.cache_clear()


@pytest.fixture
def graphs(counter):
    """How many graphs were made since the test began."""
    before = counter.frame_count
    return lambda: counter.frame_count - before


def pair(**options):
    """Two models of equal parameters in training mode, one layer a side; the second compiled."""
    plain = build(**{**LAYER, **options}).train()
    compiled = build(**{**LAYER, **options}, compile_blocks=True).train()
    compiled.load_state_dict(plain.state_dict())
    return plain, compiled


def passes(model, arguments):
    """Output, and all gradients of a sum of its squares."""
    model.zero_grad()
    out = model(*arguments)[0]
    out.square().sum().backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(plain, compiled, arguments):
    (expected, gradients), (out, found) = (passes(model, arguments) for model in (plain, compiled))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True, "checkpoint_activations": True}


# The decoder of the second has lightweight convolutions.
@pytest.mark.parametrize(
    ("encoder", "decoder", "options"),
    [("dynamic", "talk", {}), ("attention-qkv", "cross-attention-q", PRE_NORM)],
    ids=["post-norm", "pre-norm-recomputed"],
)
def test_outputs_and_gradients_are_the_same(encoder, decoder, options, graphs):
    plain, compiled = pair(encoder_conv_type=encoder, decoder_conv_type=decoder, **options, **NO_DROPOUT)
    assert_same(plain, compiled, batch())
    made = graphs()
    assert made >= 2
    # Other batches and lengths, targets shorter than the kernel among them: the same graphs.
    for sizes in (((5, 9), (4, 2)), ((3, 11, 7, 6), (12, 2, 3, 4))):
        assert_same(plain, compiled, batch(*sizes))
    if torch.__version__ >= (2, 13):  # 2.6 makes more for other sizes
        assert graphs() == made


def test_every_layer_of_every_model_has_the_option():
    for model in (build(compile_blocks=True), build_lm(compile_blocks=True)):
        found = [module.compile_block for module in model.modules() if hasattr(module, "compile_block")]
        assert all(found) and len(found) == sum(len(side.layers) for side in model.children())
    assert not any(getattr(module, "compile_block", False) for module in build().modules())


def test_dropout_draws_in_every_call(graphs):
    """In the graphs: of elements, of a block's input and of filters; from torch's generator."""
    _, compiled = pair(dropout=0.3, weight_dropout=0.2)

    def encoded():
        return compiled.encoder(*batch()[:2])["encoder_out"][0]

    first, second = encoded(), encoded()
    assert graphs() > 0 and (first - second).abs().mean() > 1e-2
    torch.manual_seed(5)
    third = encoded()
    torch.manual_seed(5)
    torch.testing.assert_close(encoded(), third, atol=0, rtol=0)


def test_evaluation_and_generation_are_not_compiled(graphs):
    plain, compiled = (model.eval() for model in pair())
    arguments = batch()
    torch.testing.assert_close(compiled(*arguments)[0], plain(*arguments)[0], atol=0, rtol=0)
    compiled.decoder.train()
    state = {}
    with torch.no_grad():
        encoder_out = compiled.encoder(*arguments[:2])
        for n in (1, 2):
            compiled.decoder(arguments[2][:, :n], encoder_out=encoder_out, incremental_state=state)
    assert state and graphs() == 0


def test_names_copies_and_checkpoints_are_as_without(tmp_path):
    plain, compiled = pair()
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in compiled.named_modules()] == [name for name, _ in plain.named_modules()]
    twin = copy.deepcopy(compiled)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), compiled.parameters(), strict=True))
    torch.save(compiled.state_dict(), tmp_path / "model.pt")
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


@pytest.mark.parametrize(("before", "after"), [(8, layers._GRAPHS), (1000, 1000)])
def test_the_limit_of_graphs_is_raised_only_where_it_is_lower(before, after, counter):
    config = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch({name: before}):
        layers._compiled.cache_clear()
        layers._compiled(torch.sin)
        assert getattr(config, name) == after
    layers._compiled.cache_clear()
