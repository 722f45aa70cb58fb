"""CTranslate2's engine with the weights of fairseq's Transformer; needs the package `ctranslate2`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ctranslate2
import torch
from ctranslate2.converters import fairseq as converter
from ctranslate2.specs import common_spec, transformer_spec
from torch import nn

from benchmarks.report import BenchmarkError
from benchmarks.searches import Batch, SearchSettings, collate
from lightconv_plugin.text.shortlist import entries

_TRIALS = 6  # of each way to use the threads; the first warms up


@torch.no_grad()
def save(model: nn.Module, source, target, folder: Path, kind: str, shortlist: Path | None = None) -> Path:
    """Write fairseq's Transformer in the engine's format; returns the folder.

    source, target: the dictionaries. kind: the engine's name of the weights' type, such as "float32" or "int8".
    shortlist: a lexical table, which becomes the engine's vocabulary map.
    """
    layers = (len(model.encoder.layers), len(model.decoder.layers))
    heads = model.encoder.layers[0].self_attn.num_heads
    pre_norm = model.encoder.layer_norm is not None
    spec = transformer_spec.TransformerSpec.from_config(
        layers, heads, pre_norm=pre_norm, activation=common_spec.Activation.RELU
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # the converter calls .numpy() on them
    converter.set_transformer_encoder(spec.encoder, model.encoder)
    converter.set_transformer_decoder(spec.decoder, model.decoder)
    for words, register in ((source, spec.register_source_vocabulary), (target, spec.register_target_vocabulary)):
        register(["<blank>" if word == words.pad_word else word for word in words.symbols])
    spec.config.decoder_start_token = spec.config.eos_token
    spec.config.add_source_eos = True
    if shortlist is not None:
        spec.register_vocabulary_mapping(str(vocabulary_map(shortlist, folder.with_suffix(".vmap"))))
    spec.validate()
    spec.optimize(quantization=None if kind == "float32" else kind)
    folder.mkdir()
    spec.save(str(folder))
    return folder


def vocabulary_map(table: Path, file: Path) -> Path:
    """Write a shortlist as a vocabulary map: a source phrase, a tab, its target words; returns the file."""
    words: dict[str, list[str]] = {}
    for _, phrase, some in entries(table):
        words.setdefault(" ".join(phrase), []).extend(some)
    file.write_text("".join(f"{source}\t{' '.join(some)}\n" for source, some in words.items()), encoding="utf-8")
    return file


class EngineSearch:
    """A saved model in the engine; see searches.TorchSearch.

    The engine can use its threads within a batch, or give each thread a part of it (so one sentence has one thread).
    For each number of sentences, whichever translated the first batch fastest in one of six trials is kept.
    """

    def __init__(self, folder: Path, source, target, settings: SearchSettings, device: torch.device, kind: str):
        self.source, self.target = source, target
        self.parameters, self.peak_bytes = None, None  # the engine does not report them
        self.folder, self.settings, self.device, self.kind = folder, settings, device, kind
        self._threads = torch.get_num_threads()  # an engine with one thread changes this number
        self._together = self._engine(1, self._threads)
        self._apart: ctranslate2.Translator | None = None
        self._has_map = (folder / "vmap.txt").exists()
        self._choice: dict[int, Callable[[list[list[str]]], list]] = {}

    def _engine(self, inter: int, intra: int) -> ctranslate2.Translator:
        return ctranslate2.Translator(
            str(self.folder),
            device=self.device.type,
            compute_type=self.kind,
            inter_threads=inter,
            intra_threads=intra,
        )

    def translate(self, batch: Batch) -> list[list[int]]:
        """Translate a batch; BenchmarkError if the lengths are not the forced ones."""
        tokens = [[self.source[index] for index in sentence[:-1]] for sentence in batch]
        if len(batch) not in self._choice:
            self._choice[len(batch)] = self._fastest(tokens)
        results = self._choice[len(batch)](tokens)
        lengths = {len(result.hypotheses[0]) for result in results}
        if self.settings.length is not None and lengths != {self.settings.length}:
            wanted = self.settings.length
            raise BenchmarkError(f"CTranslate2: {wanted} tokens were asked for, got lengths {sorted(lengths)}")
        return [[self.target.index(token) for token in result.hypotheses[0]] for result in results]

    def score(self, source: Sequence[int], target: Sequence[int]) -> list[float]:
        """Log-probabilities of the target's tokens, including its end."""
        texts = [self.source[index] for index in source[:-1]], [self.target[index] for index in target[:-1]]
        return self._together.score_batch([texts[0]], [texts[1]])[0].log_probs

    def _fastest(self, tokens: list[list[str]]) -> Callable[[list[list[str]]], list]:
        ways = [self._way(self._together, 0)]
        if self._threads > 1 and self.device.type == "cpu":
            if self._apart is None:
                self._apart = self._engine(self._threads, 1)
            ways.append(self._way(self._apart, -(-len(tokens) // self._threads)))

        def seconds(way: Callable) -> float:
            start = time.perf_counter()
            way(tokens)
            return time.perf_counter() - start

        # One way after the other: threads within a batch spin for a while after it.
        return min(ways, key=lambda way: min(seconds(way) for _ in range(_TRIALS))) if len(ways) > 1 else ways[0]

    def _way(self, engine: ctranslate2.Translator, part: int) -> Callable[[list[list[str]]], list]:
        """part: number of sentences per thread; 0: all sentences together."""
        options = {"beam_size": self.settings.beam, "length_penalty": self.settings.lenpen, "max_batch_size": part}
        options |= {"use_vmap": self._has_map}
        if self.settings.length is None:
            options |= {"max_decoding_length": self.settings.longest}
        else:
            # The engine does not count the end; this makes its number of steps equal to that of the others.
            options |= {"min_decoding_length": self.settings.length, "max_decoding_length": self.settings.length}
        return lambda tokens: engine.translate_batch(tokens, **options)


@torch.no_grad()
def check(search: EngineSearch, model: nn.Module, sources: Batch, targets: Batch) -> None:
    """BenchmarkError if the engine, in float32, gives these translations other scores than the model."""
    for source, target in zip(sources, targets, strict=True):
        ours = torch.tensor(search.score(source, target))
        goal = torch.as_tensor(target)
        net_input = collate([source], search.source.pad(), torch.device("cpu"))
        logits = model.eval()(**net_input, prev_output_tokens=goal.roll(1).unsqueeze(0))
        theirs = model.get_normalized_probs(logits, log_probs=True)[0].gather(1, goal.unsqueeze(1)).squeeze(1)
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
            difference = (ours - theirs).abs().max()
            raise BenchmarkError(
                f"CTranslate2 computes another model: log-probabilities differ by up to {difference:.2g}"
            )
