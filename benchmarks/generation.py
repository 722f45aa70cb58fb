"""Translation: our models and search, fairseq's models in fairseq's search, and CTranslate2's Transformer if installed.

    python -m benchmarks.generation                       # IWSLT sizes, greedy and beam 5, batches of 1 and of 32
    python -m benchmarks.generation --data data/multi30k_en_de/data-bin --path DynamicConv=average5.pt …
    python -m benchmarks.generation --preset wmt_en_de_big --beam 4 --sentences 256 --device cuda --dtype bfloat16

Without --data, weights are random and lengths are forced: every hypothesis has `--length` tokens, including the end of
the sentence, and every system makes equally many steps. With --data, trained models translate a test set, and BLEU is
shown with the speed: batches of similar lengths, then the first sentences one by one for the latency.

On a CPU, each system runs in its own process, since spinning threads of one engine would slow down the next. Peak is
then its memory for model, packed weights and a batch (CTranslate2 has its weights twice, once for each way to use its
threads); on a GPU, only that of a batch.
"(ours)" alone is our search with our model in its own type; "bfloat16" and "int8" are the types of its linear layers.
CTranslate2 (`pip install ctranslate2`) runs fairseq's Transformer with the same weights, in the models' type (on a CPU
float32 only) and with 8-bit integers, with the same number of threads, used within a batch or across its sentences
(one thread for one sentence), whichever is faster. transformers' Marian (`pip install transformers`) has the same sizes
and weights of its own. The systems take turns, one call each; medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import isolated, machine, report, timing
from benchmarks.report import BenchmarkError
from benchmarks.searches import (
    CTRANSLATE2,
    ENGINE,
    FAIRSEQ,
    MARIAN,
    TRANSFORMERS,
    Batch,
    Candidate,
    SearchSettings,
    TorchSearch,
    choose,
    engines,
    kinds,
    ours,
)
from lightconv_plugin.ops import instructions


def parser() -> argparse.ArgumentParser:
    result = machine.parser("generation", __doc__)
    result.add_argument("--preset", choices=("iwslt_de_en", "multi30k_en_de", "wmt_en_de_big"), default="iwslt_de_en")
    result.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the models")
    result.add_argument("--beam", type=machine.positive, nargs="+", help="one or several (default: 1 5; --data: 5)")
    result.add_argument("--sentences", type=machine.positive, nargs="+", help="of a batch (default: 1 32; --data: 32)")
    result.add_argument("--length", type=machine.positive, help="tokens of a source and of a translation (default: 25)")
    result.add_argument("--systems", nargs="+", metavar="NAME", help="only these, as they are called in the table")
    result.add_argument(
        "--isa",
        choices=instructions.LEVELS,
        help="hold every system down to these instructions (default: none)",
    )
    trained = result.add_argument_group("trained models")
    trained.add_argument("--data", type=Path, metavar="DATA_BIN", help="translate the test set of this folder")
    trained.add_argument("--path", nargs="+", metavar="NAME=CHECKPOINT", help="one of each system, all of one training")
    trained.add_argument("--lenpen", type=float, default=1.0, metavar="X", help="length penalty (default: %(default)s)")
    trained.add_argument("--latency", type=machine.positive, default=100, metavar="N", help="so many one by one")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure, print tables and write the JSON; BenchmarkError for wrong options."""
    options = parser().parse_args(arguments)
    if options.isa:
        os.environ.update(machine.hold(options.isa))
    device = machine.prepare(options)
    if options.length == 1:
        raise BenchmarkError("--length must be at least 2, got 1")
    if options.dtype == "float16" and device.type == "cpu":
        raise BenchmarkError("--dtype float16 needs --device cuda")
    if bool(options.data) != bool(options.path):
        raise BenchmarkError("--data and --path go together: a data-bin folder, and NAME=CHECKPOINT of each system")
    if options.data:
        if options.length:
            raise BenchmarkError("--length is for random weights: trained models decide themselves")
        # Imported late, since fairseq takes seconds to import and wrong options should be reported at once.
        from benchmarks import trained

        content = trained.measure(options, device)
    else:
        content = _random(options, device)
    if options.json:
        report.write_json(options.json, content | {"busy_cores_at_end": round(machine.busy_cores(), 2)})


def _candidates(options: argparse.Namespace, device: torch.device, systems) -> dict[str, Candidate]:
    found = {}
    found |= ours(systems.DYNAMIC, systems.DYNAMIC, options, device, ("bfloat16", "int8"))
    for system in (systems.LIGHT, systems.TALK):
        found |= ours(system, system, options, device, ("int8",))
    found[f"{systems.DYNAMIC}, fairseq's search"] = Candidate(systems.DYNAMIC, FAIRSEQ)
    for system in (systems.FAIRSEQ_DYNAMIC, systems.FAIRSEQ_LIGHT, systems.TRANSFORMER):
        found[system] = Candidate(system, FAIRSEQ)
    if importlib.util.find_spec("transformers") is not None:
        found[MARIAN] = Candidate(systems.TRANSFORMER, TRANSFORMERS)
    found |= ours(systems.TRANSFORMER, f"{systems.TRANSFORMER}, our search", options, device, ("int8",))
    return choose(found | engines(systems.TRANSFORMER, options, device), options.systems)


# ------------------------------------------------------------------------------ random weights, forced lengths


@dataclass(frozen=True)
class Job:
    """A candidate with random weights, and what it is built from. saved: CTranslate2's model."""

    candidate: Candidate
    preset: Any
    settings: SearchSettings
    dtype: str
    device: str
    tiny: bool
    saved: Path | None

    def __call__(self) -> Any:
        from benchmarks import systems

        words = systems.dictionary(self.preset.vocabulary)
        device, kind = torch.device(self.device), self.candidate.dtype
        if self.saved is not None:
            from benchmarks import ctranslate2_peer

            return ctranslate2_peer.EngineSearch(self.saved, words, words, self.settings, device, kind)
        model = systems.build(self.candidate.model, self.preset, systems.task(words), tiny=self.tiny)
        if self.candidate.search == TRANSFORMERS:
            from benchmarks import marian_peer

            return marian_peer.MarianSearch(model, words, self.settings, device, machine.DTYPES[self.dtype])
        model = model.to(device, machine.DTYPES[self.dtype])
        return TorchSearch(self.candidate.search, model, words, self.settings, device, kind, self.candidate.graphs)


def _saved(candidate: Candidate, preset: Any, tiny: bool, folder: Path, sources: Batch, targets: Batch) -> Path | None:
    """CTranslate2's model, converted here so that the process whose memory is measured never holds fairseq's.

    sources, targets: translations for checking the engine against the model that it was converted from.
    """
    if candidate.search != CTRANSLATE2:
        return None
    from benchmarks import ctranslate2_peer, systems

    words, kind = systems.dictionary(preset.vocabulary), candidate.dtype
    model = systems.build(candidate.model, preset, systems.task(words), tiny=tiny)
    saved = ctranslate2_peer.save(model, words, words, folder / kind, kind)
    if kind == "float32":
        cpu = torch.device("cpu")
        search = ctranslate2_peer.EngineSearch(saved, words, words, SearchSettings(), cpu, kind)
        ctranslate2_peer.check(search, model, sources, targets)
    return saved


def _random(options: argparse.Namespace, device: torch.device) -> dict:
    from benchmarks import systems

    candidates = _candidates(options, device, systems)
    beams = options.beam or ([2] if options.quick else [1, 5])
    sizes = options.sentences or ([3] if options.quick else [1, 32])
    length = options.length or (5 if options.quick else 25)
    preset = systems.sized(systems.PRESETS[options.preset], options.quick, max(sizes), length)
    description = machine.describe(device)
    print(machine.headline(description))

    (sample,) = systems.random_batches(preset, systems.dictionary(preset.vocabulary), 1)
    sources, targets = sample["net_input"]["src_tokens"].tolist(), sample["target"].tolist()
    settings = []
    with tempfile.TemporaryDirectory() as folder:
        given = (preset, options.quick, Path(folder), sources[:2], targets[:2])
        saved = {name: _saved(candidate, *given) for name, candidate in candidates.items()}
        for beam in beams:
            search = SearchSettings(beam, length=length)
            rest = (preset, search, options.dtype, device.type, options.quick)
            jobs = {name: Job(candidate, *rest, saved[name]) for name, candidate in candidates.items()}
            places = isolated.begin(jobs, device)
            try:
                for measured in _sizes(places, sizes, sources, options):
                    settings.append({"beam": beam, "length": length, **measured})
            finally:
                for place in places.values():
                    place.close()
    for setting in settings:
        print(f"\n{options.preset}, {options.dtype}, beam {setting['beam']}, {setting['sentences']} × {length} tokens")
        print(_table(setting["systems"], systems.TRANSFORMER, options.dtype))
    return {
        "benchmark": "generation",
        "machine": description,
        "preset": options.preset,
        "dtype": options.dtype,
        "vocabulary": preset.vocabulary,
        "quick": options.quick,
        "settings": settings,
    }


def _sizes(places: dict, sizes: list[int], sources: Batch, options: argparse.Namespace) -> Iterator[dict]:
    """The measurements for each batch size."""
    parameters = {name: place.parameters() for name, place in places.items()}
    for size in sizes:
        repeats = (options.repeats or (2 if options.quick else 5)) * (2 if size == 1 else 1)
        seconds: dict[str, list[float]] = {name: [] for name in places}
        for number in range(1 + repeats):
            for name, place in places.items():
                (taken,), _ = place.translate([sources[:size]])
                if number:
                    seconds[name].append(taken)
                else:  # the warm-up
                    place.forget_peak()
        systems = {name: _measured(parameters[name], values, size) for name, values in seconds.items()}
        for name, place in places.items():
            systems[name]["peak_bytes"] = place.peak_bytes()
        yield {"sentences": size, "systems": systems}


def _measured(parameters: int | None, seconds: list[float], sentences: int) -> dict:
    found = timing.summary(seconds)
    found["sentences_per_s"] = sentences / found["median_s"]
    return found | ({"parameters": parameters} if parameters else {})


def _table(results: dict, transformer: str, dtype: str) -> str:
    bases = [results.get(name) for name in (transformer, *(f"{ENGINE}, {kind}" for kind in kinds(dtype)))]
    rows = []
    for system, measured in results.items():
        speed = measured["sentences_per_s"]
        parameters = f"{measured['parameters']:,}" if "parameters" in measured else "–"
        against = [str(timing.ratio(base, measured) or "–") for base in bases]
        peak = report.digits(measured.get("peak_bytes"), 2**20)
        rows.append(
            [system, parameters, report.milliseconds(measured["median_s"]), report.digits(speed), *against, peak]
        )
    headers = ["system", "parameters", "batch, ms", "sentences/s", "× fairseq Transformer"]
    return report.table([*headers, "× CTranslate2", "× its int8", "peak, MiB"], rows)


if __name__ == "__main__":
    sys.exit(report.run(main))
