"""The graphs: any mixer from a state of fixed size, any batch and length, reordered; in torch's own operators alone."""

import dataclasses

import pytest
import torch

from lightconv_plugin.deployment import export_start, export_step, graphs, state_tensors
from lightconv_plugin.deployment.graphs import _Start, _Step
from lightconv_plugin.modules import MIXERS
from lightconv_plugin.modules.attention import AttentionConv
from tests.checkpoints import exports
from tests.deployment import toys

PAD, EOS, WORDS = 1, 2, 160
_ENCODER_CONV = AttentionConv(("q", "v"))


def source(batch, length):
    """(B,S) words, pads on both sides where there is room."""
    words = torch.randint(4, WORDS, (batch, length))
    words[:, -1] = EOS
    if batch > 1 and length > 3:
        words[0, :2] = PAD
        words[1] = torch.tensor([*range(5, length + 3), EOS, PAD])
    return words


def steps(start, step, before, tokens):
    """The scores (B,T,V) after each of `tokens` (B,T), one step each."""
    state, found = list(start(before)), []
    assert all(tensor.is_contiguous() for tensor in state)
    for token in tokens.unbind(1):
        scores, *changed = step(token, *state)
        state[: len(changed)] = changed
        found.append(scores)
    return torch.stack(found, dim=1), state


@torch.no_grad()
def check(model, start, step, batch, length):
    before, tokens = source(batch, length), torch.randint(4, WORDS, (batch, 9))
    scores, state = steps(start, step, before, tokens)
    if model.config.encoder is None:
        expected = model(torch.cat([before, tokens], dim=1)).logits[:, length:]
    else:
        expected = model(before, tokens).logits
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    sizes = {"batch": batch, "source": length, "seen": 1 + 9 + (length if model.config.encoder is None else 0)}
    for tensor, spec in zip(state, state_tensors(model), strict=True):
        assert tuple(tensor.shape) == tuple(sizes.get(size, size) for size in spec.shape), spec.name
        assert str(tensor.dtype) == f"torch.{spec.dtype}" and tensor.is_contiguous()


@pytest.mark.parametrize("make, kernel_size", [(toys.pair, 1), (toys.language_model, 2), (toys.pair, 7)])
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_from_a_state_of_fixed_size(mixer, make, kernel_size):
    model = make([mixer, mixer], kernel_size=kernel_size)
    check(model, _Start(model), _Step(model), 3, 6)


def test_filters_at_low_rank_with_static_ones():
    for config in (exports.pair(), exports.language_model()):
        config = toys.with_mixers(config, ["dynamic"], dynamic_rank=5, dynamic_residual=True)
        model = exports.build_model(config)
        check(model, _Start(model), _Step(model), 3, 6)


@pytest.mark.parametrize("kind", ["depthwise", "dynamic"])
@pytest.mark.parametrize("mixer, kernel_size", [("attention", 1), ("window_attention", 1), ("window_attention", 5)])
def test_convolutions_in_attention(mixer, kernel_size, kind):
    """Also with a window of one token, in which attention itself keeps nothing."""
    for config in (exports.pair(), exports.language_model()):
        options = {"kernel_size": kernel_size, "attention_conv": AttentionConv(("q", "v"), 4, kind)}
        config = toys.with_mixers(config, [mixer, mixer], **options)
        if config.encoder is not None:
            decoder = dataclasses.replace(config.decoder, cross_attention_conv=AttentionConv(("q",), 3, kind))
            config = dataclasses.replace(config, decoder=decoder)
        model = exports.build_model(config)
        check(model, _Start(model), _Step(model), 3, 6)


def test_exported_for_any_batch_and_length(graphs, deployed_model):
    start, step = (graph.module() for graph in graphs)
    for batch, length in ((1, 1), (1, 8), (2, 7), (5, 33)):
        check(deployed_model, start, step, batch, length)


def test_exported_in_torchs_own_operators(graphs):
    for graph in graphs:
        called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        assert called and all(name.startswith(("aten.", "<built-in function")) for name in called), called


@pytest.mark.long
@torch.no_grad()
def test_an_exported_language_model():
    model = toys.language_model(["talk"], adaptive=True, positions="learned", normalize_before=True)
    start, step = export_start(model).module(), export_step(model).module()
    for batch, length in ((2, 7), (1, 1)):
        check(model, start, step, batch, length)
    # A pad is as good as nothing.
    tokens = torch.tensor([[EOS, 7, 9]])
    scores, _ = steps(start, step, torch.tensor([[PAD]]), tokens)
    torch.testing.assert_close(scores, model(tokens).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises((AssertionError, RuntimeError), match="64"):
        start(source(1, 65))  # longer than the learned positions


@pytest.mark.long
def test_exported_with_options_of_the_mixers():
    config = exports.pair()
    mixers = (
        exports.mixer("attention", causal=True, attention_conv=AttentionConv(("q", "k", "v"))),
        exports.mixer("window_attention", causal=True, attention_conv=AttentionConv(("k",), 3, "dynamic")),
        exports.mixer("dynamic", causal=True, dynamic_rank=4, dynamic_residual=True),
    )
    decoder = dataclasses.replace(config.decoder, mixers=mixers, cross_attention_conv=AttentionConv(("q",), 3))
    encoder = dataclasses.replace(config.encoder, mixers=(exports.mixer("attention", attention_conv=_ENCODER_CONV),))
    model = exports.build_model(dataclasses.replace(config, decoder=decoder, encoder=encoder))
    start, step = export_start(model).module(), export_step(model).module()
    for batch, length in ((1, 1), (2, 7), (5, 33)):
        check(model, start, step, batch, length)


@torch.no_grad()
def test_beams_are_reordered_by_the_first_dimension():
    model = toys.pair()
    start, step = _Start(model), _Step(model)
    before, tokens, order = source(3, 6), torch.randint(4, WORDS, (3, 5)), torch.tensor([2, 2, 0])
    _, state = steps(start, step, before, tokens[:, :4])
    scores, *_ = step(tokens[order, 4], *[tensor.index_select(0, order) for tensor in state])
    torch.testing.assert_close(scores, model(before[order], tokens[order]).logits[:, 4], rtol=1e-5, atol=1e-5)


def test_a_model_in_training_is_refused():
    with pytest.raises(ValueError, match="evaluation mode"):
        export_step(toys.pair(["talk"]).train())


@pytest.mark.parametrize("make", [toys.pair, toys.language_model])
def test_examples_for_tracing_are_on_the_models_device(make, monkeypatch):
    """The default device "meta" stands in for one that the model is not on."""
    model = make(["lightweight", "attention"])
    monkeypatch.setattr(graphs, "_export", lambda graph, arguments, shapes: arguments)
    with torch.device("meta"):
        examples = [*export_start(model), *export_step(model)]
    assert {tensor.device.type for tensor in examples} == {"cpu"}
