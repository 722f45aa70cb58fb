"""Small plain models with dictionaries and merges, exported: for tests that need no fairseq."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from lightconv_plugin.checkpoints.saving import Side, save_exported
from lightconv_plugin.modules import AdaptiveInputConfig, AdaptiveSoftmaxConfig, MixerSpec, ModelConfig, StackConfig
from lightconv_plugin.modules import build_model as build
from lightconv_plugin.text.recipe import Recipe
from lightconv_plugin.text.sides import TextSide

DIM, WORDS = 128, 160  # large enough for matrices of 8 bits
MERGES = "#version: 0.2\nt h\nth e</w>\nd o\ndo g</w>\n"


def mixer(kind: str = "dynamic", dim: int = DIM, **options) -> MixerSpec:
    known = {"kernel_size": 3, "conv_dim": dim, "num_heads": 4, "glu": True, "normalize": "softmax"}
    known |= dict.fromkeys(("input_dropout", "weight_dropout", "attention_dropout"), 0.1)
    return MixerSpec(kind, **{**known, **options})


def stack(kind: str = "dynamic", layers: int = 2, causal: bool = True, **options) -> StackConfig:
    known: dict[str, Any] = {"vocab_size": WORDS, "embed_dim": DIM, "ffn_dim": 144, "num_heads": 4, "max_positions": 64}
    return StackConfig(**{**known, "mixers": (mixer(kind, causal=causal),) * layers, **options})


def pair(kind: str = "dynamic", **options) -> ModelConfig:
    """An encoder-decoder; `options` are of both sides."""
    return ModelConfig(
        stack(kind, encoder_dim=DIM, share_input_output=True, **options), stack(kind, causal=False, **options)
    )


def language_model(kind: str = "dynamic", adaptive: bool = False, **options) -> ModelConfig:
    if adaptive:
        options["adaptive_input"] = AdaptiveInputConfig((40, 100), 2.0)
        options["adaptive_softmax"] = AdaptiveSoftmaxConfig((40, 100), 2.0, tie_weights=True, tie_proj=True)
    return ModelConfig(stack(kind, **options))


def build_model(config: ModelConfig, seed: int = 1):
    """A model whose parameters are all random, also those that begin as ones and zeros."""
    torch.manual_seed(seed)
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def dictionary(words: int = WORDS, begin: str = "w") -> bytes:
    return "".join(f"{begin}{i} {words - i}\n" for i in range(words - 4)).encode()


def shortlist(folder: Path) -> Path:
    """A shortlist for the dictionaries of `export`, in a file of this folder."""
    path = folder / "lists.txt"
    path.write_text("".join(f"v{i + k} w{i} 0.5\n" for i in range(100) for k in (0, 7)) + "v150 NULL 0.1\n")
    return path


def export(directory: Path, model=None, **options) -> Path:
    """Write a model, by default a DynamicConv from German to English with merges, and return the directory."""
    model = build_model(pair()) if model is None else model
    if model.config.encoder is None:
        sides: dict[str, Any] = {"target": Side(None, dictionary(), TextSide(Recipe("none", ""), "words"))}
    else:
        codes = directory.parent / "codes"
        codes.write_text(MERGES, encoding="utf-8")
        words = dictionary(model.config.encoder.vocab_size), dictionary(model.config.decoder.vocab_size, "v")
        sides = {
            "source": Side("de", words[0], TextSide(Recipe("moses", "de", lowercase="last"), "bpe", codes)),
            "target": Side("en", words[1], TextSide(Recipe("moses", "en"), "bpe", codes)),
            "max_source_positions": 64,
        }
    save_exported(directory, model, **{**sides, "max_target_positions": 64, **options})
    return directory


def change(path: Path, **values) -> None:
    """Set keys of a JSON file; a key "a.b" is in the object "a"."""
    known = json.loads(path.read_text(encoding="utf-8"))
    for key, value in values.items():
        *above, last = key.split(".")
        place = known
        for name in above:
            place = place[name]
        place[last] = value
    path.write_text(json.dumps(known), encoding="utf-8")
