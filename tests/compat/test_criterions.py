"""fairseq's criterions: label_smoothing_passes gives its losses and gradients, adaptive_loss_words counts all words."""

import math

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion as Criterion

import lightconv_plugin.models  # noqa: F401 (the patches)
from benchmarks.launches import Counter
from lightconv_plugin.compat import criterions
from lightconv_plugin.ops import backends
from tests.models.language_model_toys import EMBEDDINGS, WORDS, build_lm, lm_task, log_probabilities
from tests.models.toys import batch, build, task

FAIRSEQS = Criterion.compute_loss.__wrapped__
native = pytest.mark.skipif(backends.backend("cpu") != "cpu", reason="there are no native kernels here")


def sample():
    source, lengths, previous = batch()
    target = previous.roll(-1, dims=1)
    target[0, -2:] = task().target_dictionary.pad()
    inputs = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": previous}
    return {"net_input": inputs, "target": target, "ntokens": int(target.ne(1).sum())}


def compute(function, model, criterion, reduce=True):
    """The two losses, all gradients, and the operators that the losses and gradients took."""
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**sample()["net_input"])
    with Counter("cpu") as counter:
        losses = function(criterion, model, output, sample(), reduce)
        losses[0].sum().backward()
    return [*losses, *(parameter.grad for parameter in model.parameters())], counter.counts.launches


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("prefix", [0, 2])
def test_the_losses_and_gradients_are_fairseqs(dtype, reduce, prefix):
    model = build().to(dtype).train()
    criterion = Criterion(task(), False, 0.1, ignore_prefix_size=prefix)
    ours, operators = compute(Criterion.compute_loss, model, criterion, reduce)
    theirs, their_operators = compute(FAIRSEQS, model, criterion, reduce)
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=limit, atol=limit, check_dtype=False)
    assert operators["lightconv.label_smoothed_nll"] == 1 and not operators["aten._log_softmax"]
    assert their_operators["aten._log_softmax"] == 1


@native
def test_a_wrapped_model_and_fairseqs_own():
    from benchmarks import systems

    class Wrapped(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = build()
    output = model(**sample()["net_input"])
    assert criterions.plain_logits(Wrapped(model), output) is output[0]
    preset = systems.sized(systems.PRESETS["iwslt_de_en"], True, None, None)
    theirs = systems.build(systems.TRANSFORMER, preset, systems.task(systems.dictionary(50)), tiny=True)
    tokens = torch.full((2, 3), 7)
    assert criterions.plain_logits(theirs, theirs(tokens, torch.tensor([3, 3]), tokens)) is not None


def test_other_probabilities_take_fairseqs_code(monkeypatch):
    adaptive = build(adaptive_softmax_cutoff=[4, 8], share_all_embeddings=False, share_decoder_input_output_embed=False)
    assert criterions.plain_logits(adaptive, adaptive(**sample()["net_input"])) is None
    model = build()
    output = model(**sample()["net_input"])
    monkeypatch.setattr(type(model.decoder), "get_normalized_probs", lambda *args: 0, raising=False)
    assert criterions.plain_logits(model, output) is None


def test_a_criterion_with_other_targets_takes_fairseqs_code():
    class Other(Criterion):
        def get_lprobs_and_target(self, model, net_output, sample):
            lprobs, target = super().get_lprobs_and_target(model, net_output, sample)
            return lprobs[:3], target[:3]

    model = build()
    losses, operators = compute(Criterion.compute_loss, model, Other(task(), False, 0.1), reduce=False)
    assert losses[0].shape == (3, 1) and not operators["lightconv.label_smoothed_nll"]


@native
def test_a_language_model():
    model = build_lm()
    assert criterions.plain_logits(model, model(batch()[2])) is not None


@pytest.mark.parametrize("embeddings", ["adaptive-softmax", "adaptive", "adaptive-tied-proj"])
def test_every_word_of_every_band_is_in_the_adaptive_loss(embeddings):
    """fairseq leaves out the second word of each later band, whose number in the band is the pad's."""
    model, task = build_lm(**EMBEDDINGS[embeddings]).double(), lm_task()
    target = torch.arange(WORDS)[None]
    source = target.roll(1, dims=1)
    expected = -log_probabilities(model, source)[0].diagonal()[target[0] != task.dictionary.pad()]
    sample = {"net_input": {"src_tokens": source}, "target": target}
    for sentence_avg, wanted in ((False, WORDS - 1), (True, 1)):
        loss, size, log = AdaptiveLoss(task, sentence_avg)(model, sample)
        assert size == log["sample_size"] == wanted and log["ntokens"] == WORDS - 1
        torch.testing.assert_close(loss, expected.sum().reshape(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_adaptive_loss_of_a_large_batch_in_half_types(dtype):
    """A sum in float16 ends at 65,504, and one in bfloat16 has two digits."""
    model, task = build_lm(**EMBEDDINGS["adaptive-softmax"]), lm_task()
    model.decoder.adaptive_softmax.to(dtype)
    features = torch.zeros(1, 30_011, 20, dtype=dtype)  # a word of the first band is one of its 8 or of 2 others
    model.forward = lambda: (features,)
    loss, _, log = AdaptiveLoss(task, sentence_avg=False)(
        model, {"net_input": {}, "target": torch.full((1, 30_011), 5)}
    )
    assert loss.dtype == log["loss"].dtype == torch.float32
    assert loss.item() == pytest.approx(30_011 * math.log(10), rel=4e-3)
