"""Translation by fairseq's beam search, ours beside fairseq's models, and CTranslate2's Transformer where it is there.

    python -m benchmarks.generation                          # IWSLT sizes, beam 5, 32 sentences × 25 tokens, float32
    python -m benchmarks.generation --preset wmt_en_de_big --beam 4 --sentences 256 --device cuda --dtype bfloat16

Weights are random, so lengths are forced: every hypothesis has `--length` tokens, the end of the sentence included, and
every system makes as many steps. CTranslate2 (`pip install ctranslate2`) runs fairseq's Transformer with the same
weights, in float32 and with 8-bit integers, with as many threads. One batch of each system in turn; medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import machine, report, timing
from benchmarks.report import BenchmarkError

CTRANSLATE2 = "CTranslate2 Transformer"


def parser() -> argparse.ArgumentParser:
    result = machine.parser("generation", __doc__)
    result.add_argument("--preset", choices=("iwslt_de_en", "multi30k_en_de", "wmt_en_de_big"), default="iwslt_de_en")
    result.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    result.add_argument("--beam", type=machine.positive, default=5)
    result.add_argument("--sentences", type=machine.positive, default=32)
    result.add_argument("--length", type=machine.positive, default=25, help="tokens of a source and of a translation")
    result.add_argument("--systems", nargs="+", metavar="NAME", help="only these, as they are called in the table")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a table and writes the JSON; BenchmarkError for wrong options."""
    options = parser().parse_args(arguments)
    device = machine.prepare(options)
    if options.length < 2:
        raise BenchmarkError(f"--length must be at least 2, got {options.length}")
    if options.dtype == "float16" and device.type == "cpu":
        raise BenchmarkError("--dtype float16 needs --device cuda")
    # Here, not above: it takes seconds, and wrong options need not wait for it.
    from benchmarks import systems

    chosen = systems.choose(options.systems)
    if options.systems and set(options.systems) != set(chosen):
        raise BenchmarkError(f"--systems: allowed are {', '.join(map(repr, systems.SYSTEMS))}, got {options.systems}")
    sentences, length = (3, 5) if options.quick else (options.sentences, options.length)
    preset = systems.sized(systems.PRESETS[options.preset], options.quick, sentences, length)
    repeats = options.repeats or (2 if options.quick else 7)
    description = machine.describe(device)

    words = systems.dictionary(preset.vocabulary)
    task = systems.task(words)
    (sample,) = systems.random_batches(preset, words, 1)
    calls, results = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for system in chosen:
            model = systems.build(system, preset, task, tiny=options.quick)
            results[system] = {"parameters": systems.parameters(model)}
            if system == systems.TRANSFORMER and importlib.util.find_spec("ctranslate2"):
                from benchmarks import ctranslate2_peer

                for kind, call in ctranslate2_peer.translators(
                    model, words, sample, Path(folder), device, options.beam, preset.length
                ).items():
                    calls[f"{CTRANSLATE2}, {kind}"] = call
            model = model.to(device, machine.DTYPES[options.dtype])
            calls[system] = _generation(model, words, sample, device, options.beam, preset.length)
        timings = timing.interleaved(calls, repeats, timing.WallClock(device), even=True)
    for system, seconds in timings.items():
        measured = timing.summary(seconds)
        results.setdefault(system, {}).update(measured, sentences_per_s=preset.sentences / measured["median_s"])

    print(machine.headline(description))
    print(f"{options.preset}, {options.dtype}, beam {options.beam}, {preset.sentences} × {preset.length} tokens")
    print(_table(results, systems.TRANSFORMER))
    if options.json:
        content = {
            "benchmark": "generation",
            "machine": description,
            "preset": options.preset,
            "dtype": options.dtype,
            "beam": options.beam,
            "sentences": preset.sentences,
            "length": preset.length,
            "vocabulary": preset.vocabulary,
            "repeats": repeats,
            "quick": options.quick,
            "busy_cores_at_end": round(machine.busy_cores(), 2),
            "systems": results,
        }
        report.write_json(options.json, content)


def _generation(model, words, sample: dict, device: torch.device, beam: int, length: int) -> Callable[[], None]:
    """A batch as `fairseq-generate` translates it."""
    from fairseq.sequence_generator import SequenceGenerator

    generation = argparse.Namespace(beam=beam, no_beamable_mm=False, print_alignment=False, retain_dropout=False)
    model.eval().prepare_for_inference_(argparse.Namespace(generation=generation))
    inner = length - 1
    generator = SequenceGenerator([model], words, beam_size=beam, max_len_a=0, max_len_b=inner, min_len=inner)
    inputs = {name: sample["net_input"][name].to(device) for name in ("src_tokens", "src_lengths")}

    def generate() -> None:
        hypotheses = generator.generate([model], {"net_input": inputs})
        lengths = {len(beams[0]["tokens"]) for beams in hypotheses}
        if lengths != {length}:
            raise BenchmarkError(f"translations of {length} tokens were asked for, got lengths {sorted(lengths)}")

    return generate


def _table(results: dict, transformer: str) -> str:
    base = results.get(transformer, {}).get("sentences_per_s")
    rows = []
    for system, measured in results.items():
        speed = measured["sentences_per_s"]
        parameters = f"{measured['parameters']:,}" if "parameters" in measured else "–"
        against = report.digits(speed / base) if base else "–"
        rows.append([system, parameters, report.milliseconds(measured["median_s"]), report.digits(speed), against])
    return report.table(["system", "parameters", "batch, ms", "sentences/s", "× fairseq Transformer"], rows)


if __name__ == "__main__":
    sys.exit(report.run(main))
