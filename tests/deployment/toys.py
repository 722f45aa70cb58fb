"""Models with a layer of each mixer, and greedy decoding with plain models."""

import dataclasses

import torch

from lightconv_plugin.modules import MIXERS, ModelConfig
from tests.checkpoints import exports


def with_mixers(config: ModelConfig, kinds, **options) -> ModelConfig:
    """The configuration with a layer of each of these mixers on both sides; `options` are those of the mixers."""

    def side(stack, causal):
        mixers = tuple(exports.mixer(kind, causal=causal, **options) for kind in kinds)
        return stack and dataclasses.replace(stack, mixers=mixers)

    return dataclasses.replace(config, encoder=side(config.encoder, False), decoder=side(config.decoder, True))


def pair(kinds=MIXERS, *, kernel_size=5, **options):
    return exports.build_model(with_mixers(exports.pair(**options), kinds, kernel_size=kernel_size))


def language_model(kinds=MIXERS, *, kernel_size=5, **options):
    return exports.build_model(with_mixers(exports.language_model(**options), kinds, kernel_size=kernel_size))


@torch.no_grad()
def sharp(model):
    """The model with scores far apart, so that no rounding decides."""
    model.decoder.embed_tokens.weight.mul_(4)
    return model


@torch.no_grad()
def greedy(model, before: list[int], token: int, longest: int) -> list[int]:
    """What docs/examples/decode.py finds, by the plain model: the tokens before the end."""
    config = model.config
    if config.encoder is None:
        state = model.start(1)
        if before:
            _, state = model.step(torch.tensor([before]), state)
    else:
        state = model.start(model.encode(torch.tensor([before])))
    found: list[int] = []
    while len(found) < longest:
        scores, state = model.step(torch.tensor([[token]]), state)
        scores[..., config.pad] = -torch.inf
        token = int(scores.argmax())
        if token == config.eos:
            break
        found.append(token)
    return found
