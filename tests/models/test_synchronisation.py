"""Forward and backward pass in training: nothing for which the host would wait for the device, in any layer.

On a CPU nothing waits, but the operations are the same that would on a GPU: reading a number of a tensor, and whatever
has a size that depends on a tensor's content.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.language_model_toys import build_lm
from tests.models.toys import batch, build

aten = torch.ops.aten
WAITING = (
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.item,
    aten.nonzero,
    aten.masked_select,
    aten.unique_dim,
    aten.unique_consecutive,
    aten._unique2,
    aten.equal,
    aten.allclose,
)
MIXERS = ("lightweight", "dynamic", "talk", "depthwise", "conv", "window_attention")
# fairseq's sinusoidal positions compare a length that lives on the host; a CPU cannot tell that from a wait.
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
DROPOUT = {"dropout": 0.2, "input_dropout": 0.2, "attention_dropout": 0.1, "weight_dropout": 0.1, "relu_dropout": 0.1}


class RefuseToWait(TorchDispatchMode):
    """Fails at the first operation for which the host would wait."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        if func.overloadpacket in WAITING or (func.overloadpacket is aten.index and _by_mask(args[1])):
            raise AssertionError(f"{func}: the host would wait for the device")
        return func(*args, **(kwargs or {}))


def _by_mask(indices):
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def update(model, *arguments):
    with RefuseToWait() as mode:
        logits, _ = model(*arguments)
        (-torch.log_softmax(logits.float(), dim=-1)).mean().backward()
    return mode.seen


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("normalize_before", [False, True])
def test_an_encoder_decoder(mixer, normalize_before):
    norms = {"encoder_normalize_before": normalize_before, "decoder_normalize_before": normalize_before}
    options = {"encoder_conv_type": mixer, "decoder_conv_type": mixer, **norms, **LEARNED, **DROPOUT}
    model = build(**options).train()
    assert update(model, *batch()) > 100
    assert all(p.grad is not None for p in model.parameters())


def test_left_padded_targets_and_recomputed_activations():
    from tests.models.toys import task

    model = build("dynamicconv", task(left_pad_target=True), checkpoint_activations=True, **LEARNED, **DROPOUT).train()
    assert update(model, *batch()) > 100


@pytest.mark.parametrize("mixer", ["lightweight", "dynamic", "talk"])
def test_a_language_model(mixer):
    model = build_lm(decoder_conv_type=mixer, decoder_learned_pos=True, **DROPOUT).train()
    assert update(model, batch()[2]) > 50


@pytest.mark.parametrize("wait", ["item", "nonzero", "mask", "condition"])
def test_what_waits_is_refused(wait):
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="the host would wait"), RefuseToWait():
        {
            "item": lambda: x.sum().item(),
            "nonzero": lambda: x.nonzero(),
            "mask": lambda: x[x > 0],
            "condition": lambda: bool((x > 0).any()),
        }[wait]()


def test_fairseqs_own_encoder_is_refused():
    from fairseq.models.transformer import TransformerEncoderBase

    model = build(encoder_learned_pos=True)
    with pytest.raises(AssertionError, match="the host would wait"), RefuseToWait():
        TransformerEncoderBase.forward_scriptable(model.encoder, *batch()[:2])
