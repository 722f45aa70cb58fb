"""One training step of our and fairseq's models: forward, loss, backward and Adam's update by fairseq's own Trainer.

    python -m benchmarks.training                                        # IWSLT sizes, 40 × 25 random tokens, float32
    python -m benchmarks.training --preset multi30k_en_de --data DIR     # batches of a data-bin folder
    python -m benchmarks.training --preset wmt_en_de_big --device cuda --dtype bfloat16

Tokens are target tokens. All systems use the same batches and take turns, one step each; medians. On a GPU the models
whose forward pass never waits are measured with CUDA graphs too (LIGHTCONV_GRAPHS=1).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path

import torch

from benchmarks import machine, report, timing
from benchmarks.recipes import require_data_bin
from benchmarks.report import BenchmarkError

_BATCHES = 4
_GRAPHS, _COMPILED = ", CUDA graphs", ", compiled"


def parser() -> argparse.ArgumentParser:
    result = machine.parser("training", __doc__)
    result.add_argument("--preset", choices=("iwslt_de_en", "multi30k_en_de", "wmt_en_de_big"), default="iwslt_de_en")
    result.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    result.add_argument("--data", type=Path, metavar="DIR", help="a data-bin folder, instead of random tokens")
    result.add_argument("--max-tokens", type=machine.positive, default=4096, help="tokens a batch with --data")
    result.add_argument("--sentences", type=machine.positive, help="sentences a batch of random tokens")
    result.add_argument("--length", type=machine.positive, help="tokens a sentence of random tokens")
    result.add_argument("--update-freq", type=machine.positive, default=1, metavar="N", help="batches an update")
    result.add_argument(
        "--compile-blocks", action="store_true", help="ours also with --compile-blocks, which takes minutes to compile"
    )
    result.add_argument("--systems", nargs="+", metavar="NAME", help="only these, as they are called in the table")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and write the JSON; BenchmarkError for wrong options."""
    options = parser().parse_args(arguments)
    device = machine.prepare(options)
    if options.data and (options.sentences or options.length):
        raise BenchmarkError("--sentences and --length are for random tokens, not for --data")
    if options.data:
        require_data_bin(options.data)
    if options.dtype == "float16" and device.type == "cpu":
        raise BenchmarkError("--dtype float16 needs --device cuda")
    # Imported late, since it takes seconds and wrong options should be reported at once.
    from benchmarks import systems, trainers

    candidates = _candidates(systems, device, options.compile_blocks)
    chosen = [name for name in candidates if not options.systems or name in options.systems]
    if options.systems and set(options.systems) != set(chosen):
        raise BenchmarkError(f"--systems: allowed are {', '.join(map(repr, candidates))}, got {options.systems}")
    preset = systems.sized(systems.PRESETS[options.preset], options.quick, options.sentences, options.length)
    repeats = options.repeats or (2 if options.quick else 10)
    description = machine.describe(device)

    task, batches = trainers.task_and_batches(options, preset, _BATCHES)
    steps, results = {}, {}
    for system in chosen:
        model = systems.build(candidates[system], preset, task, tiny=options.quick)
        for layer in model.modules() if system.endswith(_COMPILED) else ():
            if hasattr(layer, "compile_block"):
                layer.compile_block = True
        results[system] = {"parameters": systems.parameters(model)}
        how = {"update_freq": options.update_freq, "graphs": system.endswith(_GRAPHS)}
        steps[system] = trainers.steps(model, task, device, options.dtype, itertools.cycle(batches), **how)
    warm_up = max(trainers.WARM_UP, _recording(len(batches), options.update_freq, device))
    order = itertools.cycle([batch["ntokens"] for batch in batches])
    tokens_of_steps = [sum(itertools.islice(order, options.update_freq)) for _ in range(warm_up + repeats)]
    timer = timing.WallClock(device)
    for system, seconds in timing.interleaved(steps, repeats, timer, warm_up, even=True).items():
        tokens = tokens_of_steps[warm_up:]
        rates = [count / second for count, second in zip(tokens, seconds, strict=True)]
        results[system] |= timing.summary(seconds) | {"tokens_per_s": statistics.median(rates)}
    for system in chosen:
        results[system]["peak_bytes"] = timing.peak_bytes(steps[system], device)

    tokens = [batch["ntokens"] for batch in batches]
    data = str(options.data) if options.data else f"random, {preset.sentences} × {preset.length} tokens"
    print(f"{machine.headline(description)}\n{options.preset}, {options.dtype}; {data}; one step of fairseq's Trainer")
    print(_table(results, systems))
    if options.json:
        content = {
            "benchmark": "training",
            "machine": description,
            "preset": options.preset,
            "dtype": options.dtype,
            "data": data,
            "vocabulary": len(task.target_dictionary),
            "tokens_per_batch": tokens,
            "update_freq": options.update_freq,
            "repeats": repeats,
            "quick": options.quick,
            "busy_cores_at_end": round(machine.busy_cores(), 2),
            "systems": results,
        }
        report.write_json(options.json, content)


def _candidates(systems, device: torch.device, compiled: bool) -> dict[str, str]:
    """The model of each system that can be measured, by the system's name."""
    found = {system: system for system in systems.SYSTEMS}
    if compiled:
        found |= {system + _COMPILED: system for system in (systems.DYNAMIC, systems.LIGHT, systems.TALK)}
    if device.type == "cuda":
        found |= {system + _GRAPHS: system for system in systems.WITH_GRAPHS}
    return found


def _recording(batches: int, update_freq: int, device: torch.device) -> int:
    """The updates until all graphs are recorded: that of a batch's size is when it comes for the second time."""
    return 0 if device.type == "cpu" else -(-2 * batches // update_freq)


def _table(results: dict, systems) -> str:
    rows = []
    for system, measured in results.items():
        speed = measured["tokens_per_s"]
        peers = (results.get(peer) for peer in (systems.FAIRSEQ_DYNAMIC, systems.TRANSFORMER))
        ratios = [str(timing.ratio(peer, measured) or "–") for peer in peers]
        rows.append(
            [
                system,
                f"{measured['parameters']:,}",
                report.milliseconds(measured["median_s"]),
                f"{speed:,.0f}",
                *ratios,
                report.digits(measured["peak_bytes"], 2**20),
            ]
        )
    headers = ["system", "parameters", "step, ms", "tokens/s", "× fairseq DynamicConv", "× Transformer", "peak, MiB"]
    return report.table(headers, rows)


if __name__ == "__main__":
    sys.exit(report.run(main))
