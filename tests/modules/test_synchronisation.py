"""Plain models and operators: no step of training or decoding makes the host wait for the device (tests/waiting.py)."""

import pytest
import torch

from lightconv_plugin import ops
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.modules.config import AdaptiveInputConfig, AdaptiveSoftmaxConfig
from lightconv_plugin.modules.outputs import AdaptiveSoftmax
from tests.generation.recordings import Recordings
from tests.modules.plain_models import TrainingStep, model_of, words
from tests.waiting import RefuseToWait

DEVICES = ["cpu", "meta"]


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("encoder", [True, False], ids=["translation", "language-model"])
@pytest.mark.parametrize("device", DEVICES)
def test_training(device, encoder, mixer, positions):
    model = model_of(mixer, encoder=encoder, positions=positions).to(device)
    inputs = (words(device, 7), words(device)) if encoder else (words(device),)
    labels = words(device)
    with RefuseToWait(device) as mode:
        model(*inputs, labels, label_smoothing=0.1).loss.backward()
    assert mode.seen > 50
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_training_in_bands_of_words_as_a_graph_captures_it(device, monkeypatch):
    monkeypatch.setattr(AdaptiveSoftmax, "by_band", lambda self, x: False)
    bands = {
        "adaptive_input": AdaptiveInputConfig((20,)),
        "adaptive_softmax": AdaptiveSoftmaxConfig((20,), dropout=0.1),
    }
    model = model_of("dynamic", encoder=False, **bands).to(device)
    batch, labels = words(device), words(device)
    with RefuseToWait(device) as mode:
        model(batch, labels).loss.backward()
    assert mode.seen > 50
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_recorded_training_step_trains(mixer):
    """With dropout, on other batches of its size: as by a CUDA graph (tests/generation/recordings.py)."""
    results = []
    for recorded in (False, True):
        step = TrainingStep(model_of(mixer))
        step()
        run = Recordings().record(step) if recorded else step
        if not recorded:
            run()
        for seed in range(3):
            step.load(seed)
            run()
        results.append([parameter.detach() for parameter in step.parameters])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert any(not torch.equal(new, old) for new, old in zip(results[0], model_of(mixer).parameters(), strict=True))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_steps(mixer, positions):
    """On "meta" alone: on a CPU the length is checked, which reads it."""
    model = model_of(mixer, positions=positions).to("meta").eval()
    source, token = words("meta", 7), words("meta", 1)
    with RefuseToWait("meta") as mode, torch.no_grad():
        state = model.start(model.encode(source))
        for _ in range(3):
            _, state = model.step(token, state)
            state = state.reorder(torch.zeros(3, dtype=torch.int64, device="meta"))
    assert mode.seen > 50


def filters(operator, steps, batch, device):
    shape = (4, 5) if operator == "lightconv" else (steps, batch, 4, 5)
    return torch.randn(shape, device=device, requires_grad=True)


@pytest.mark.parametrize("operator", ["lightconv", "dynamicconv", "talkconv"])
@pytest.mark.parametrize("sequences", ["lengths", "cu_seqlens", "all"])
def test_operators_with_sequences(operator, sequences):
    """On "meta" alone: on a CPU the lengths are checked, which reads them."""
    batch = 1 if sequences == "cu_seqlens" else 3
    x = torch.randn(12, batch, 16, device="meta", requires_grad=True)
    given = {
        "lengths": {"lengths": torch.zeros(3, dtype=torch.int64, device="meta")},
        "cu_seqlens": {"cu_seqlens": torch.zeros(5, dtype=torch.int32, device="meta")},
        "all": {},
    }[sequences]
    with RefuseToWait("meta") as mode:
        if operator == "talkconv":
            left, right = (torch.rand(12, batch, 4, device="meta", requires_grad=True) for _ in range(2))
            out = ops.talkconv(x, left, right, 3, 2, **given)
        else:
            out = getattr(ops, operator)(x, filters(operator, 12, batch, "meta"), 2, dropout=0.1, **given)
        out.sum().backward()
    assert x.grad is not None and mode.seen > 3


@pytest.mark.parametrize("wait", ["item", "nonzero", "mask", "assignment", "condition", "repeats", "cpu", "upload"])
@pytest.mark.parametrize("device", DEVICES)
def test_what_waits_is_refused(device, wait):
    if device == "cpu" and wait in ("cpu", "upload"):
        pytest.skip("there is one device")
    x = torch.ones(3, device=device)
    with pytest.raises(AssertionError, match=r"the host would wait|from one device to another"), RefuseToWait(device):
        {
            "item": lambda: x.sum().item(),
            "nonzero": lambda: x.nonzero(),
            "mask": lambda: x[x > 0],
            "assignment": lambda: x.__setitem__(x > 0, x),
            "condition": lambda: bool((x > 0).any()),
            "repeats": lambda: x.repeat_interleave(x.long()),
            "cpu": lambda: x.cpu(),
            "upload": lambda: torch.ones(3).to(device),
        }[wait]()


def test_a_wait_in_a_backward_pass_is_refused():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * float(grad.sum())

    for device in DEVICES:
        x = torch.ones(3, device=device, requires_grad=True)
        with pytest.raises(AssertionError, match="the host would wait"), RefuseToWait(device):
            Reads.apply(x).sum().backward()
