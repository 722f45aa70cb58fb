"""What must hold of every language model, whatever its mixers and its embeddings."""

from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from fairseq.models import transformer_lm

from .language_model_toys import EMBEDDINGS, LM_VARIANTS, SMALL, build_lm, lm_task, log_probabilities, scramble, tokens

MIXERS = ["lightweight", "dynamic", "talk", "attention", "dynamic,talk,attention", *LM_VARIANTS]
by_embedding = pytest.mark.parametrize("embedding", EMBEDDINGS)


@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_incremental_decoding_is_teacher_forcing(mixer, length):
    model = scramble(build_lm(decoder_conv_type=mixer))
    previous = tokens(3, length)
    state = {}
    steps = [model.decoder(previous[:, : t + 1], incremental_state=state)[0] for t in range(length)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(previous)[0], atol=2e-5, rtol=1e-4)


@by_embedding
@torch.no_grad()
def test_incremental_decoding_with_every_embedding(embedding):
    model = build_lm(**EMBEDDINGS[embedding])
    previous = tokens(2, 7)
    state = {}
    steps = [model.decoder(previous[:, : t + 1], incremental_state=state)[0] for t in range(7)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(previous)[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_a_batch_equals_each_sentence_alone(mixer):
    model = build_lm(decoder_conv_type=mixer)
    lengths = (7, 1, 12, 4)
    padded = torch.full((4, 12), 1)
    for row, n in enumerate(lengths):
        padded[row, :n] = tokens(n)
    together, _ = model(padded)
    for row, n in enumerate(lengths):
        torch.testing.assert_close(together[row, :n], model(padded[row : row + 1, :n])[0][0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("learned", [False, True])
@torch.no_grad()
def test_the_longest_sample_leaves_a_position_for_its_beginning(learned):
    """fairseq's sizes of samples do not count the <s> of --add-bos-token."""
    task = lm_task()
    task.args = Namespace(add_bos_token=True)
    model = build_lm(task=task, tokens_per_sample=8, decoder_learned_pos=learned)
    longest = model.max_positions()
    assert longest == (7 if learned else 8)
    model(tokens(1, 1 + longest))


def loss_of(model, previous, target):
    """As criterion adaptive_loss or cross_entropy computes it; an adaptive softmax only gives gradients this way."""
    if model.decoder.adaptive_softmax is None:
        return F.nll_loss(log_probabilities(model, previous).flatten(0, 1), target.flatten(), reduction="sum")
    bands, targets = model.decoder.adaptive_softmax(model(previous)[0], target)
    pairs = [(band, wanted) for band, wanted in zip(bands, targets, strict=True) if wanted is not None]
    return sum(F.cross_entropy(band, wanted, reduction="sum") for band, wanted in pairs)


@by_embedding
def test_probabilities_and_gradients(embedding):
    """The words' probabilities sum to one, agree with the loss, and the loss trains every parameter."""
    model = build_lm(**EMBEDDINGS[embedding])
    words = torch.randperm(30).view(2, 15)  # some of every band of an adaptive input and softmax
    target = torch.randperm(30).view(2, 15)
    with torch.no_grad():
        scores = log_probabilities(model, words)
    assert scores.shape == (2, 15, 30)
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(2, 15))
    loss = loss_of(model, words, target)
    torch.testing.assert_close(loss, -scores.gather(-1, target.unsqueeze(-1)).sum())
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


def numbers(model) -> int:
    return sum(p.numel() for p in model.parameters())


def test_what_is_tied_is_one_parameter():
    counts = {name: numbers(build_lm(**EMBEDDINGS[name])) for name in ("plain", "shared")}
    assert counts["plain"] - counts["shared"] == 30 * 16
    adaptive = {name: numbers(build_lm(**EMBEDDINGS[name])) for name in EMBEDDINGS if name.startswith("adaptive")}
    # Words of the three bands; of the last two bands' projections
    assert adaptive["adaptive"] - adaptive["adaptive-tied"] == 8 * 16 + 12 * 8 + 10 * 4
    assert adaptive["adaptive-tied"] - adaptive["adaptive-tied-proj"] == 16 * (8 + 4)


def test_it_is_pre_norm_without_a_last_norm():
    decoder = build_lm(decoder_conv_type="dynamic,talk,attention", decoder_normalize_before=False).decoder
    assert decoder.layer_norm is None
    assert all(layer.normalize_before and layer.encoder_attn is None for layer in decoder.layers)


def transformer_of_fairseq(task, **options):
    """fairseq's own transformer_lm at the same toy size."""
    args = Namespace(**{**SMALL, "max_target_positions": 64, "char_embedder_highway_layers": 2, **options})
    transformer_lm.base_lm_architecture(args)
    return transformer_lm.TransformerLanguageModel.build_model(args, task).eval()


@by_embedding
@torch.no_grad()
def test_with_attention_it_is_fairseqs_transformer(embedding):
    """The same computation under the same names of parameters; only fairseq's norm after the last layer is missing."""
    task, options = lm_task(), EMBEDDINGS[embedding]
    theirs = scramble(transformer_of_fairseq(task, no_decoder_final_norm=True, **options))
    ours = build_lm(task=task, decoder_conv_type="attention", **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    previous = tokens(3, 12)
    torch.testing.assert_close(
        log_probabilities(ours, previous), log_probabilities(theirs, previous), atol=1e-5, rtol=1e-5
    )


@torch.no_grad()
def test_what_fairseqs_transformer_has_more():
    """By default it normalises once more: our features, through that norm, give its output."""
    task = lm_task()
    theirs = scramble(transformer_of_fairseq(task))
    state = theirs.state_dict()
    last_norm = {key for key in state if key.startswith("decoder.layer_norm.")}
    assert len(last_norm) == 2
    ours = build_lm(task=task, decoder_conv_type="attention")
    ours.load_state_dict({key: value for key, value in state.items() if key not in last_norm}, strict=True)
    previous = tokens(3, 12)
    features, _ = ours.decoder(previous, features_only=True)
    torch.testing.assert_close(
        theirs.decoder.output_layer(theirs.decoder.layer_norm(features)), theirs(previous)[0], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    "mixer, checkpoint_activations",
    [("lightweight,dynamic,talk", True), ("dynamic,talk,attention", False), *((name, True) for name in LM_VARIANTS)],
)
def test_it_learns(mixer, checkpoint_activations):
    """A text that repeats itself, by heart in some updates, with all the dropouts on."""
    torch.manual_seed(3)
    model = build_lm(
        decoder_conv_type=mixer,
        weight_dropout=0.1,
        attention_dropout=0.1,
        relu_dropout=0.1,
        checkpoint_activations=checkpoint_activations,
    ).train()
    text = tokens(1, 21).expand(4, -1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(20):
        loss = loss_of(model, text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])] == []
