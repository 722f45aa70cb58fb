"""Every configuration that is accepted can be built and computed; what cannot is refused, naming the field."""

import random
from collections import Counter

import pytest
import torch

from lightconv_plugin.modules import MixerSpec, ModelConfig, StackConfig, build_model
from lightconv_plugin.modules.config import AdaptiveInputConfig, AdaptiveSoftmaxConfig

WORDS = 20
MIXER = MixerSpec("lightweight", 3, 8, 2, False, 0.0, 0.0, "softmax", 0.0, causal=True)


def stack(**options) -> StackConfig:
    return StackConfig(vocab_size=WORDS, embed_dim=8, ffn_dim=8, num_heads=2, mixers=(MIXER,), **options)


def bands(rng: random.Random) -> dict:
    cutoff = rng.choice([(5,), (5,), (3, 7), (20,), (5, 20), (1, 2, 3, 4)])
    return {"cutoff": cutoff, "factor": rng.choice([1.0, 2.0, 2.0, 4.0, 0.5, 3.3, 1e300])}


def random_outputs(rng: random.Random) -> StackConfig:
    words = AdaptiveInputConfig(**bands(rng)) if rng.random() < 0.6 else None
    softmax = None
    if rng.random() < 0.6:
        tied = rng.random() < 0.5
        same = {} if words is None or rng.random() < 0.3 else {"cutoff": words.cutoff}
        ties = {"tie_weights": tied, "tie_proj": tied and rng.random() < 0.5}
        softmax = AdaptiveSoftmaxConfig(**bands(rng) | same, **ties)
    return stack(
        input_dim=rng.choice([None, None, 8, 4, 12]),
        output_dim=rng.choice([None, None, 8, 4]),
        share_input_output=rng.random() < 0.4,
        output_bias=rng.random() < 0.5,
        adaptive_input=words,
        adaptive_softmax=softmax,
    )


def test_what_is_accepted_computes():
    rng, seen, tokens = random.Random(0), Counter(), torch.arange(WORDS).reshape(2, 10)
    for _ in range(600):
        try:
            decoder = random_outputs(rng)
        except ValueError:
            seen["refused"] += 1
            continue
        softmax = decoder.adaptive_softmax
        seen["tied" if softmax and softmax.tie_weights else "adaptive" if softmax else "one softmax"] += 1
        model = build_model(ModelConfig(decoder))
        trained, (logits, loss) = model(tokens, tokens).loss, model.eval()(tokens, tokens)
        assert logits.shape == (2, 10, WORDS) and loss.isfinite() and trained.isfinite(), decoder
    assert min(seen[kind] for kind in ("refused", "tied", "adaptive", "one softmax")) > 10, seen


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"adaptive_input": AdaptiveInputConfig((2, 4, 6, 8))},
            r"adaptive_input.factor = 4 leaves no dimension of input_dim = 8 for .* the cutoff \[2, 4, 6, 8\]",
        ),
        ({"adaptive_softmax": AdaptiveSoftmaxConfig((2, 4))}, "adaptive_softmax.factor = 4 leaves .* output_dim = 8"),
        ({"adaptive_input": AdaptiveInputConfig((2, 4, 6), 1e300)}, r"adaptive_input.factor = 1e\+300 leaves no"),
        (
            {
                "adaptive_input": AdaptiveInputConfig((5,)),
                "adaptive_softmax": AdaptiveSoftmaxConfig((5,), 2.0, tie_weights=True),
            },
            r"adaptive_softmax.tie_weights needs tails as wide as the adaptive_input's bands \[2\], got \[4\]",
        ),
        (
            {
                "output_dim": 4,
                "adaptive_input": AdaptiveInputConfig((5,)),
                "adaptive_softmax": AdaptiveSoftmaxConfig((5,), tie_weights=True),
            },
            "adaptive_softmax.tie_weights needs output_dim = embed_dim = 8, got 4",
        ),
        (
            {"share_input_output": True, "input_dim": 4},
            "share_input_output needs output_dim = input_dim = 4, got output_dim = 8",
        ),
    ],
)
def test_what_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        stack(**options)
