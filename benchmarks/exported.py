"""Exported models in each type: size on disk, BLEU, and the time from the start of a command to its first translation.

    python -m benchmarks.exported --path dynamicconv=average5.pt --source test.en --reference test.de

--source and --reference are raw text. BLEU is tokenised, lower-cased if the training text was, with the beam and length
penalty of --beam and --lenpen. Start-up is `lightconv translate DIR` with one line, in a separate process: wall and
processor time, medians of interleaved runs, compared with only `import torch` and with the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import machine, report
from benchmarks.report import BenchmarkError
from lightconv_plugin.checkpoints.exported import open_exported
from lightconv_plugin.checkpoints.exporting import Export, export_checkpoint
from lightconv_plugin.errors import InputError
from lightconv_plugin.generation.translator import Translator
from lightconv_plugin.paths import package_dir
from lightconv_plugin.scoring.bleu import measures
from lightconv_plugin.text.subwords import join

_TYPES = ("float32", "bfloat16", "float16", "int8")
_TORCH = "import torch"


def parser() -> argparse.ArgumentParser:
    result = machine.parser("exported", __doc__)
    result.add_argument("--path", nargs="+", required=True, metavar="NAME=CHECKPOINT")
    result.add_argument("--data", type=Path, metavar="DATA_BIN", help="of the checkpoints (default: the training's)")
    result.add_argument("--source", type=Path, required=True, metavar="FILE", help="raw text to translate")
    result.add_argument("--reference", type=Path, required=True, metavar="FILE", help="its raw translation")
    result.add_argument("--beam", type=machine.positive, default=5, metavar="N")
    result.add_argument("--lenpen", type=float, default=1.0, metavar="X")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the tables and write the JSON; BenchmarkError for wrong options."""
    options = parser().parse_args(arguments)
    device = machine.prepare(options)
    paths = report.checkpoints(options.path)
    sides = [report.lines_of(options.source, "--source"), report.lines_of(options.reference, "--reference")]
    if len(sides[0]) != len(sides[1]):
        raise BenchmarkError(f"--source has {len(sides[0])} lines, --reference {len(sides[1])}: they must be as many")
    if options.quick:
        sides = [side[:20] for side in sides]
    description = machine.describe(device)
    print(machine.headline(description))
    models: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        commands: dict[str, list[str]] = {_TORCH: [sys.executable, "-c", "import torch"]}
        for name, checkpoint in paths.items():
            search = ["--beam", str(options.beam), "--lenpen", str(options.lenpen)]
            data = ["--data", str(options.data)] if options.data else []
            commands[f"{name}, checkpoint"] = _translate(checkpoint, options, *search, *data)
            for kind in _TYPES:
                directory = Path(folder) / f"{name}-{kind}"
                _export(checkpoint, directory, options, kind)
                size = sum(path.stat().st_size for path in directory.iterdir())
                models[f"{name}, {kind}"] = {"bytes": size, **_bleu(directory, sides, device.type)}
                commands[f"{name}, {kind}"] = _translate(directory, options)
        start = _start_up(commands, sides[0][0], options.repeats or (1 if options.quick else 5))
    _print(models, start)
    if options.json:
        content = {
            "benchmark": "exported",
            "machine": description,
            "beam": options.beam,
            "lenpen": options.lenpen,
            "test_sentences": len(sides[0]),
            "quick": options.quick,
            "models": models,
            "start_up": start,
            "busy_cores_at_end": round(machine.busy_cores(), 2),
        }
        report.write_json(options.json, content)


def _export(checkpoint: Path, directory: Path, options: argparse.Namespace, kind: str) -> None:
    try:
        export_checkpoint(
            checkpoint, directory, options.data, Export(dtype=kind, beam=options.beam, lenpen=options.lenpen)
        )
    except InputError as error:
        raise BenchmarkError(f"{checkpoint}: {error}") from error


def _bleu(directory: Path, sides: Sequence[Sequence[str]], device: str) -> dict:
    """BLEU and sentences/s; computed in int8 for 8-bit weights on a CPU, otherwise in float32."""
    exported = open_exported(directory)
    tokenise = exported.target_text.recipe.tokenise()
    dtype = "int8" if exported.settings.weights == "int8" and device == "cpu" else "float32"
    with Translator(directory, device=device, dtype=dtype) as translator:
        translator.translate(sides[0][:4])  # exclude one-time compilation
        begin = time.perf_counter()
        found = translator.translate(sides[0])
        seconds = time.perf_counter() - begin
    kind = exported.target_text.subwords
    hypotheses = [join(translation.tokens, kind) for translation in found]
    score = measures(hypotheses, [tokenise(line) for line in sides[1]], detok="none")["bleu_tok"].score()
    return {"bleu": score.score, "sentences_per_s": len(found) / seconds}


def _translate(path: Path, options: argparse.Namespace, *more: str) -> list[str]:
    threads = ["--threads", str(options.threads)] if options.threads else []
    arguments = [str(path), "--device", options.device, *threads, *more]
    return [sys.executable, "-m", "lightconv_plugin", "translate", *arguments]


def _start_up(commands: dict[str, list[str]], line: str, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of each command with one line of input: one run of each per round, after a warm-up round."""
    environment = {**os.environ, "PYTHONPATH": str(package_dir().parent)}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for round_ in range(1 + repeats):
        for name, command in commands.items():
            taken = _timed(lambda command=command: _run(command, line, environment))
            if round_:
                seconds[name].append(taken)
    return {
        name: {"wall_s": statistics.median(x[0] for x in taken), "processor_s": statistics.median(x[1] for x in taken)}
        for name, taken in seconds.items()
    }


def _run(command: list[str], line: str, environment: dict[str, str]) -> None:
    done = subprocess.run(command, input=line + "\n", capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")


def _timed(call: Callable[[], None]) -> tuple[float, float]:
    """Wall time, and the processor time of the child processes that ended during the call."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    call()
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _print(models: dict[str, dict], start: dict[str, dict[str, float]]) -> None:
    rows = []
    for name, model in models.items():
        times = start[name]
        rows.append(
            [
                name,
                f"{model['bytes'] / 1e6:.1f}",
                f"{model['bleu']:.2f}",
                report.digits(model["sentences_per_s"]),
                f"{times['processor_s']:.2f}",
                f"{times['wall_s']:.2f}",
            ]
        )
    print(report.table(["model", "MB", "BLEU", "sentences/s", "start-up, processor s", "wall s"], rows))
    others = [name for name in start if name not in models]
    rows = [[name, f"{start[name]['processor_s']:.2f}", f"{start[name]['wall_s']:.2f}"] for name in others]
    print("\n" + report.table(["beside them", "processor s", "wall s"], rows))


if __name__ == "__main__":
    raise SystemExit(report.run(main))
