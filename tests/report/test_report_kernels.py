"""The kernels that the report draws, against what the modules compute with them."""

import numpy as np
import pytest
import torch

from lightconv_plugin.report import kernels
from tests.models.toys import batch, build, dictionary, task

MIXERS = ["lightweight", "dynamic", "talk", "gated_short", "depthwise", "conv", "attention", "window_attention"]
DATA = ["dynamic", "talk", "attention", "window_attention"]


def sentence(length: int, target: int) -> dict:
    source, lengths, previous = batch((length,), (target,))
    return {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": previous}


def model_of(kind: str, **options):
    model = build("dynamicconv", encoder_conv_type=kind, decoder_conv_type=kind, **options)
    with torch.no_grad():  # away from initialisations that are the same everywhere
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def mixers(model, side):
    return [layer.self_attn for layer in getattr(model, side).layers]


def seen_inputs(model, inputs, module):
    """(what the module got, what it gave) while the model reads the sentence."""
    found = []
    handle = module.register_forward_hook(
        lambda _, args, kwargs, out: found.append((args[0] if args else kwargs["query"], out)), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return found[-1]


def test_attention_reads_what_is_convolved():
    model = model_of("attention", decoder_attention_conv="q,k,v", encoder_attention_conv="k")
    inputs = sentence(9, 7)
    for side in ("encoder", "decoder"):
        for module in mixers(model, side):
            query, (out, _) = seen_inputs(model, inputs, module)
            with torch.no_grad():
                weights = kernels.attention_weights(module, query, causal=side == "decoder")
                values = module.v_proj(query)
                values = values if module.v_conv is None else module.v_conv(values)
                mixed = weights @ values[:, 0].unflatten(1, (module.num_heads, -1)).transpose(0, 1)
                expected = module.out_proj(mixed.transpose(0, 1).flatten(1))
            torch.testing.assert_close(out[:, 0], expected, atol=1e-4, rtol=1e-4)
    found = kernels.gather(model, [inputs], [0])
    assert {layer.kind for layer in found} == {"attention"} and all(len(layer.maps) == 1 for layer in found)


def test_filters_at_low_rank_are_those_of_their_product():
    model = model_of("dynamic", encoder_dynamic_rank=[3], decoder_dynamic_rank=[3])
    inputs = [sentence(9, 7)]
    found = kernels.gather(model, inputs)
    for conv in (mixer.conv for side in ("encoder", "decoder") for mixer in mixers(model, side)):
        product = torch.nn.Linear(conv.channels, conv.weight_linear.out_features, bias=False)
        with torch.no_grad():
            product.weight.copy_(conv.weight_linear.weight @ conv.rank_linear.weight)
        conv.rank_linear, conv.weight_linear = None, product
    for layer, expected in zip(found, kernels.gather(model, inputs), strict=True):
        np.testing.assert_allclose(layer.mean, expected.mean, atol=1e-5)


@pytest.mark.parametrize("kind", MIXERS)
def test_every_layer_of_every_mixer_has_its_kernels(kind):
    model = model_of(kind)
    layers = kernels.gather(model, [sentence(9, 7), sentence(4, 12)], [1])
    assert [(layer.side, layer.number) for layer in layers] == [
        (s, n) for s in ("encoder", "decoder") for n in range(3)
    ]
    for layer in layers:
        assert layer.kind == kind
        assert layer.mean.shape == (len(layer.rows), len(layer.positions))
        assert np.isfinite(layer.mean).all()
        length = 4 if layer.side == "encoder" else 12
        assert [values.shape for values in layer.maps] == ([(4, length, length)] if kind in DATA else [])
        if layer.side == "decoder":
            assert layer.positions[-1] == 0
            assert all(not np.triu(values, 1).any() for values in layer.maps), "a decoder reads no later token"


@pytest.mark.parametrize("kind, normalization", [*((kind, "softmax") for kind in DATA), ("dynamic", "tanh")])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_map_is_what_the_mixer_multiplies_by(side, kind, normalization):
    model = model_of(kind, weight_normalization=normalization)
    inputs = sentence(11, 8)
    layers = [layer for layer in kernels.gather(model, [inputs], [0]) if layer.side == side]
    for layer, mixer in zip(layers, mixers(model, side), strict=True):
        conv = getattr(mixer, "conv", mixer)
        x, out = seen_inputs(model, inputs, conv)
        weights = torch.from_numpy(layer.maps[0])
        if kind in ("attention", "window_attention"):
            values = mixer.v_proj(x)[:, 0].unflatten(-1, (4, -1))
            got = mixer.out_proj(torch.einsum("hts,shc->thc", weights, values).flatten(1))
            out = out[0]
        else:
            values = x[:, 0].unflatten(-1, (4, -1))
            got = torch.einsum("hts,shc->thc", weights, values).flatten(1)
            if kind == "talk":
                got = got / (conv.max_left + conv.max_right + 1)
        torch.testing.assert_close(got, out[:, 0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_lightweight_filter_is_what_the_convolution_multiplies_by(side):
    model = model_of("lightweight")
    layers = [layer for layer in kernels.gather(model, []) if layer.side == side]
    for layer, mixer in zip(layers, mixers(model, side), strict=True):
        length = 3 * len(layer.positions)
        impulse = torch.zeros(length, 1, 16)
        impulse[length // 2] = 1
        response = mixer.conv(impulse)[:, 0].detach().numpy()
        for row in range(4):
            for position, value in zip(layer.positions, layer.mean[row], strict=True):
                # y[t] reads x[t + position]: the impulse is seen at length // 2 − position.
                assert response[length // 2 - position, 4 * row] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("kind", ["attention", "dynamic", "talk"])
def test_a_mean_is_over_all_positions_of_all_sentences(kind):
    model = model_of(kind)
    inputs = [sentence(9, 7), sentence(14, 5)]
    shown = kernels.gather(model, inputs, [0, 1])
    for layer in shown:
        wanted, count = np.zeros((4, len(layer.positions))), 0
        for values in layer.maps:
            length = values.shape[1]
            count += length
            for t in range(length):
                for column, position in enumerate(layer.positions):
                    if 0 <= t + position < length:
                        wanted[:, column] += values[:, t, t + position]
        inside = layer.mean
        if kind == "attention":
            np.testing.assert_allclose(inside, wanted / count, atol=1e-6)
            np.testing.assert_allclose(layer.outside, 0, atol=1e-6)
        else:  # taps outside the sentence count in a filter, and are not in a map
            assert (inside >= wanted / count - 1e-6).all()
            middle = list(layer.positions).index(0)
            np.testing.assert_allclose(inside[:, middle], wanted[:, middle] / count, atol=1e-6)


def test_attention_further_off_is_told():
    model = model_of("attention")
    layer = kernels.gather(model, [sentence(26, 3)], [0])[0]
    near = np.abs(np.subtract.outer(np.arange(26), np.arange(26))) <= 20
    np.testing.assert_allclose(layer.outside, (layer.maps[0] * ~near).sum((1, 2)) / 26, atol=1e-6)
    assert (layer.outside > 0.001).all()


def test_of_a_long_sentence_the_beginning_is_drawn():
    model = model_of("dynamic")
    layer = kernels.gather(model, [sentence(60, 3)], [0])[0]
    whole = layer.maps[0].sum(2)
    assert layer.maps[0].shape == (4, 26, 26)
    np.testing.assert_allclose(whole[:, 1:25], 1, rtol=1e-5)  # K = 3


def test_reach_of_talk_is_the_offset_times_the_longest():
    model = model_of("talk")
    inputs = sentence(9, 7)
    layers = kernels.gather(model, [inputs, inputs])
    for layer, mixer in zip(layers, mixers(model, "encoder") + mixers(model, "decoder"), strict=True):
        x, _ = seen_inputs(model, inputs, mixer.conv)
        share = torch.sigmoid(mixer.conv.offsets(x))[:, 0].detach().numpy().T
        left, right = layer.reach
        assert layer.limits == (mixer.conv.max_left, mixer.conv.max_right)
        np.testing.assert_allclose(left, np.tile(share[:4] * layer.limits[0], 2), rtol=1e-5)
        if layer.side == "encoder":
            np.testing.assert_allclose(right, np.tile(share[4:] * layer.limits[1], 2), rtol=1e-5)
        else:
            assert not right.any()


@pytest.mark.parametrize("glu", [False, True], ids=["", "glu"])
def test_norms_of_taps(glu):
    for kind in ("depthwise", "conv"):
        model = model_of(kind, encoder_glu=glu)
        for layer, mixer in zip(kernels.gather(model, []), mixers(model, "encoder"), strict=False):
            weight = mixer.conv.weight.detach().double().numpy()
            halves = np.split(weight, 2) if kind == "conv" and glu else [weight]
            wanted = [
                [np.sqrt((half[:, :, k] ** 2).sum() / len(half)) for k in range(half.shape[2])] for half in halves
            ]
            assert layer.rows == (["values", "gates"] if len(halves) == 2 else ["all channels"])
            np.testing.assert_allclose(layer.mean, wanted, rtol=1e-5)


def test_renormalised_padding_is_drawn_as_computed():
    model = model_of("dynamic")
    for mixer in mixers(model, "encoder"):
        mixer.conv.renorm_padding = True
    for layer in kernels.gather(model, [sentence(5, 3)], [0])[:3]:
        np.testing.assert_allclose(layer.maps[0].sum(2), 1, rtol=1e-5)


def test_every_layer_can_be_another_mixer():
    model = build("dynamicconv", encoder_conv_type="attention,talk,lightweight", decoder_conv_type="conv")
    kinds = [layer.kind for layer in kernels.gather(model, [sentence(5, 4)])]
    assert kinds == ["attention", "talk", "lightweight", "conv", "conv", "conv"]


def test_without_sentences_only_the_parameters_are_known():
    model = build("dynamicconv", encoder_conv_type="attention,dynamic,lightweight", decoder_conv_type="talk")
    known = [layer.mean is not None for layer in kernels.gather(model, [])]
    assert known == [False, False, True, False, False, False]


def test_the_model_is_left_as_it_was():
    model = model_of("dynamic")
    inputs = sentence(9, 7)
    with torch.no_grad():
        before = model(**inputs)[0]
        kernels.gather(model, [inputs], [0])
        assert torch.equal(model(**inputs)[0], before)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_error_on_the_way_leaves_no_hook():
    model = model_of("dynamic")
    inputs = sentence(9, 7)
    both = {**inputs, "src_tokens": inputs["src_tokens"].repeat(2, 1)}
    with pytest.raises(ValueError, match="one sentence at a time, got a batch of 2"):
        kernels.gather(model, [both])
    assert not any(module._forward_hooks for module in model.modules())


def test_a_mixer_that_is_not_known_is_named():
    model = build("dynamicconv")
    model.encoder.layers[1].self_attn = torch.nn.Linear(16, 16)
    model.encoder.layers[1].self_attn.num_heads = 1
    with pytest.raises(ValueError, match="layer 1 of the encoder has a Linear"):
        kernels.find_probes(model)


def test_fairseqs_own_transformer_has_kernels_too():
    from argparse import Namespace

    from fairseq.models.transformer import TransformerModel, base_architecture

    args = Namespace(encoder_embed_dim=16, encoder_attention_heads=2, encoder_layers=1, decoder_layers=1)
    base_architecture(args)
    words = dictionary()
    args.max_source_positions = args.max_target_positions = 64
    model = TransformerModel.build_model(args, task(words)).eval()
    layers = kernels.gather(model, [sentence(6, 5)], [0])
    assert [(layer.side, layer.kind, len(layer.rows)) for layer in layers] == [
        ("encoder", "attention", 2),
        ("decoder", "attention", 8),
    ]
    np.testing.assert_allclose(layers[1].maps[0].sum(2), 1, rtol=1e-5)
