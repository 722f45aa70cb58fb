"""R-Drop and SimCut against two passes with the same masks, label-smoothed cross-entropy, and fairseq's R-Drop."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion as Plain
from fairseq.logging import metrics
from fairseq.modules import FairseqDropout

from benchmarks import systems
from benchmarks.launches import Counter
from lightconv_plugin.criterions import RDROP, SIMCUT, RDropCriterion, SimCutCriterion, consistency
from lightconv_plugin.criterions.consistency import Divergence
from lightconv_plugin.criterions.simcut import second_half_cut
from lightconv_plugin.errors import InputError
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.ops import backends
from tests.models.language_model_toys import build_lm
from tests.models.toys import VARIANTS, batch, build, task

NOTHING = 4  # a word that no sentence has; where the tests cut tokens by hand, it has the embedding 0
BOTH = pytest.mark.parametrize("name", ["rdrop", "simcut"])


def sample(seed: int = 0, lengths=(7, 4, 9, 5), target_lengths=(6, 8, 3, 8)) -> dict:
    torch.manual_seed(seed)
    source, source_lengths, previous = (tokens.clone() for tokens in batch(lengths, target_lengths))
    source[source == NOTHING] = 5
    previous[previous == NOTHING] = 5
    previous[:, 0] = 2  # fairseq's decoders begin with the end of the sentence
    target = torch.cat([previous[:, 1:], torch.ones(len(previous), 1, dtype=torch.long)], 1)
    inputs = {"src_tokens": source, "src_lengths": source_lengths, "prev_output_tokens": previous}
    return {"net_input": inputs, "target": target, "ntokens": int(target.ne(1).sum())}


def criterion(name: str, alpha: float = 5.0, *, p: float = 0.3, sentence_avg: bool = False, **options):
    options = {"label_smoothing": 0.1, **options}
    if name == "rdrop":
        return RDropCriterion(task(), sentence_avg, rdrop_alpha=alpha, **options)
    return SimCutCriterion(task(), sentence_avg, simcut_alpha=alpha, simcut_p=p, **options)


def transformer() -> torch.nn.Module:
    preset = systems.sized(systems.PRESETS["iwslt_de_en"], True, None, None)
    return systems.build(systems.TRANSFORMER, preset, systems.task(systems.dictionary(30)), tiny=True)


def model_of(kind: str) -> torch.nn.Module:
    """In training, in float64, with dropout only where `Masks` sees it."""
    torch.manual_seed(1)
    if kind == "transformer":
        model = transformer()
    else:
        options = {f"{side}_conv_type": kind for side in ("encoder", "decoder")} if kind != "dynamic" else {}
        model = build(**options, dropout=0.3, attention_dropout=0.0, weight_dropout=0.0, input_dropout=0.2)
    for module in model.modules():
        if type(module).__name__ == "MultiheadAttention" and hasattr(module, "dropout_module"):
            module.dropout_module.p = 0.0  # torch's attention draws the mask inside one operator
    with torch.no_grad():
        model.encoder.embed_tokens.weight[NOTHING] = 0
        model.decoder.embed_tokens.weight[NOTHING] = 0
    return model.double().train()


class Masks:
    """Dropout whose masks for a batch that has each sentence twice can be used again, for each half on its own."""

    def __init__(self, monkeypatch, sentences: int) -> None:
        self.drawn: list[Tensor] = []
        self.half: int | None = None
        self._place, self._sentences = 0, sentences
        for kind in (Dropout, FairseqDropout):
            monkeypatch.setattr(kind, "forward", lambda module, x, *args, **kwargs: self.drop(module, x))

    def drop(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        if not module.p:
            return x
        if self.half is None:
            self.drawn.append(F.dropout(torch.ones_like(x), module.p))
            return x * self.drawn[-1]
        mask = self.drawn[self._place]
        self._place += 1
        [dimension] = [i for i, size in enumerate(mask.shape) if size != x.shape[i]]
        assert mask.shape[dimension] == 2 * self._sentences
        return x * mask.chunk(2, dimension)[self.half]

    def again(self, half: int) -> None:
        assert self.half is None or self._place == len(self.drawn)
        self.half, self._place = half, 0


def smoothed(log_p: Tensor, target: Tensor, epsilon: float) -> Tensor:
    """The sum of the smoothed losses of the tokens that are not padding, from the definition."""
    words = log_p.shape[-1]
    weights = torch.full_like(log_p, epsilon / (words - 1)).scatter(2, target.unsqueeze(2), 1 - epsilon)
    return -((weights * log_p).sum(-1) * target.ne(1)).sum()


def kl(first: Tensor, second: Tensor, target: Tensor) -> Tensor:
    return (F.kl_div(second, first, log_target=True, reduction="none").sum(-1) * target.ne(1)).sum()


def by_hand(name: str, model, given: dict, masks: Masks, cuts, prefix: int, epsilon: float, alpha: float) -> Tensor:
    """The loss from two passes of the model."""
    found = []
    for half in (0, 1):
        masks.again(half)
        inputs = copy.deepcopy(given["net_input"])
        if name == "simcut" and half:
            for side, cut in zip(("src_tokens", "prev_output_tokens"), cuts, strict=True):
                inputs[side] = inputs[side].masked_fill(cut & inputs[side].gt(2), NOTHING)
        found.append(F.log_softmax(model(**inputs)[0], -1)[:, prefix:])
    first, second = found
    target = given["target"][:, prefix:]
    loss = smoothed(first, target, epsilon)
    if name == "simcut":
        return loss + alpha * kl(first, second, target)
    both = (kl(first, second, target) + kl(second, first, target)) / 2
    return loss + smoothed(second, target, epsilon) + alpha * both


@BOTH
@pytest.mark.parametrize("kind", [*MIXERS, *VARIANTS, "transformer"])
@pytest.mark.parametrize("prefix, epsilon", [(0, 0.1), (2, 0.0)], ids=["plain", "prefix"])
def test_one_pass_over_both_is_two_passes(monkeypatch, name, kind, prefix, epsilon):
    """The loss and all gradients, with ragged batches and padding on both sides."""
    model, given = model_of(kind), sample()
    loss_of = criterion(name, 3.0, ignore_prefix_size=prefix, label_smoothing=epsilon)
    masks, drawn, rand = Masks(monkeypatch, 4), [], torch.rand
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: drawn.append(rand(*args, **kwargs)) or drawn[-1])
    before = copy.deepcopy(given)
    loss, _, logged = loss_of(model, given)
    assert all(torch.equal(given["net_input"][key], value) for key, value in before["net_input"].items())
    loss.backward()
    mine = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    cuts = [each < 0.3 for each in drawn]
    expected = by_hand(name, model, given, masks, cuts, prefix, epsilon, 3.0)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    assert logged["loss"] == loss and logged[loss_of.logged_as] > 0
    assert len(cuts) == (2 if name == "simcut" else 0) and all(cut.any() for cut in cuts)
    for key, parameter in model.named_parameters():
        theirs = parameter.grad
        if key.endswith("embed_tokens.weight"):
            mine[key][NOTHING] = theirs[NOTHING] = 0  # by hand, the word is embedded
        torch.testing.assert_close(mine[key], theirs, rtol=1e-7, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")


@BOTH
@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("sentence_avg", [True, False])
def test_without_divergence_it_is_label_smoothed_cross_entropy(name, reduce, sentence_avg):
    """Exactly; in validation whatever alpha is, without a second pass."""
    model, given = build(dropout=0.3), sample()
    options = {"sentence_avg": sentence_avg, "report_accuracy": True}
    plain = Plain(task(), label_smoothing=0.1, **options)
    for training, alpha in ((True, 0.0), (False, 5.0)):
        model.train(training)
        found = []
        for loss_of in (plain, criterion(name, alpha, **options)):
            torch.manual_seed(3)
            found.append(loss_of(model, copy.deepcopy(given), reduce))
        (loss, size, logged), (ours, our_size, ours_logged) = found
        assert torch.equal(loss, ours) and size == our_size == (4 if sentence_avg else given["ntokens"])
        assert logged.keys() == ours_logged.keys()
        assert all(torch.equal(torch.as_tensor(logged[key]), torch.as_tensor(ours_logged[key])) for key in logged)


@BOTH
def test_unreduced_losses_are_those_of_the_tokens(name):
    model, given = build(dropout=0.3).train(), sample()
    found = []
    for reduce in (True, False):
        torch.manual_seed(3)
        found.append(criterion(name)(model, given, reduce)[0])
    whole, tokens = found
    assert tokens.shape == (given["target"].numel(), 1)
    torch.testing.assert_close(tokens.sum(), whole)
    assert not tokens[given["target"].reshape(-1) == 1].any() and tokens[given["target"].reshape(-1) != 1].all()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.skipif(backends.backend("cpu") != "cpu", reason="there are no native kernels here")
def test_the_cross_entropy_is_one_operator(name, dtype):
    model = build(dropout=0.1).to(dtype).train()
    with Counter("cpu") as counter:
        loss, _, logged = criterion(name)(model, sample())
        loss.backward()
    assert counter.counts.launches["lightconv.label_smoothed_nll"] == 1
    assert loss.dtype == logged[criterion(name).logged_as].dtype == torch.float32


@pytest.mark.parametrize("shared", [True, False])
def test_a_cut_is_of_the_second_half_only(shared):
    """With p = 1 all tokens but the ends of sentences are cut, on both sides, and only while the model is called."""
    model, given = build(share_all_embeddings=shared).train(), sample()["net_input"]
    sides = {"src_tokens": model.encoder.embed_tokens, "prev_output_tokens": model.decoder.embed_tokens}
    assert (sides["src_tokens"] is sides["prev_output_tokens"]) == shared
    with torch.no_grad():
        for key, embed in sides.items():
            with second_half_cut(model, 1.0, 2):
                first, second = embed(torch.cat([given[key]] * 2)).chunk(2)
            assert torch.equal(first, embed(given[key])) and torch.equal(second, first * given[key].eq(2).unsqueeze(-1))
    criterion("simcut")(model, sample())
    assert not any(embed._forward_hooks for embed in sides.values())


def test_cuts_are_as_frequent_as_asked():
    model, tokens = build(), torch.full((2, 20_000), 7)
    with torch.no_grad(), second_half_cut(model, 0.05, 2):
        _, second = model.encoder.embed_tokens(tokens)
    share = second.eq(0).all(-1).double().mean().item()
    assert abs(share - 0.05) < 5 * math.sqrt(0.05 * 0.95 / 20_000)


@BOTH
def test_other_probabilities(monkeypatch, name):
    """A model's own definition of them is used in both parts of the loss."""
    model = build(dropout=0.3).train()

    def flatter(self, output, log_probs, sample):
        return F.log_softmax(output[0] / 2, -1)

    monkeypatch.setattr(type(model.decoder), "get_normalized_probs", flatter, raising=False)
    outputs: list[Tensor] = []
    model.register_forward_hook(lambda module, arguments, output: outputs.append(output[0]))
    loss, *_ = criterion(name, 3.0)(model, sample())
    first, second = F.log_softmax(outputs[0] / 2, -1).chunk(2)
    target = sample()["target"]
    expected = smoothed(first, target, 0.1) + 3 * kl(first, second, target)
    if name == "rdrop":
        back = kl(second, first, target) - kl(first, second, target)
        expected += smoothed(second, target, 0.1) + 3 / 2 * back
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [1, 100, 2**17])
def test_the_divergence_in_blocks(monkeypatch, symmetric, dtype, block):
    """Its values and gradients are torch's in float64, of views whose rows do not follow one another."""
    monkeypatch.setitem(consistency._BLOCK, "cpu", block)
    torch.manual_seed(5)
    logits = (3 * torch.randn(6, 5, 17)).to(dtype).requires_grad_()
    weights = torch.randn(3, 4).to(torch.promote_types(dtype, torch.float32))
    found = Divergence.apply(*logits[:, 1:].chunk(2), symmetric)
    assert found.dtype == weights.dtype
    (found * weights).sum().backward()
    exact = logits.detach().double().requires_grad_()
    first, second = exact.log_softmax(-1)[:, 1:].chunk(2)
    expected = F.kl_div(second, first, log_target=True, reduction="none").sum(-1)
    if symmetric:
        expected = (expected + F.kl_div(first, second, log_target=True, reduction="none").sum(-1)) / 2
    (expected * weights.double()).sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad, exact.grad.to(dtype), rtol=1e-2 if dtype.itemsize == 2 else 1e-4, atol=1e-5)


@BOTH
@pytest.mark.skipif(backends.backend("cpu") != "cpu", reason="there are no native kernels here")
def test_only_the_logits_are_kept_for_the_gradients(name):
    """Both parts of the loss keep the same tensor: probabilities in float32 would be several times as large."""
    model, given = build(dropout=0.1).to(torch.bfloat16).train(), sample()
    words, tokens, kept = len(task().target_dictionary), given["target"].numel(), {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[-1:] == (words,) and tensor.numel() >= tokens * words:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        criterion(name)(model, given)[0].backward()
    assert list(kept.values()) == [2 * tokens * words * torch.bfloat16.itemsize]


@BOTH
def test_a_language_model(name):
    model, given = build_lm().train(), sample()
    tokens = given["net_input"].pop("prev_output_tokens")
    loss, _, logged = criterion(name)(model, {**given, "net_input": {"src_tokens": tokens}})
    loss.backward()
    assert loss > 5.0 * logged[criterion(name).logged_as] > 0


@BOTH
def test_a_batch_of_prefixes_alone_has_no_loss(name):
    model, given = model_of("dynamic"), sample()
    loss, size, logged = criterion(name, 3.0, ignore_prefix_size=given["target"].shape[1])(model, given)
    loss.backward()
    assert loss == logged["nll_loss"] == logged[criterion(name).logged_as] == 0 and size > 0


@BOTH
@pytest.mark.parametrize("alpha", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_none(name, alpha):
    with pytest.raises(InputError, match=f"--{name}-alpha must be a number of at least 0, got {alpha}"):
        criterion(name, alpha)


def test_wrong_options_and_models():
    with pytest.raises(InputError, match=r"--simcut-p must be a probability, 0 … 1, got 1.5"):
        criterion("simcut", p=1.5)
    with pytest.raises(ValueError, match="SimCut needs a model whose encoder or decoder has embed_tokens, got Linear"):
        criterion("simcut").passes(torch.nn.Linear(1, 1), {})


@BOTH
def test_the_logs_of_several_processes_are_reduced(name):
    """Bits per token, or per sentence, over all batches; no divergence in the log of a validation."""
    model, loss_of = build(dropout=0.3).train(), criterion(name, report_accuracy=True)
    logs = [loss_of(model, sample(seed))[2] for seed in (1, 2)]
    logs.append({key: 0 * value for key, value in logs[0].items()})  # a process without a batch
    with metrics.aggregate() as found:
        type(loss_of).reduce_metrics(logs)
    values = found.get_smoothed_values()
    tokens = sum(log["ntokens"] for log in logs)
    for key in ("loss", "nll_loss", loss_of.logged_as):
        total = sum(float(log[key]) for log in logs)
        assert values[key] == pytest.approx(total / tokens / math.log(2), abs=6e-4)
    assert 0 <= values["accuracy"] <= 100
    with metrics.aggregate() as found:
        type(loss_of).reduce_metrics([loss_of(model.eval(), sample())[2]])
    assert loss_of.logged_as not in found.get_smoothed_values()
    assert type(loss_of).logging_outputs_can_be_summed()


class TestFairseqsOwn:
    """The R-Drop of fairseq's main branch: its numbers, and why it is replaced."""

    @pytest.fixture
    def theirs(self):
        name = "fairseq.criterions.label_smoothed_cross_entropy_with_rdrop"
        module = pytest.importorskip(name, reason="this fairseq has no R-Drop")
        return module.RdropLabelSmoothedCrossEntropyCriterion

    @pytest.mark.parametrize("kind", ["dynamic", "attention", "transformer"])
    @pytest.mark.parametrize("options", [{}, {"sentence_avg": True, "label_smoothing": 0.0, "report_accuracy": True}])
    def test_the_same_numbers(self, theirs, kind, options):
        model = transformer() if kind == "transformer" else build(decoder_conv_type=kind, dropout=0.3)
        model.train()
        options = {"sentence_avg": False, "label_smoothing": 0.1, **options}
        found = []
        for loss_of in (RDropCriterion(task(), rdrop_alpha=5.0, **options), theirs(task(), rdrop_alpha=5.0, **options)):
            model.zero_grad()
            torch.manual_seed(4)
            loss, size, logged = loss_of(model, sample())
            loss.backward()
            found.append((loss, size, logged, [parameter.grad for parameter in model.parameters()]))
        (loss, size, logged, gradients), (their_loss, their_size, their_logged, their_gradients) = found
        torch.testing.assert_close(loss, their_loss)
        assert size == their_size and logged.keys() == their_logged.keys()
        for key, value in logged.items():
            assert float(value) == pytest.approx(float(their_logged[key]), rel=1e-5), key
        for mine, other in zip(gradients, their_gradients, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)

    def test_a_training_begun_with_either_can_be_resumed_with_the_other(self, theirs):
        """The Trainer compares the name in a checkpoint with that of the criterion's class."""
        assert RDropCriterion.__name__ == theirs.__name__

    def test_why_it_is_replaced(self, theirs):
        model = build().eval()
        plain = Plain(task(), False, 0.1)(model, sample())[0]
        twice = theirs(task(), False, 0.1, rdrop_alpha=5.0)(model, sample())[0]
        torch.testing.assert_close(twice, 2 * plain)
        with pytest.raises(RuntimeError, match="must match"):
            theirs(task(), False, 0.1, ignore_prefix_size=1, rdrop_alpha=5.0)(model.train(), sample())
        assert CRITERION_REGISTRY[RDROP] is RDropCriterion and not issubclass(RDropCriterion, theirs)


def test_options_of_the_command_line():
    rdrop, simcut = (CRITERION_DATACLASS_REGISTRY[name]() for name in (RDROP, SIMCUT))
    assert (rdrop.rdrop_alpha, simcut.simcut_alpha, simcut.simcut_p) == (0.0, 3.0, 0.05)
    for name, kind in ((RDROP, RDropCriterion), (SIMCUT, SimCutCriterion)):
        assert name.startswith("label_smoothed_cross_entropy_with_") and CRITERION_REGISTRY[name] is kind
