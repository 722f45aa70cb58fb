"""Layers with fewer passes over memory train as the same layers without: outputs, gradients, masks of dropout."""

import collections
import copy
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.models.transformer import TransformerModel, transformer_legacy
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase

from benchmarks.launches import Counter, as_on_cuda
from lightconv_plugin.criterions.rdrop import RDropCriterion
from lightconv_plugin.models.encoder_decoder import MixerDecoder
from lightconv_plugin.models.joined import join_passes
from lightconv_plugin.models.plain import plain_encoder_decoder
from lightconv_plugin.models.token_mixers import FusedEncoderAttention, replace_dropout
from tests.models.toys import SMALL, batch, build, task

torch.manual_seed(0)
BATCH = batch()
DROPOUT = {"dropout": 0.3, "attention_dropout": 0.1}
KINDS = {
    "dynamicconv": {"relu_dropout": 0.2},
    "lightconv, pre-norm": {"encoder_normalize_before": True, "decoder_normalize_before": True, "relu_dropout": 0.2},
    "talk": {"activation_fn": "swish"},
    "transformer": {"activation_dropout": 0.2},
}


def example(kind):
    """A model in training, with the plugin's dropout everywhere, in float64."""
    if kind == "transformer":
        sizes = {name: value for name, value in SMALL.items() if "kernel" not in name}
        args = Namespace(**sizes, **DROPOUT, **KINDS[kind])
        transformer_legacy.base_architecture(args)
        model = TransformerModel.build_model(args, task())
        replace_dropout(model)
    else:
        architecture = {"talk": "talkconv"}.get(kind, kind.partition(",")[0])
        model = build(architecture, **DROPOUT, **KINDS[kind])
    return model.double().train()


def trained(model):
    """The output and all gradients of a step, with the same random numbers every time."""
    torch.manual_seed(7)
    model.zero_grad()
    out, extra = model(*BATCH)
    out.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return out.detach(), gradients, extra


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_gradients_and_masks_are_the_same(kind):
    model = example(kind)
    joined = copy.deepcopy(model)
    join_passes(joined)
    want, gradients, _ = trained(model)
    found, ours, _ = trained(joined)
    assert want.std() > 0 and not torch.equal(want, model.eval()(*BATCH)[0])
    torch.testing.assert_close(found, want)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_else_changes(kind):
    """The state, evaluation to the bit, copies, the model without fairseq, and a second time."""
    model = example(kind)
    joined = copy.deepcopy(model)
    join_passes(joined)
    join_passes(joined)
    state = joined.state_dict()
    assert list(state) == list(model.state_dict())
    copied = copy.deepcopy(joined)
    torch.testing.assert_close(trained(copied)[0], trained(joined)[0], rtol=0, atol=0)
    want = model.eval()(*BATCH)[0]
    assert torch.equal(joined.eval()(*BATCH)[0], want)
    with torch.no_grad():
        source, _, previous = BATCH
        one, other = (plain_encoder_decoder(each)(source, previous).logits for each in (joined, model))
    assert torch.equal(one, other)


def test_one_operator_for_each_residual_connection():
    """Three layers on each side: two residual connections in those of the encoder, three in those of the decoder."""
    model = example("dynamicconv")
    join_passes(model)
    called = operators_of(model)
    assert called["lightconv::dropout_add_norm"] == called["lightconv::dropout_add_norm_backward"] == 15
    assert called["lightconv::relu_dropout"] == called["lightconv::relu_dropout_backward"] == 6
    assert not called["aten::native_layer_norm"]


def operators_of(model):
    """How often operators are called in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trained(model)
    return collections.Counter(event.name for event in profile.events())


def test_retained_dropout_and_layers_of_others():
    class Own(type(example("transformer").encoder.layers[0])):
        def residual_connection(self, x, residual):
            return 2 * residual + x

    model = example("transformer")
    model.encoder.layers[0].__class__ = Own
    join_passes(model)
    assert "residual_connection" not in vars(model.encoder.layers[0])
    assert "residual_connection" in vars(model.encoder.layers[1])
    torch.manual_seed(1)
    model.train()(*BATCH)
    joined = example("dynamicconv")
    join_passes(joined)
    joined.eval().make_generation_fast_(retain_dropout=True)
    one, other = (joined(*BATCH)[0] for _ in range(2))
    assert not torch.equal(one, other)


def test_under_autocast_and_in_other_types():
    """The norm is in float32 there, as in fairseq's layer."""
    model = example("dynamicconv").float()
    joined = copy.deepcopy(model)
    join_passes(joined)
    with torch.autocast("cpu", torch.bfloat16):
        want, found = trained(model)[0], trained(joined)[0]
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    half, ours = copy.deepcopy(model).bfloat16(), copy.deepcopy(joined).bfloat16()
    want, found = trained(half)[0], trained(ours)[0]
    torch.testing.assert_close(found, want, rtol=0.1, atol=0.1)


def test_weights_of_attention_are_computed_for_criterions_that_read_them():
    model, target = example("dynamicconv"), task()
    target.target_dictionary = target.source_dictionary
    plain = [
        CrossEntropyCriterion(target, False),
        LabelSmoothedCrossEntropyCriterion(target, False, 0.1),
        RDropCriterion(target, False, 0.1, rdrop_alpha=1.0),
    ]
    for criterion, read in [*((kind, False) for kind in plain), (None, True), (torch.nn.Linear(1, 1), True)]:
        join_passes(model, criterion)
        attentions = [layer.encoder_attn for layer in model.decoder.layers]
        assert [attention.weights_are_read for attention in attentions] == [read] * 3


def test_weights_of_attention_are_computed_for_models_that_read_them():
    """A decoder, or a model, with a forward pass of its own may look at them."""

    class Reading(MixerDecoder):
        pass

    class Whole(type(example("dynamicconv"))):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    target = task()
    target.target_dictionary = target.source_dictionary
    for part, kind in (("decoder", Reading), (None, Whole)):
        model = example("dynamicconv")
        (model if part is None else model.decoder).__class__ = kind
        join_passes(model, CrossEntropyCriterion(target, False))
        assert all(layer.encoder_attn.weights_are_read for layer in model.decoder.layers)


def operators_of_a_call(device, call):
    with Counter(device) as counter, as_on_cuda():
        call()
    return counter.counts.launches


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["dynamicconv", "transformer"])
def test_checkpointed_activations_meet_the_same_masks(kind, device):
    """fairseq runs a layer without gradients, and again with them: the same operators both times."""
    model = example(kind)
    join_passes(model)
    layer = model.to(device, torch.float32).encoder.layers[0]
    x, pads = torch.randn(5, 3, 16, device=device), torch.zeros(3, 5, dtype=torch.bool, device=device)
    found = []
    for recorded in (False, True):
        torch.manual_seed(3)

        def run(recorded=recorded):
            with torch.set_grad_enabled(recorded):
                found.append(layer(x, encoder_padding_mask=pads))

        found.append(operators_of_a_call(device, run))
    assert found[1] == found[3] and found[1]["lightconv.dropout_add_norm"] == 2
    if device == "cpu":
        torch.testing.assert_close(found[0], found[2], rtol=1e-5, atol=1e-6)


def test_a_compiled_decoder_layer_is_one_graph():
    layer = example("dynamicconv").to("meta", torch.float32).decoder.layers[0]
    x, pads = torch.randn(5, 3, 16, device="meta"), torch.zeros(3, 6, dtype=torch.bool, device="meta")
    explained = torch._dynamo.explain(TransformerDecoderLayerBase.forward)(layer, x, x.new_zeros(6, 3, 16), pads)
    assert explained.graph_count == 1, explained.break_reasons


def test_dropout_of_everything():
    model = example("dynamicconv")
    model.encoder.layers[0].dropout_module.p = model.decoder.layers[0].activation_dropout_module.p = 1.0
    joined = copy.deepcopy(model)
    join_passes(joined)
    torch.testing.assert_close(trained(joined)[0], trained(model)[0])


def test_modules_that_were_replaced_are_called():
    """In the models without fairseq too, where the layer knows its norm and its dropout."""
    seen = []
    plain = plain_encoder_decoder(example("dynamicconv")).float().train()
    norm, dropout = (getattr(plain.encoder.layers[0], name) for name in ("final_layer_norm", "dropout_module"))
    norm.register_forward_hook(lambda *_: seen.append("norm"))
    dropout.register_forward_pre_hook(lambda *_: seen.append("dropout"))
    plain.encoder.layers[1].final_layer_norm = torch.nn.RMSNorm(16)
    plain.encoder.layers[2].dropout_module = torch.nn.Dropout(0.1)
    plain(BATCH[0], BATCH[2]).logits.sum().backward()
    assert seen.count("norm") == 1 and seen.count("dropout") == 2


def test_modules_are_called_for_torchs_global_hooks():
    seen = []
    plain = plain_encoder_decoder(example("dynamicconv")).float().train()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        plain(BATCH[0], BATCH[2])
    finally:
        handle.remove()
    expected = [layer.final_layer_norm for layer in plain.encoder.layers]
    assert [module for module in seen if module in expected] == expected


def test_attention_of_fairseqs_transformer_takes_the_fused_kernels():
    model = example("transformer")
    assert type(model.decoder.layers[0].encoder_attn) is MultiheadAttention
    join_passes(model)
    assert all(type(layer.encoder_attn) is FusedEncoderAttention for layer in model.decoder.layers)


def test_without_the_relu_nothing_is_done_to_its_dropout():
    model = example("dynamicconv")
    for layer in model.encoder.layers:
        layer.activation_dropout_module.p = 0.0
    join_passes(model)
    assert all(layer.activation_fn is F.relu for layer in model.encoder.layers)
    assert not any(layer.activation_fn is F.relu for layer in model.decoder.layers)
