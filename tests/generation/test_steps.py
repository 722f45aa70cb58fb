"""StepModel: a step is the last position of the model's own full pass, whatever happened to the hypotheses before."""

from functools import cache

import pytest
import torch

pytest.importorskip("fairseq")

from lightconv_plugin.generation import StepModel
from lightconv_plugin.generation.beams import Beams
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.models.plain import plain_model
from tests.generation import toys
from tests.models.toys import VARIANTS

DECODERS = [*MIXERS, *VARIANTS, "dynamic,attention,talk"]


@cache
def build(mixer):
    torch.manual_seed(3)
    return toys.fairseqs() if mixer == "fairseq" else toys.ours(mixer)


def full(model, sample, sentences, history):
    """Logits of the last position by teacher forcing; history (sentences, beam, steps)."""
    net_input = {name: value[sentences].repeat_interleave(history.shape[1], 0) for name, value in sample.items()}
    with torch.no_grad():
        return model(**net_input, prev_output_tokens=history.flatten(0, 1))[0][:, -1]


@pytest.mark.parametrize("mixer", [*DECODERS, "fairseq"])
@pytest.mark.parametrize(("sentences", "beam"), [(1, 1), (4, 3), (19, 2)])
def test_steps_reorders_and_leaving_sentences(mixer, sentences, beam):
    """At random: hypotheses descend from others of their sentence, sentences leave and change places."""
    model = build(mixer)
    sample = toys.batch(sentences)["net_input"]
    steps = StepModel(plain_model(model))
    state = steps.start(sample["src_tokens"], beam)
    alive = torch.arange(sentences)
    history = torch.full((sentences, 1, 1), 2)
    for time in range(7):
        logits = steps.step(state, history[:, :, -1].flatten())
        assert logits.shape == (history.shape[0] * history.shape[1], toys.VOCABULARY)
        torch.testing.assert_close(logits, full(model, sample, alive, history), rtol=1e-4, atol=1e-4)
        if time % 2 and len(alive) > 1:
            order = torch.randperm(len(alive))[: len(alive) - 1 - time % 3]
            # A sentence may only move where one has left, as in the search: the others stay.
            remaining = sorted(order.tolist())
            movers = [i for i in remaining if i >= len(remaining)]
            order = torch.tensor([i if i in remaining else movers.pop() for i in range(len(remaining))])
            steps.keep(state, order.tolist())
            alive, history = alive[order], history[order]
        parents = torch.randint(history.shape[1], (len(alive), beam))
        history = history.gather(1, parents.unsqueeze(2).expand(-1, -1, history.shape[2]))
        steps.reorder(state, (parents + torch.arange(0, len(alive) * beam, beam).unsqueeze(1)).flatten())
        words = torch.randint(4, toys.VOCABULARY, (len(alive), beam, 1))
        history = torch.cat([history, words], dim=2)


@pytest.mark.parametrize("mixer", ["dynamic,attention,talk", "lightweight,conv,depthwise", "fairseq"])
def test_bfloat16_is_close(mixer):
    """Logits of several steps, relative to their standard deviation (root mean square)."""
    model = build(mixer)
    sample = toys.batch(6)["net_input"]
    words = torch.randint(4, toys.VOCABULARY, (5, 6 * 3))
    logits = {}
    for kind in "float32", "bfloat16":
        steps = StepModel(plain_model(model), kind)
        state = steps.start(sample["src_tokens"], 3)
        logits[kind] = torch.stack([steps.step(state, row) for row in words])
    error = (logits["bfloat16"] - logits["float32"]).square().mean().sqrt() / logits["float32"].std()
    assert 1e-5 < float(error) < 0.03


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_of_a_gpu_encodes_with_every_mixer(monkeypatch, dtype):
    monkeypatch.setattr("lightconv_plugin.generation.steps.on_gpu", lambda tensor: True)
    sample = toys.batch(6)["net_input"]
    for mixer in MIXERS:
        steps = StepModel(plain_model(toys.ours(encoder_conv_type=mixer, encoder_glu=False)), dtype)
        assert steps.start(sample["src_tokens"], 3).source_mask.dtype == getattr(torch, dtype)


def test_wrong_number_of_rows():
    beams = Beams(4, 3, torch.device("cpu"))
    beams.advance(4)
    with pytest.raises(ValueError, match="tokens: got 4 for 4 sentences × 3 hypotheses"):
        beams.advance(4)


def test_ancestors():
    """Two sentences of three hypotheses; who descends from whom, written out."""
    beams = Beams(2, 3, torch.device("cpu"))
    beams.advance(2)
    beams.begin()
    beams.reorder(torch.tensor([0, 0, 0, 3, 3, 3]))
    beams.advance(6)
    beams.begin()
    beams.reorder(torch.tensor([1, 1, 0, 5, 3, 4]))
    beams.advance(6)
    beams.begin()
    # Rings of 4 slots: rows of slot s begin at 6 s. Steps 2, 1, 0.
    expected = [[12, 7, 0], [13, 7, 0], [14, 6, 0], [15, 11, 3], [16, 9, 3], [17, 10, 3]]
    assert beams.addresses(3, 4).tolist() == expected
    # A ring of 2 has step 2 in its first slot and step 1 in the other.
    seen = beams.mask(2, 2, torch.float32).eq(0).view(6, 2, 3).nonzero()[:, 2].view(6, 2)
    assert seen.tolist() == [[0, 1], [1, 1], [2, 0], [0, 2], [1, 0], [2, 1]]
