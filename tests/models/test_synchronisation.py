"""Forward and backward pass in training: nothing for which the host would wait for the device, in any layer.

tests/waiting.py says how that is seen without a GPU.
"""

import pytest
import torch
from fairseq.modules import SinusoidalPositionalEmbedding

from tests.models.language_model_toys import build_lm
from tests.models.toys import VARIANTS, batch, build
from tests.waiting import RefuseToWait

MIXERS = ("lightweight", "dynamic", "talk", "gated_short", "depthwise", "conv", "window_attention", *VARIANTS)
# fairseq's sinusoidal positions compare a length that lives on the host; only "meta" can tell that from a wait.
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
DROPOUT = {"dropout": 0.2, "input_dropout": 0.2, "attention_dropout": 0.1, "weight_dropout": 0.1, "relu_dropout": 0.1}


def update(model, *arguments, device="cpu"):
    model, arguments = model.to(device), [argument.to(device) for argument in arguments]
    for module in model.modules():
        if isinstance(module, SinusoidalPositionalEmbedding):  # which fairseq 0.12.2 moves in the first pass
            module.weights = module.weights.to(device)
    with RefuseToWait(device) as mode:
        logits, _ = model(*arguments)
        (-torch.log_softmax(logits.float(), dim=-1)).mean().backward()
    return mode.seen


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("device, normalize_before", [("cpu", False), ("meta", True)])
def test_an_encoder_decoder(mixer, normalize_before, device):
    norms = {"encoder_normalize_before": normalize_before, "decoder_normalize_before": normalize_before}
    positions = LEARNED if device == "cpu" else {}
    options = {"encoder_conv_type": mixer, "decoder_conv_type": mixer, **norms, **positions, **DROPOUT}
    model = build(**options).train()
    assert update(model, *batch(), device=device) > 100
    assert all(p.grad is not None for p in model.parameters())


def test_left_padded_targets_and_recomputed_activations():
    from tests.models.toys import task

    model = build("dynamicconv", task(left_pad_target=True), checkpoint_activations=True, **LEARNED, **DROPOUT).train()
    assert update(model, *batch()) > 100


@pytest.mark.parametrize("mixer", ["lightweight", "dynamic", "talk"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_language_model(mixer, device):
    model = build_lm(decoder_conv_type=mixer, decoder_learned_pos=device == "cpu", **DROPOUT).train()
    assert update(model, batch()[2], device=device) > 50


def test_fairseqs_own_encoder_is_refused():
    from fairseq.models.transformer import TransformerEncoderBase

    model = build(encoder_learned_pos=True)
    with pytest.raises(AssertionError, match="the host would wait"), RefuseToWait():
        TransformerEncoderBase.forward_scriptable(model.encoder, *batch()[:2])
