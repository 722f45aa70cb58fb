"""CTranslate2's engine with the weights of fairseq's Transformer; only where the package `ctranslate2` is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ctranslate2
import torch
from ctranslate2.converters import fairseq as converter
from ctranslate2.specs import common_spec, transformer_spec
from torch import nn

from benchmarks.report import BenchmarkError

KINDS = ("float32", "int8")


def translators(
    model: nn.Module, words, sample: dict, folder: Path, device: torch.device, beam: int, length: int
) -> dict[str, Callable[[], None]]:
    """For each arithmetic a function that translates the batch, `length` tokens a sentence; models go to `folder`.

    Raises BenchmarkError if the engine, in float32, scores the batch's translations otherwise than the model does.
    """
    tokens = [[words[index] for index in row[:-1]] for row in sample["net_input"]["src_tokens"].tolist()]
    result = {}
    for kind in KINDS:
        engine = _engine(_save(model, words, folder / kind, kind), device)
        if kind == "float32":
            _check(engine, model, words, sample, tokens)
        result[kind] = _translation(engine, tokens, beam, length)
    return result


@torch.no_grad()
def _save(model: nn.Module, words, folder: Path, kind: str) -> Path:
    layers = (len(model.encoder.layers), len(model.decoder.layers))
    heads = model.encoder.layers[0].self_attn.num_heads
    pre_norm = model.encoder.layer_norm is not None
    spec = transformer_spec.TransformerSpec.from_config(
        layers, heads, pre_norm=pre_norm, activation=common_spec.Activation.RELU
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # the converter takes .numpy() of them
    converter.set_transformer_encoder(spec.encoder, model.encoder)
    converter.set_transformer_decoder(spec.decoder, model.decoder)
    vocabulary = ["<blank>" if word == words.pad_word else word for word in words.symbols]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.decoder_start_token = spec.config.eos_token
    spec.config.add_source_eos = True
    spec.validate()
    spec.optimize(quantization=None if kind == "float32" else kind)
    folder.mkdir()
    spec.save(str(folder))
    return folder


def _engine(folder: Path, device: torch.device) -> ctranslate2.Translator:
    threads = torch.get_num_threads()
    return ctranslate2.Translator(
        str(folder), device=device.type, compute_type=folder.name, inter_threads=1, intra_threads=threads
    )


@torch.no_grad()
def _check(engine: ctranslate2.Translator, model: nn.Module, words, sample: dict, tokens: list[list[str]]) -> None:
    translations = [[words[index] for index in row[:-1]] for row in sample["target"].tolist()]
    ours = torch.tensor([scores.log_probs for scores in engine.score_batch(tokens, translations)])
    logits = model.eval()(**sample["net_input"])
    theirs = model.get_normalized_probs(logits, log_probs=True).gather(2, sample["target"].unsqueeze(-1)).squeeze(-1)
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        difference = (ours - theirs).abs().max()
        raise BenchmarkError(f"CTranslate2 computes another model: log-probabilities differ by up to {difference:.2g}")


def _translation(engine: ctranslate2.Translator, tokens: list[list[str]], beam: int, length: int) -> Callable[[], None]:
    def translate() -> None:
        results = engine.translate_batch(tokens, beam_size=beam, min_decoding_length=length, max_decoding_length=length)
        lengths = {len(result.hypotheses[0]) for result in results}
        if lengths != {length}:
            raise BenchmarkError(f"CTranslate2: {length} tokens were asked for, got lengths {sorted(lengths)}")

    return translate
