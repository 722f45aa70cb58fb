"""Marian's engine with the weights of fairseq's Transformer; needs the package `pymarian` (Linux on x86-64).

In float32 it computes the same log-probabilities, up to rounding. How each difference is met:

- Positions: Marian's sinusoids start at 0, fairseq's after the padding index. They are stored as learned positions.
  With those, Marian's usual layers give every step of a decoder the first position. Its newer layers do not, and use
  the same parameters if the environment has TRANSFORMER_FLAVOR=experimental.
- Start: Marian's decoder starts with a zero vector, fairseq's with the end of the sentence. That embedding is added to
  the decoder's first position.
- Scale: Marian does not scale embeddings if positions are learned. The stored embeddings are scaled.
- Layer norms: Marian adds 1e-6 to the variance, fairseq 1e-5. All inputs of layer norms are multiplied by the square
  root of 1e-6 / 1e-5, and matrices that read their outputs are divided by it.
- Words: Marian never chooses <unk> unless it is allowed, so it is. fairseq never chooses padding; Marian could.

The search differs: in Marian, a finished hypothesis is not replaced in the beam, and the search ends when the beam is
empty. Greedy translations are the same as fairseq's; with a beam, some are not, with a higher score in most cases.

int8 is Marian's `intgemm8`. The output layer is packed too, but not with a shortlist, since Marian cannot select words
from a packed matrix, and only if the number of words is a multiple of 16: with other multiples of 8, its results are
wrong. In these cases the output layer is tied to the embeddings, which are not packed. That needs shared embeddings.
Shortlists are lexical tables. Words that are always allowed (NULL) are listed under the end of the sentence, which
every source has. Marian adds up to seven words, to get a multiple of eight.

The newer layers mask padding wrongly if the longest source has a multiple of four tokens. Such a batch gets an empty
sentence that is one token longer, which Marian drops after one step: a quarter of the batches has one sentence more.

Threads translate parts of a batch: Marian does not divide the work within a sentence. The matrix products in the
package choose instructions at run time; everything else in it is compiled for AVX.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor, nn

from benchmarks.report import BenchmarkError
from benchmarks.searches import Batch, SearchSettings, collate
from lightconv_plugin.generation.shortlist import frequent
from lightconv_plugin.text.shortlist import entries

_EPSILON = 1e-6  # of Marian's layer norms
_LENGTH = 4096  # positions
_VECTOR = 4  # numbers that Marian's masks are computed in
_PACKED = "intgemm8"
_PACKED_WORDS = 16  # a packed output layer is right for multiples of this
_FLAVOUR = "TRANSFORMER_FLAVOR"
_ALL = 1_000_000  # target words of a source word: as many as the table has
_POSITIONS = {
    "encoder": "TransformerBatchEncoder->encoder->positionEmbedding->embeddings",
    "decoder": "TransformerBatchDecoder->decoder->positionEmbedding->embeddings",
}


@torch.no_grad()
def save(model: nn.Module, source, target, folder: Path, kind: str, shortlist: Path | None = None) -> Path:
    """Write fairseq's Transformer in the engine's format; returns the folder.

    source, target: the dictionaries. kind: "float32" or "int8". shortlist: a lexical table. BenchmarkError if Marian
    cannot run the model.
    """
    packed = shortlist is None and len(target) % _PACKED_WORDS == 0
    output = "Wt" if kind == "float32" else "W" if packed else "tied"
    _require(model, kind, output)
    folder.mkdir()
    file = folder / "model.npz"
    settings = yaml.safe_dump(_settings(model, output)).encode() + b"\0"
    np.savez(file, **parameters(model, output), **{"special:model.yml": np.frombuffer(settings, dtype=np.int8)})
    if kind != "float32":
        _pack(file, folder / "model.bin")
        file.unlink()
    for name, words in (("source", source), ("target", target)):
        ids = {word: number for number, word in enumerate(words.symbols)}
        (folder / f"{name}.yml").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    if shortlist is not None:
        lexical_table(shortlist, folder / "table.txt", source)
    return folder


def lexical_table(table: Path, file: Path, source) -> Path:
    """Write a lexical table that allows the same words in Marian as a shortlist; returns the file.

    The probabilities do not matter, since no list is cut. Marian's lists end with the last source word in the file and
    are read beyond that for later words, so the dictionary's last word gets a line.
    """
    end = source[source.eos()]
    lines = [f"{end} {source[len(source) - 1]} 1\n"]
    for _, phrase, targets in entries(table):
        if len(phrase) > 1:
            raise BenchmarkError(f"Marian has no lists of phrases, but {table} has {' '.join(phrase)!r}")
        lines += [f"{target} {phrase[0] if phrase else end} 1\n" for target in targets]
    file.write_text("".join(lines), encoding="utf-8")
    return file


# ------------------------------------------------------------------------------------------------ the model


def parameters(model: nn.Module, output: str) -> dict[str, np.ndarray]:
    """Marian's parameters, by name.

    output: of the output layer: "Wt" (words, channels), "W" (channels, words), or "tied" to the decoder's embeddings.
    """
    shrink = _shrink(model)
    found: dict[str, Tensor] = {}
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        embeddings = stack.embed_scale * stack.embed_tokens.weight
        positions = _positions(stack)
        if side == "decoder":
            positions[0] += embeddings[stack.dictionary.eos()]
        found |= {f"{side}_Wemb": shrink * embeddings, _POSITIONS[side]: shrink * positions}
        for number, layer in enumerate(stack.layers, 1):
            found |= _layer(f"{side}_l{number}", layer, shrink)
    last = f"decoder_l{len(model.decoder.layers)}_ffn_ffn_ln"
    # Read by the output layer alone, which, if tied, is multiplied like the embeddings.
    factor = shrink * (shrink * model.decoder.embed_scale if output == "tied" else 1)
    found |= {name: found[name] / factor for name in (f"{last}_scale", f"{last}_bias")}
    weight = model.decoder.output_projection.weight
    if output != "tied":
        found[f"decoder_ff_logit_out_{output}"] = weight if output == "Wt" else weight.t()
    return {name: np.ascontiguousarray(tensor.detach().numpy(), np.float32) for name, tensor in found.items()}


def _layer(name: str, layer: nn.Module, shrink: float) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a layer, whose input and output are `shrink` times fairseq's."""
    yield from _attention(f"{name}_self", layer.self_attn, layer.self_attn_layer_norm, shrink)
    if hasattr(layer, "encoder_attn"):
        yield from _attention(f"{name}_context", layer.encoder_attn, layer.encoder_attn_layer_norm, shrink)
    yield from _linear(f"{name}_ffn", "1", layer.fc1, 1 / shrink, 1)
    yield from _linear(f"{name}_ffn", "2", layer.fc2, shrink, shrink)
    yield from _norm(f"{name}_ffn_ffn", layer.final_layer_norm, shrink)


def _attention(name: str, attention: nn.Module, norm: nn.Module, shrink: float) -> Iterator[tuple[str, Tensor]]:
    for letter, linear in (("q", attention.q_proj), ("k", attention.k_proj), ("v", attention.v_proj)):
        yield from _linear(name, letter, linear, 1 / shrink, 1)
    yield from _linear(name, "o", attention.out_proj, shrink, shrink)
    yield from _norm(f"{name}_Wo", norm, shrink)


def _linear(name: str, suffix: str, linear: nn.Module, weight: float, bias: float) -> Iterator[tuple[str, Tensor]]:
    """weight, bias: what they are multiplied with."""
    yield f"{name}_W{suffix}", weight * linear.weight.t()
    yield f"{name}_b{suffix}", bias * linear.bias.unsqueeze(0)


def _norm(name: str, norm: nn.Module, factor: float) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}_ln_scale", factor * norm.weight.unsqueeze(0)
    yield f"{name}_ln_bias", factor * norm.bias.unsqueeze(0)


def _positions(stack: nn.Module) -> Tensor:
    """(_LENGTH, channels): what fairseq adds at each position of a sentence."""
    return stack.embed_positions(torch.full((1, _LENGTH), stack.dictionary.eos()))[0].clone()


def _shrink(model: nn.Module) -> float:
    return (_EPSILON / model.encoder.layers[0].final_layer_norm.eps) ** 0.5


def _settings(model: nn.Module, output: str) -> dict[str, Any]:
    """Marian's options of the model."""
    first = model.encoder.layers[0]
    return {
        "version": "v1.12.0",  # since which Marian has the newer layers
        "type": "transformer",
        "dim-vocabs": [stack.embed_tokens.num_embeddings for stack in (model.encoder, model.decoder)],
        "dim-emb": first.embed_dim,
        "enc-depth": len(model.encoder.layers),
        "dec-depth": len(model.decoder.layers),
        "transformer-heads": first.self_attn.num_heads,
        "transformer-dim-ffn": first.fc1.out_features,
        "transformer-decoder-dim-ffn": model.decoder.layers[0].fc1.out_features,
        "transformer-ffn-depth": 2,
        "transformer-ffn-activation": "relu",
        "transformer-preprocess": "",
        "transformer-postprocess": "an",  # after each block, its input is added and the sum normalised
        "transformer-postprocess-emb": "",
        "transformer-postprocess-top": "",
        "transformer-train-position-embeddings": True,
        "max-length": _LENGTH,
        "output-omit-bias": True,
        "tied-embeddings": output == "tied",
        "tied-embeddings-all": False,
        "tied-embeddings-src": False,
    }


def _require(model: nn.Module, kind: str, output: str) -> None:
    """BenchmarkError if Marian cannot run the model with this type and output layer (see `parameters`)."""
    problems = _problems(model) | (_problems_of_int8(model, output) if kind == "int8" else {})
    if found := [problem for problem, there in problems.items() if there]:
        raise BenchmarkError(f"Marian cannot run this model: it has {found[0]}. Choose other ways with --systems")


def _problems(model: nn.Module) -> dict[str, bool]:
    stacks = (model.encoder, model.decoder)
    layers = [layer for stack in stacks for layer in stack.layers]
    sizes = {layer.embed_dim for layer in layers}
    sinusoids = [isinstance(stack.embed_positions, SinusoidalPositionalEmbedding) for stack in stacks]
    return {
        "layer norms before the blocks": any(layer.normalize_before for layer in layers),
        "another activation than ReLU": any(layer.activation_fn is not F.relu for layer in layers),
        "no sinusoidal positions": not all(sinusoids),
        "a layer norm of the embeddings": any(stack.layernorm_embedding is not None for stack in stacks),
        "layers of several sizes": len(sizes) > 1,
        "several numbers of heads": len({layer.self_attn.num_heads for layer in layers}) > 1,
        "embeddings of another size": sizes != {stack.embed_tokens.embedding_dim for stack in stacks},
        "more than a matrix as output layer": not _is_plain(model.decoder),
    }


def _problems_of_int8(model: nn.Module, output: str) -> dict[str, bool]:
    decoder = model.decoder
    layers = [*model.encoder.layers, *decoder.layers]
    sizes = {size for layer in layers for size in (layer.embed_dim, layer.fc1.out_features)}
    shared = decoder.output_projection.weight is decoder.embed_tokens.weight
    return {
        "sizes that are not multiples of 64, as int8 needs": any(size % 64 for size in sizes),
        "target words that are not a multiple of 8, as int8 needs": len(decoder.dictionary) % 8 != 0,
        f"an output layer of its own, which int8 cannot have with a shortlist, or if the words are not a multiple of "
        f"{_PACKED_WORDS}": output == "tied" and not shared,
    }


def _is_plain(decoder: nn.Module) -> bool:
    """Whether its output layer is a matrix and nothing else."""
    output = decoder.output_projection
    return isinstance(output, nn.Linear) and output.bias is None and decoder.project_out_dim is None


def _pack(file: Path, packed: Path) -> None:
    """Write a model with 8-bit weights; BenchmarkError if Marian does not."""
    command = [sys.executable, "-m", "pymarian", "convert", "--gemm-type", _PACKED]
    done = subprocess.run([*command, "--from", file, "--to", packed], capture_output=True, text=True, check=False)
    if done.returncode or not packed.is_file():
        raise BenchmarkError(f"Marian did not convert a model to {_PACKED}:\n{done.stderr[-2000:]}")


# ------------------------------------------------------------------------------------------------ the search


class EngineSearch:
    """A saved model in the engine; see searches.TorchSearch."""

    def __init__(self, folder: Path, source, target, settings: SearchSettings):
        if settings.length is not None:
            raise BenchmarkError("Marian cannot force the lengths of translations")
        import pymarian

        self.source, self.target, self.settings = source, target, settings
        self.parameters, self.peak_bytes = None, None  # the engine does not report them
        self._threads = torch.get_num_threads()
        (model,) = folder.glob("model.*")
        options = {
            "models": model,
            "vocabs": f"{folder / 'source.yml'} {folder / 'target.yml'}",
            "cpu-threads": self._threads,
            "beam-size": settings.beam,
            "normalize": settings.lenpen,
        }
        if (table := folder / "table.txt").exists():
            options["shortlist"] = f"{table} {frequent(target, settings.beam).stop} {_ALL} 0"
        text = " ".join(f"--{name} {value}" for name, value in options.items())
        with _newer_layers():
            self._engine = pymarian.Translator(f"{text} --allow-unk --quiet --quiet-translation")

    def translate(self, batch: Batch) -> list[list[int]]:
        lines, numbers = self._translate(batch)
        return [self._indices(lines[number]) for number in numbers]

    def scored(self, batch: Batch) -> list[tuple[list[int], float]]:
        """Translations and the sums of their log-probabilities, including the end."""
        lines, numbers = self._translate(batch, **{"n-best": True})
        found: dict[int, tuple[list[int], float]] = {}
        for line in lines:
            number, text, score, _ = line.split(" ||| ")  # the best one is the first of its sentence
            found.setdefault(int(number), (self._indices(text), float(score.partition("=")[2])))
        return [found[number] for number in numbers]

    def _translate(self, batch: Batch, **options: Any) -> tuple[list[str], list[int]]:
        """The engine's output, and which of its input lines are the batch."""
        size = -(-len(batch) // self._threads)
        parts = [batch[first : first + size] for first in range(0, len(batch), size)]
        widths = [max(map(len, part)) for part in parts]
        empty = [width if width % _VECTOR == 0 else 0 for width in widths]  # ends of an empty sentence before its end
        lines, numbers = [], []
        for part, ends in zip(parts, empty, strict=True):
            numbers += range(len(lines), len(lines) + len(part))
            lines += [" ".join(self.source[index] for index in sentence[:-1]) for sentence in part]
            if any(empty):  # all parts have the same number of lines
                lines.append(" ".join([self.source[self.source.eos()]] * ends))
        # Marian stops at a factor times a part's longest source: no earlier than asked for, later in parts with longer
        # sources. Half a token leaves room for rounding.
        widths = [width + (ends > 0) for width, ends in zip(widths, empty, strict=True)]
        factor = min((self.settings.longest - 0.5) / min(widths), _LENGTH / max(widths))
        options |= {"mini-batch": size + any(empty), "max-length-factor": factor}
        return self._engine.translate(lines, **options), numbers

    def _indices(self, line: str) -> list[int]:
        return [self.target.index(word) for word in line.split(" ") if word]


@torch.no_grad()
def check(search: EngineSearch, model: nn.Module) -> None:
    """BenchmarkError if the engine, in float32 and without a shortlist, scores its translations unlike the model.

    They are of frequent words, in a batch with padding.
    """
    source, end = search.source, search.source.eos()
    batch = [[*range(source.nspecial, source.nspecial + length), end] for length in (7, 3, 5)]
    for sentence, (tokens, score) in zip(batch, search.scored(batch), strict=True):
        cut = len(tokens) >= search.settings.longest  # a translation that was cut off has no end
        goal = torch.tensor(tokens if cut else [*tokens, end])
        before = torch.cat([torch.tensor([end]), goal[:-1]]).unsqueeze(0)
        logits = model.eval()(**collate([sentence], source.pad(), torch.device("cpu")), prev_output_tokens=before)
        log_probabilities = model.get_normalized_probs(logits, log_probs=True)[0]
        expected = float(log_probabilities.gather(1, goal.unsqueeze(1)).sum())
        if abs(score - expected) > 1e-3 * max(1, abs(expected)):
            raise BenchmarkError(f"Marian computes another model: a translation has score {score}, not {expected:.6g}")


@contextmanager
def _newer_layers() -> Iterator[None]:
    """Marian's newer layers for the models that are loaded."""
    before = os.environ.get(_FLAVOUR)
    os.environ[_FLAVOUR] = "experimental"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FLAVOUR]
        else:
            os.environ[_FLAVOUR] = before
