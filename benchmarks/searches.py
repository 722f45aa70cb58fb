"""The searches in the benchmarks: ours, fairseq's, and the engines of CTranslate2 and Marian, with a common interface.

A search has `translate(batch)`: a batch is a list of sentences, each a list of token indices including the end of the
sentence. It returns the indices of the best translations, without the ends.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import BenchmarkError

Batch = Sequence[Sequence[int]]
FAST, FAIRSEQ, CTRANSLATE2, TRANSFORMERS = "ours", "fairseq", "CTranslate2", "transformers"
PYMARIAN = "Marian"
PACKAGES = {CTRANSLATE2: "ctranslate2", PYMARIAN: "pymarian"}  # of the engines
ENGINE, MARIAN = "CTranslate2 Transformer", "transformers Marian"


@dataclass(frozen=True)
class Candidate:
    """model: a name of systems.SYSTEMS, or of --path. search: one of the constants above.

    dtype: of the linear layers. graphs: CUDA graphs of our search. shortlist: the file of one.
    """

    model: str
    search: str
    dtype: str = "float32"
    graphs: bool = False
    shortlist: Path | None = None


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search.

    length: tokens of every hypothesis, including the end; None if the models decide, up to `longest`.
    """

    beam: int = 5
    lenpen: float = 1.0
    length: int | None = None
    longest: int = 200

    def fairseqs(self) -> dict:
        """The arguments of SequenceGenerator and of ours."""
        options = {"beam_size": self.beam, "len_penalty": self.lenpen, "max_len_a": 0, "max_len_b": self.longest}
        if self.length is not None:
            options |= {"max_len_b": self.length - 1, "min_len": self.length - 1}
        return options


class TorchSearch:
    """fairseq's SequenceGenerator or our FastGenerator with one model, which it may modify.

    dtype, graphs, shortlist (generation/shortlist.py): for ours.
    """

    def __init__(
        self,
        kind: str,
        model: nn.Module,
        words,
        settings: SearchSettings,
        device: torch.device,
        dtype: str = "float32",
        graphs: bool = False,
        shortlist: Any = None,
    ):
        self.words, self.length, self.device = words, settings.length, device
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.peak_bytes: int | None = None  # GPU memory in the last call
        model.eval()
        if kind == FAST:
            from lightconv_plugin.generation import FastGenerator

            ours = {"dtype": dtype, "cuda_graphs": graphs, "shortlist": shortlist}
            self.generator = FastGenerator([model], words, **ours, **settings.fairseqs())
        elif kind == FAIRSEQ:
            from fairseq.sequence_generator import SequenceGenerator

            # Like fairseq-generate.
            generation = argparse.Namespace(
                beam=settings.beam, no_beamable_mm=False, print_alignment=False, retain_dropout=False
            )
            model.prepare_for_inference_(argparse.Namespace(generation=generation))
            self.generator = SequenceGenerator([model], words, **settings.fairseqs())
        else:
            raise ValueError(f"kind must be {FAST!r} or {FAIRSEQ!r}, got {kind!r}")

    def translate(self, batch: Batch) -> list[list[int]]:
        """Translate a batch; BenchmarkError if the lengths are not the forced ones."""
        net_input = collate(batch, self.words.pad(), self.device)
        before = self._reset_memory()
        found = [beams[0]["tokens"].tolist()[:-1] for beams in self.generator.generate([], {"net_input": net_input})]
        if before is not None:
            self.peak_bytes = torch.cuda.max_memory_allocated() - before
        lengths = {len(tokens) + 1 for tokens in found}
        if self.length is not None and lengths != {self.length}:
            raise BenchmarkError(f"translations of {self.length} tokens were asked for, got lengths {sorted(lengths)}")
        return found

    def _reset_memory(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()


def collate(batch: Batch, pad: int, device: torch.device) -> dict[str, Tensor]:
    """net_input as in fairseq's batches, padded on the left like in fairseq-generate."""
    from lightconv_plugin.generation import translation_models

    lengths = torch.tensor([len(sentence) for sentence in batch])
    return {"src_tokens": translation_models.collate(batch, pad).to(device), "src_lengths": lengths.to(device)}


def kinds(dtype: str) -> tuple[str, str]:
    """CTranslate2's names of a type and of its 8-bit weights beside it."""
    return dtype, "int8" if dtype == "float32" else f"int8_{dtype}"


def installed(search: str) -> bool:
    """Whether an engine's package is."""
    return importlib.util.find_spec(PACKAGES[search]) is not None


def with_ctranslate2(dtype: str, device: torch.device) -> bool:
    """Whether CTranslate2 takes part: it is installed and has the type, on a CPU float32 and 8 bits."""
    return (dtype == "float32" or device.type == "cuda") and installed(CTRANSLATE2)


def ours(
    model: str, name: str, options: argparse.Namespace, device: torch.device, dtypes: tuple[str, ...]
) -> dict[str, Candidate]:
    """Our search with a model in its own type and, for float32 on a CPU, also in `dtypes`; on a GPU also with CUDA
    graphs."""
    found = {name: Candidate(model, FAST)}
    if device.type == "cuda":
        found[f"{name}, CUDA graphs"] = Candidate(model, FAST, graphs=True)
    if options.dtype == "float32" and device.type == "cpu":
        found |= {f"{name}, {dtype}": Candidate(model, FAST, dtype) for dtype in dtypes}
    return found


def engines(model: str, options: argparse.Namespace, device: torch.device) -> dict[str, Candidate]:
    if not with_ctranslate2(options.dtype, device):
        return {}
    return {f"{ENGINE}, {kind}": Candidate(model, CTRANSLATE2, kind) for kind in kinds(options.dtype)}


def choose(candidates: dict[str, Candidate], names: list[str] | None) -> dict[str, Candidate]:
    """All candidates, or only those with these names; BenchmarkError for unknown names."""
    if names is None:
        return candidates
    if unknown := set(names) - set(candidates):
        allowed = ", ".join(map(repr, candidates))
        raise BenchmarkError(f"--systems: allowed are {allowed}, got {', '.join(map(repr, sorted(unknown)))}")
    return {name: candidate for name, candidate in candidates.items() if name in names}
