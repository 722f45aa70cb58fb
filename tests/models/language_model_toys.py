"""Language models at toy size, of the plugin and of fairseq, for the tests of them."""

from types import SimpleNamespace

import torch
from fairseq import models
from omegaconf import OmegaConf
from torch import nn

import lightconv_plugin.models  # noqa: F401 (registers the architectures)

from .toys import VARIANTS, dictionary, with_variants

WORDS = 30
LM_VARIANTS = [name for name in VARIANTS if "cross" not in name]
SMALL = {
    "decoder_embed_dim": 16,
    "decoder_ffn_embed_dim": 24,
    "decoder_attention_heads": 4,
    "decoder_layers": 3,
    "decoder_kernel_size_list": [3, 5, 9],
}
_ADAPTIVE = {"adaptive_input": True, "adaptive_input_cutoff": [8, 20], "adaptive_softmax_cutoff": [8, 20]}
_ADAPTIVE |= {"adaptive_input_factor": 2.0, "adaptive_softmax_factor": 2.0}
_CHARACTERS = {"character_embeddings": True, "character_filters": "[(1, 4), (2, 8)]", "character_embedding_dim": 3}
# Every way in and out that the options allow.
EMBEDDINGS = {
    "plain": {},
    "shared": {"share_decoder_input_output_embed": True},
    "shared-narrow": {
        "share_decoder_input_output_embed": True,
        "decoder_input_dim": 12,
        "decoder_output_dim": 12,
    },
    "narrow": {"decoder_input_dim": 12, "decoder_output_dim": 20},
    "no-positions": {"no_token_positional_embeddings": True},
    "learned-positions": {"decoder_learned_pos": True},
    "adaptive-softmax": {"adaptive_softmax_cutoff": [8, 20], "decoder_output_dim": 20},
    "adaptive-input": {"adaptive_input": True, "adaptive_input_cutoff": [8, 20], "decoder_input_dim": 20},
    "adaptive": _ADAPTIVE,
    "adaptive-tied": {**_ADAPTIVE, "tie_adaptive_weights": True},
    "adaptive-tied-proj": {**_ADAPTIVE, "tie_adaptive_weights": True, "tie_adaptive_proj": True},
    "characters": _CHARACTERS,
    "characters-adaptive-softmax": {**_CHARACTERS, "adaptive_softmax_cutoff": [8, 20]},
}


def lm_task(entries: int = WORDS, outputs: int | None = None):
    source = dictionary(entries)
    target = dictionary(outputs) if outputs else source
    return SimpleNamespace(
        dictionary=source, source_dictionary=source, output_dictionary=target, target_dictionary=target
    )


def configuration(architecture: str = "dynamicconv_lm", **options):
    """The architecture's dataclass with these options."""
    config = models.MODEL_DATACLASS_REGISTRY[architecture]()
    # The first two are the task's; fairseq's commands fill them in from there.
    for name, value in {"tokens_per_sample": 64, "max_target_positions": None, **options}.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    config._name = architecture
    return config


def build_lm(architecture: str = "dynamicconv_lm", task=None, *, small: bool = True, **options) -> nn.Module:
    """The named architecture at toy size, in evaluation mode; options are those of its dataclass."""
    config = configuration(architecture, **with_variants({**(SMALL if small else {}), **options}))
    return models.build_model(OmegaConf.structured(config), task or lm_task()).eval()


def scramble(model: nn.Module) -> nn.Module:
    """Weights that are all away from their initial values, the same for the same shapes."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + ("norm" in name and "weight" in name))
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(4, WORDS, shape)


def log_probabilities(model: nn.Module, previous: torch.Tensor) -> torch.Tensor:
    """(B,T,V) of all words, whichever softmax the model has."""
    return model.get_normalized_probs(model(previous), log_probs=True)
