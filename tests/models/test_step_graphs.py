"""Training steps as CUDA graphs; recordings on the CPU stand in for graphs."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
from fairseq.modules.quantization.pq.modules import PQLinear
from fairseq.quantization_utils import quantize_model_scalar

from lightconv_plugin.criterions.rdrop import RDropCriterion
from lightconv_plugin.criterions.simcut import SimCutCriterion
from lightconv_plugin.errors import InputError
from lightconv_plugin.models.joined import join_passes
from lightconv_plugin.models.step_graphs import StepGraphs, rounded
from tests.generation.recordings import Recordings
from tests.models.language_model_toys import build_lm
from tests.models.toys import VARIANTS, build, dictionary

PAD, EOS = 1, 2
MIXERS = ("lightweight", "dynamic", "talk", "gated_short", "attention", *VARIANTS)
# See test_synchronisation.py.
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
STILL = dict.fromkeys(("dropout", "attention_dropout", "weight_dropout", "relu_dropout", "input_dropout"), 0.0)
PLAIN = SimpleNamespace()  # an optimizer without a loss scale
TASK = SimpleNamespace(target_dictionary=dictionary(), source_dictionary=dictionary())


def criterion(kind=LabelSmoothedCrossEntropyCriterion, sentence_avg=False, **options):
    return kind(TASK, sentence_avg=sentence_avg, label_smoothing=0.1, **options)


def sample(sentences, source, target, seed=0, left_pad_source=True):
    """A batch with sentences of different lengths, as fairseq collates them."""
    generator = torch.Generator().manual_seed(seed)

    def side(length, left):
        tokens = torch.randint(4, 30, (sentences, length), generator=generator)
        pads = torch.randint(0, length - 1, (sentences, 1), generator=generator)
        pads[0] = 0
        columns = torch.arange(length)
        tokens[(columns < pads) if left else (columns >= length - pads)] = PAD
        return tokens

    source, target = side(source, left_pad_source), side(target, False)
    previous = torch.cat([torch.full((sentences, 1), EOS), target[:, :-1]], 1)
    inputs = {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1), "prev_output_tokens": previous}
    tokens = int(target.ne(PAD).sum())
    return {
        "id": torch.arange(sentences),
        "net_input": inputs,
        "target": target,
        "ntokens": tokens,
        "nsentences": sentences,
    }


def plain_step(model, criterion, batch):
    loss, size, logged = criterion(model, batch)
    loss.backward()
    return loss.detach(), size, logged


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def compare(model, loss, batches, **options):
    """Loss, what is logged and gradients with recordings against those without, for each batch."""
    recordings = Recordings()
    graphs = StepGraphs(model, loss, recorder=recordings, pad=PAD, **{"left_pad_source": True, **options})
    for batch in batches:
        model.zero_grad(set_to_none=True)
        wanted, size, logged = plain_step(model, loss, batch)
        wanted_gradients = gradients(model)
        model.zero_grad(set_to_none=True)
        found, found_size, found_logged = graphs.step(batch, PLAIN)
        assert (found_size, found_logged.keys()) == (size, logged.keys())
        torch.testing.assert_close((found, found_logged), (wanted, logged), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(gradients(model), wanted_gradients, rtol=1e-4, atol=1e-6)
    return recordings


# Three sizes: 8 × 8, 8 × 16 and 16 × 8.
BATCHES = [
    sample(*size, seed=seed)
    for seed, size in enumerate([(3, 5, 6), (8, 8, 8), (5, 12, 9), (1, 7, 8), (2, 4, 16), (9, 3, 4), (5, 13, 2)])
]


@pytest.mark.parametrize("mixer, sentence_avg", [*((mixer, False) for mixer in MIXERS), ("dynamic", True)])
def test_losses_and_gradients_are_those_of_the_batch_itself(mixer, sentence_avg):
    model = build(encoder_conv_type=mixer, decoder_conv_type=mixer, **LEARNED, **STILL).double().train()
    join_passes(model)
    recordings = compare(model, criterion(sentence_avg=sentence_avg), BATCHES)
    assert (recordings.recorded, recordings.replayed) == (2, 2)


@pytest.mark.parametrize("normalize_before", [False, True])
def test_fairseqs_own_transformer(normalize_before):
    config = TransformerConfig()
    config.encoder.learned_pos = config.decoder.learned_pos = True
    config.encoder.normalize_before = config.decoder.normalize_before = normalize_before
    config.dropout, config.share_all_embeddings = 0.0, True
    for side in (config.encoder, config.decoder):
        side.embed_dim, side.ffn_embed_dim, side.layers, side.attention_heads = 16, 24, 2, 4
        side.input_dim = side.output_dim = 16
    model = TransformerModelBase.build_model(config, TASK).double().train()
    join_passes(model)
    recordings = compare(model, criterion(), BATCHES)
    assert recordings.replayed == 2


@pytest.mark.parametrize(
    "kind, options, diverges",
    [
        (RDropCriterion, {"rdrop_alpha": 5.0}, False),  # both passes are the same without dropout
        (SimCutCriterion, {"simcut_alpha": 3.0, "simcut_p": 1.0}, True),
    ],
)
def test_consistency_training(kind, options, diverges):
    model, loss = build(**LEARNED, **STILL).double().train(), criterion(kind, **options)
    assert (float(loss(model, BATCHES[0])[2][kind.logged_as]) > 0.1) == diverges
    assert compare(model, loss, BATCHES).replayed == 2


@pytest.mark.parametrize(
    "kind, options, dropout",
    [(RDropCriterion, {"rdrop_alpha": 5.0}, {}), (SimCutCriterion, {"simcut_alpha": 3.0, "simcut_p": 0.5}, STILL)],
)
def test_both_passes_of_every_repetition_differ_anew(kind, options, dropout):
    model = build(**LEARNED, **dropout).double().train()
    graphs = StepGraphs(model, criterion(kind, **options), recorder=Recordings(), pad=PAD, left_pad_source=True)
    found = [float(graphs.step(BATCHES[0], PLAIN)[2][kind.logged_as]) for _ in range(6)]
    assert min(found) > 1e-3 and len(set(found)) == 6


def test_a_language_model():
    model = build_lm(decoder_learned_pos=True, **STILL).double().train()
    batches = []
    for size in [(3, 6), (7, 8), (2, 3), (8, 5)]:
        batch = sample(size[0], size[1], size[1])
        batch["net_input"] = {"src_tokens": batch["net_input"]["prev_output_tokens"], "src_lengths": None}
        batches.append(batch)
    assert compare(model, criterion(), batches).replayed == 2


def test_targets_with_pads_on_their_left():
    from tests.models.toys import task

    model = build("dynamicconv", task(left_pad_target=True), **LEARNED, **STILL).double().train()
    batches = []
    for batch in BATCHES:
        inputs = batch["net_input"]
        flipped = {
            "src_tokens": inputs["src_tokens"].flip(1),
            "prev_output_tokens": inputs["prev_output_tokens"].flip(1),
        }
        batches.append({**batch, "net_input": {**inputs, **flipped}, "target": batch["target"].flip(1)})
    compare(model, criterion(), batches, left_pad_source=False, left_pad_target=True)


def test_gradients_of_several_batches_add_up_whether_recorded_or_not():
    model = build(**LEARNED, **STILL).double().train()
    loss = criterion()
    graphs = StepGraphs(model, loss, recorder=Recordings(), pad=PAD, left_pad_source=True, sizes=2)
    updates = [BATCHES[:2], BATCHES[2:6], BATCHES[5:2:-1], BATCHES[::-1]]
    unrecorded = 0
    for update in updates:
        model.zero_grad(set_to_none=True)
        for batch in update:
            plain_step(model, loss, batch)
        wanted = gradients(model)
        model.zero_grad(set_to_none=True)
        for batch in update:
            if graphs.step(batch, PLAIN) is None:
                unrecorded += 1
                plain_step(model, loss, batch)
        torch.testing.assert_close(gradients(model), wanted, rtol=1e-4, atol=1e-6)
    assert unrecorded == 3


def test_every_repetition_drops_anew():
    model = build(**LEARNED).train()
    join_passes(model)
    graphs = StepGraphs(model, criterion(), recorder=Recordings(), pad=PAD, left_pad_source=True)
    losses = [float(graphs.step(BATCHES[0], PLAIN)[0]) for _ in range(6)]
    assert len(set(losses)) == 6


def test_results_of_a_step_survive_the_next():
    graphs = StepGraphs(build(**LEARNED, **STILL).train(), criterion(), recorder=Recordings(), pad=PAD)
    first = [graphs.step(BATCHES[0], PLAIN) for _ in range(3)][-1]
    before = [first[0].clone(), first[2]["nll_loss"].clone()]
    graphs.step(BATCHES[3], PLAIN)
    assert [first[0], first[2]["nll_loss"]] == before


def test_the_loss_is_scaled_by_what_the_optimizer_says_now():
    model = build(**LEARNED, **STILL).double().train()
    graphs = StepGraphs(model, criterion(), recorder=Recordings(), pad=PAD, left_pad_source=True)
    found = []
    for scale in (1.0, 4.0, 2.0, 0.5):
        model.zero_grad(set_to_none=True)
        optimizer = SimpleNamespace(scaler=SimpleNamespace(loss_scale=scale), _needs_sync=False)
        graphs.step(BATCHES[0], optimizer)
        assert optimizer._needs_sync
        found.append({name: gradient / scale for name, gradient in gradients(model).items()})
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_what_a_recording_uses_is_kept():
    """A mask that a longer batch replaces must not be freed."""
    model = build(encoder_conv_type="attention", decoder_conv_type="attention", **LEARNED, **STILL).train()
    recordings = Recordings()
    graphs = StepGraphs(model, criterion(), recorder=recordings, pad=PAD, left_pad_source=True)
    for batch in (BATCHES[0], BATCHES[1]):
        graphs.step(batch, PLAIN)
    mask = model.decoder._future_mask
    kept = {x.untyped_storage().data_ptr() for size in graphs._recorded.values() for x in size.outside}
    assert mask.untyped_storage().data_ptr() in kept
    assert {x.untyped_storage().data_ptr() for x in recordings.outside} <= kept


@pytest.mark.parametrize("size, up", [(1, 8), (8, 8), (9, 16), (64, 64), (65, 80), (128, 128), (129, 160), (300, 320)])
def test_sizes_are_rounded_up(size, up):
    assert rounded(size) == up


def test_few_sizes_hold_most_of_what_is_added():
    sizes = range(1, 1025)
    assert len({rounded(size) for size in sizes}) == 24
    assert max(rounded(size) / size for size in sizes if size > 64) < 1.25


class Doubling(LabelSmoothedCrossEntropyCriterion):
    """Changes the batch that it is given, as fairseq's own R-Drop does."""

    def forward(self, model, sample, reduce=True):
        inputs = sample["net_input"]
        for name, tensor in inputs.items():
            inputs[name] = torch.cat([tensor, tensor])
        sample["target"] = torch.cat([sample["target"]] * 2)
        return super().forward(model, sample, reduce)


def test_a_criterion_may_change_its_batch():
    model = build(**LEARNED, **STILL).double().train()
    graphs = StepGraphs(model, criterion(Doubling), recorder=Recordings(), pad=PAD, left_pad_source=True)
    for batch in (BATCHES[0], BATCHES[1], BATCHES[3]):  # of one size
        wanted = 2 * plain_step(model, criterion(), batch)[0]
        torch.testing.assert_close(graphs.step(batch, PLAIN)[0], wanted)


class Full(Recordings):
    """The memory is full when the second size is warmed up, or when it is recorded."""

    def __init__(self, when):
        super().__init__()
        self._when, self.warmed_up = when, 0

    def warm_up(self, function):
        super().warm_up(function)
        self.warmed_up += 1
        if (self._when, self.warmed_up) == ("warm up", 2):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def record(self, function):
        if (self._when, self.recorded) == ("record", 1):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().record(function)


@pytest.mark.parametrize("when, left", [("warm up", 3), ("record", 2)])
def test_without_memory_for_recordings_batches_are_computed_normally(when, left, caplog):
    """fairseq's Trainer would leave out the whole update, and every other one with a batch of this size."""
    model, loss = build(**LEARNED, **STILL).double().train(), criterion()
    graphs = StepGraphs(model, loss, recorder=Full(when), pad=PAD, left_pad_source=True)
    batches = [BATCHES[i] for i in (0, 1, 3, 2, 2, 0)]
    for batch in batches:
        plain_step(model, loss, batch)
    wanted = gradients(model)
    model.zero_grad(set_to_none=True)
    normally = [batch for batch in batches if graphs.step(batch, PLAIN) is None and plain_step(model, loss, batch)]
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-4, atol=1e-6)
    assert len(normally) == left and not graphs._recorded
    assert caplog.text.count("too little memory") == 1


class Counting(LabelSmoothedCrossEntropyCriterion):
    def forward(self, model, sample, reduce=True):
        loss, size, logged = super().forward(model, sample, reduce)
        return loss, size, logged | {"longest": sample["target"].shape[1]}


class OfSize(LabelSmoothedCrossEntropyCriterion):
    """Divides the gradients by something else: `size` of the batch."""

    def forward(self, model, sample, reduce=True):
        loss, _, logged = super().forward(model, sample, reduce)
        return loss, self.size(sample), logged


def of_size(size, **options):
    loss = criterion(OfSize, **options)
    loss.size = size
    return loss


def test_a_criterion_may_take_the_sentences_of_the_batch_for_its_size():
    model = build(**LEARNED, **STILL).double().train()
    compare(model, of_size(lambda sample: sample["nsentences"], sentence_avg=True), BATCHES)


@pytest.mark.parametrize(
    "options, loss, change, optimizer, message",
    [
        ({"encoder_layerdrop": 0.1}, criterion(), {}, PLAIN, "LayerDrop"),
        ({"quant_noise_pq": 0.1}, criterion(), {}, PLAIN, "quantisation"),
        ({}, criterion(), {"prefix": 0}, PLAIN, "batches have prefix"),
        ({}, criterion(Counting), {}, PLAIN, "Counting logs longest"),
        ({}, criterion(report_accuracy=True), {}, PLAIN, "logs n_correct, total"),
        (
            *({}, of_size(lambda sample: sample["nsentences"]), {}, PLAIN),
            r"the sample size of OfSize must be the number of tokens, \d\d, got 3$",
        ),
        (
            *({}, of_size(lambda sample: sample["ntokens"], sentence_avg=True), {}, PLAIN),
            r"OfSize must be the number of sentences, 3, got \d\d$",
        ),
        ({}, of_size(lambda sample: sample["target"].ne(PAD).sum()), {}, PLAIN, "number of tokens, .* got a tensor"),
    ],
)
def test_what_cannot_be_recorded_is_refused(options, loss, change, optimizer, message):
    model = build(**LEARNED, **STILL, **options).train()
    with pytest.raises(InputError, match=message):
        graphs = StepGraphs(model, loss, recorder=Recordings(), pad=PAD)
        for _ in range(2):
            graphs.step({**BATCHES[0], **change}, optimizer)


def test_quantised_layers_are_refused():
    """Those of --quant-noise-scalar, and those of common.quantization_config_path, made before the first step."""
    scalar, product = (build("lightweightconv", **STILL).train() for _ in range(2))
    quantize_model_scalar(scalar, SimpleNamespace(quant_noise_scalar=0.1))
    assignments = torch.zeros(12, dtype=torch.long)
    product.decoder.layers[0].fc1 = PQLinear(torch.zeros(2, 8), assignments, None, in_features=16, out_features=6)
    for model in (scalar, product):
        with pytest.raises(InputError, match="quantisation"):
            StepGraphs(model, criterion(), recorder=Recordings(), pad=PAD)


def test_automatic_mixed_precision_is_refused():
    from fairseq.optim.amp_optimizer import AMPOptimizer

    graphs = StepGraphs(build(**LEARNED), criterion(), recorder=Recordings(), pad=PAD)
    with pytest.raises(InputError, match="--amp"):
        graphs.step(BATCHES[0], AMPOptimizer.__new__(AMPOptimizer))
