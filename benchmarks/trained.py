"""The part of benchmarks.generation that translates a test set with trained models: speed, latency and BLEU."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import isolated, machine, report, timing
from benchmarks.candidates import import_fairseq
from benchmarks.report import BenchmarkError
from benchmarks.searches import (
    CTRANSLATE2,
    FAIRSEQ,
    PYMARIAN,
    Candidate,
    SearchSettings,
    TorchSearch,
    choose,
    engines,
    ours,
)

if import_fairseq() is None:
    raise BenchmarkError("fairseq is not installed: pip install '.[fairseq]', or scripts/setup.sh")

from fairseq.data.data_utils import load_indexed_dataset
from fairseq.models.transformer import TransformerEncoder, TransformerEncoderBase

from lightconv_plugin.checkpoints.opening import Opened, build_model, open_first
from lightconv_plugin.errors import TranslationError
from lightconv_plugin.generation.shortlist import read_shortlist
from lightconv_plugin.scoring.bleu import measures
from lightconv_plugin.text.subwords import join, kind_of

_FEW = 10  # sentences


@dataclass(frozen=True)
class Job:
    """A candidate with a trained model, and what it is built from. folder: for the models of CTranslate2 and Marian."""

    candidate: Candidate
    path: Path
    data: Path
    settings: SearchSettings
    dtype: str
    device: str
    folder: Path

    def __call__(self) -> Any:
        opened = _open(self.path, self.data)
        model = build_model(opened.state, self.path, opened.task)
        source, target, kind = opened.task.source_dictionary, opened.task.target_dictionary, self.candidate.dtype
        device = torch.device(self.device)
        if self.candidate.search not in (CTRANSLATE2, PYMARIAN):
            model = model.to(device, machine.DTYPES[self.dtype])
            file = self.candidate.shortlist
            words = None if file is None else read_shortlist(file, source, target, self.settings.beam)
            how = {"dtype": kind, "graphs": self.candidate.graphs, "shortlist": words}
            return TorchSearch(self.candidate.search, model, target, self.settings, device, **how)
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / kind
        if self.candidate.search == PYMARIAN:
            from benchmarks import marian_engine

            saved = marian_engine.save(model, source, target, folder, kind, self.candidate.shortlist)
            search = marian_engine.EngineSearch(saved, source, target, self.settings)
            if kind == "float32" and self.candidate.shortlist is None:
                marian_engine.check(search, model)
            return search
        from benchmarks import ctranslate2_peer

        saved = ctranslate2_peer.save(model, source, target, folder, kind, self.candidate.shortlist)
        return ctranslate2_peer.EngineSearch(saved, source, target, self.settings, device, kind)


def measure(options: argparse.Namespace, device: torch.device) -> dict:
    """Print the tables; returns the content of the JSON. BenchmarkError if something cannot be measured."""
    if len(options.beam or [5]) > 1 or len(options.sentences or [32]) > 1:
        raise BenchmarkError("--beam and --sentences: one of each with --data")
    beam, size = (options.beam or [5])[0], (options.sentences or [32])[0]
    given = models(options.path, options.data)
    paths, transformers, first = given.paths, given.transformers, given.first
    candidates = choose(_candidates(list(paths), transformers, options, device), options.systems)
    sources, references = test_set(first, 40 if options.quick else None)
    alone = sources[: options.latency]
    description = machine.describe(device)
    print(machine.headline(description))

    with tempfile.TemporaryDirectory() as folder:
        search = SearchSettings(beam, options.lenpen, longest=given.longest)
        rest = (options.data, search, options.dtype, device.type, Path(folder))
        jobs = {name: Job(candidate, paths[candidate.model], *rest) for name, candidate in candidates.items()}
        places = isolated.begin(jobs, device)
        try:
            for place in places.values():
                place.parameters()
            repeats = options.repeats or (2 if options.quick else 5)
            seconds, found = throughput(places, sources, size, repeats)
            waits = _latencies(places, alone)
        finally:
            for place in places.values():
                place.close()

    results = {}
    for name in candidates:
        results[name] = timing.summary(seconds[name]) | waits[name]
        score = bleu(found[name], references, first)
        results[name] |= {"sentences_per_s": len(sources) / results[name]["median_s"], "bleu": score}
        results[name]["tokens"] = sum(map(len, found[name]))
    print(f"\n{options.dtype}, beam {beam}, batches of {size}; {len(sources)} sentences, {len(alone)} alone")
    print(_table(results, transformers))
    return {
        "benchmark": "translation",
        "machine": description,
        "dtype": options.dtype,
        "beam": beam,
        "lenpen": options.lenpen,
        "sentences": size,
        "test_sentences": len(sources),
        "latency_sentences": len(alone),
        "repeats": repeats,
        "quick": options.quick,
        "systems": results,
    }


@dataclass(frozen=True)
class Models:
    """Checkpoints by name; those of fairseq's Transformer; the first one, opened; the longest translation of all."""

    paths: dict[str, Path]
    transformers: list[str]
    first: Opened
    longest: int


def models(given: list[str], data: Path) -> Models:
    """The models of --path; BenchmarkError if they cannot be opened with the data."""
    paths = report.checkpoints(given)
    opened = {name: _open(path, data) for name, path in paths.items()}
    built = [build_model(opened[name].state, path, opened[name].task) for name, path in paths.items()]
    transformers = [name for name, model in zip(paths, built, strict=True) if _is_fairseqs(model)]
    longest = min(200, *(model.max_decoder_positions() - 1 for model in built))
    return Models(paths, transformers, next(iter(opened.values())), longest)


def bleu(translations: list[list[int]], references: list[str], opened: Opened) -> float:
    texts = _texts(translations, opened.task.target_dictionary)
    return measures(texts, references, detok="none")["bleu_tok"].score().score


def _candidates(
    names: list[str], transformers: list[str], options: argparse.Namespace, device: torch.device
) -> dict[str, Candidate]:
    candidates: dict[str, Candidate] = {}
    for name in names:
        candidates |= ours(name, name, options, device, ("bfloat16", "int8"))
        candidates[f"{name}, fairseq's search"] = Candidate(name, FAIRSEQ)
    return candidates | (engines(transformers[0], options, device) if transformers else {})


def _open(path: Path, data: Path) -> Opened:
    try:
        return open_first(path, data, None, None)
    except TranslationError as error:
        raise BenchmarkError(f"--path: {error}") from error


def _is_fairseqs(model: nn.Module) -> bool:
    return type(model.encoder) in (TransformerEncoder, TransformerEncoderBase)


def test_set(opened: Opened, most: int | None) -> tuple[list[list[int]], list[str]]:
    """(sources as indices, references as text without subwords)."""
    sides = []
    dictionaries = (opened.task.source_dictionary, opened.task.target_dictionary)
    for lang, dictionary in zip((opened.source, opened.target), dictionaries, strict=True):
        prefixes = [f"test.{opened.source}-{opened.target}.{lang}", f"test.{opened.target}-{opened.source}.{lang}"]
        found = [side for name in prefixes if (side := load_indexed_dataset(str(opened.data / name), dictionary))]
        if not found:
            raise BenchmarkError(f"--data: {opened.data} has no {prefixes[0]}.bin")
        sides.append([found[0][number].tolist() for number in range(min(len(found[0]), most or len(found[0])))])
    return sides[0], _texts(sides[1], opened.task.target_dictionary)


def _texts(sentences: list[list[int]], words) -> list[str]:
    left_out = {words.eos(), words.pad(), words.bos()}
    kind = kind_of(words.symbols)
    return [join([words[i] for i in sentence if i not in left_out], kind) for sentence in sentences]


def throughput(places: dict, sources: list[list[int]], size: int, repeats: int) -> tuple[dict, dict]:
    """(seconds for all sentences, longest first, in each round; translations in the order of the sources)."""
    batches = list(_batches(sources, size))
    contents = [[sources[number] for number in batch] for batch in batches]
    seconds: dict[str, list[float]] = {name: [] for name in places}
    found: dict[str, list[list[int]]] = {name: [[] for _ in sources] for name in places}
    for round_ in range(1 + repeats):
        for name, place in places.items():
            taken, translations = place.translate(contents)
            if round_:  # the first is the warm-up
                seconds[name].append(sum(taken))
            for batch, results in zip(batches, translations, strict=True):
                for number, tokens in zip(batch, results, strict=True):
                    found[name][number] = tokens
    return seconds, found


def _batches(sources: list[list[int]], size: int) -> Iterator[list[int]]:
    order = sorted(range(len(sources)), key=lambda number: -len(sources[number]))
    for first in range(0, len(order), size):
        yield order[first : first + size]


def _latencies(places: dict, sources: list[list[int]]) -> dict[str, dict]:
    """Seconds of single sentences, after a warm-up; the systems take turns, a few sentences at a time."""
    seconds: dict[str, list[float]] = {name: [] for name in places}
    for first in range(0, len(sources), _FEW):
        some = [[sentence] for sentence in sources[first : first + _FEW]]
        for name, place in places.items():
            taken, _ = place.translate(some if first else some + some)
            seconds[name] += taken[-len(some) :]
    return {
        name: {
            "latency_p50_s": statistics.median(values),
            "latency_p95_s": sorted(values)[max(0, -(-95 * len(values) // 100) - 1)],
        }
        for name, values in seconds.items()
    }


def _table(results: dict, transformers: list[str]) -> str:
    base = results.get(f"{transformers[0]}, fairseq's search" if transformers else "")
    rows = [
        [
            name,
            f"{measured['bleu']:.2f}",
            report.digits(measured["sentences_per_s"]),
            str(timing.ratio(base, measured) or "–"),
            report.milliseconds(measured["latency_p50_s"]),
            report.milliseconds(measured["latency_p95_s"]),
        ]
        for name, measured in results.items()
    ]
    against = f"× {transformers[0]}, fairseq's search" if transformers else "×"
    return report.table(["system", "BLEU", "sentences/s", against, "one sentence, p50 ms", "p95 ms"], rows)
