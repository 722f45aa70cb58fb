"""Which type decodes fastest, by instruction set and model size: the table behind `--dtype auto`.

    python -m benchmarks.decoding_dtypes --json benchmarks/results/cpu_decoding_dtypes.json

DynamicConv encoder-decoders with random weights and two layers on each side (every layer has the same products, so
their number does not affect the ratios), d channels, FFN of 2·d, 8,000 words; beam 5, every hypothesis has `--length`
tokens. Each instruction set is measured in its own process, in which the libraries are limited to it; the types take
turns. Times are processor seconds of one thread, the minimum over all rounds, so they are valid on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import torch

from benchmarks import machine, report
from benchmarks.report import BenchmarkError
from lightconv_plugin.generation import DTYPES, BatchSearch, SearchOptions
from lightconv_plugin.modules.config import ModelConfig, StackConfig
from lightconv_plugin.modules.mixers import MixerSpec
from lightconv_plugin.modules.transformer import EncoderDecoder
from lightconv_plugin.ops.instructions import LEVELS

_VOCABULARY, _LAYERS, _BEAM = 8000, 2, 5
_EOS = 2


def parser() -> argparse.ArgumentParser:
    result = machine.parser("decoding_dtypes", __doc__)
    result.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS), metavar="ISA")
    result.add_argument("--sizes", type=machine.positive, nargs="+", metavar="D", help="(default: 128 256 512 1024)")
    result.add_argument("--sentences", type=machine.positive, nargs="+", default=[1, 32], help="of a batch")
    result.add_argument("--length", type=machine.positive, help="tokens of a source and a translation (default: 20)")
    result.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the process of one instruction set
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table and write the JSON; BenchmarkError for wrong options."""
    options = parser().parse_args(arguments)
    device = machine.prepare(options)
    if device.type != "cpu":
        raise BenchmarkError("--device cuda: the instruction sets are a CPU's")
    options.sizes = options.sizes or ([32] if options.quick else [128, 256, 512, 1024])
    options.length = options.length or (4 if options.quick else 20)
    options.repeats = options.repeats or (1 if options.quick else 5)
    if options.here:
        print(json.dumps(_measure(options)))
        return
    description = machine.describe(device)
    print(machine.headline(description))
    levels = {LEVELS[level]: _in_a_process(level, options) for level in options.levels}
    rows = []
    for level, measured in levels.items():
        for found in measured:
            base = found["seconds"]["float32"]
            ratios = [report.digits(base / found["seconds"][dtype]) for dtype in DTYPES[1:]]
            rows.append([level, found["size"], found["sentences"], report.milliseconds(base), *ratios])
    print("\nHow many times as fast as float32")
    print(report.table(["instruction set", "d", "sentences", "float32, ms", *DTYPES[1:]], rows))
    if options.json:
        report.write_json(
            options.json,
            {
                "benchmark": "decoding_dtypes",
                "machine": description,
                "quick": options.quick,
                "length": options.length,
                "levels": levels,
            },
        )


def _in_a_process(level: str, options: argparse.Namespace) -> list[dict]:
    """The result of `_measure` in a process whose libraries are limited to this instruction set."""
    given = ["--sizes", *options.sizes, "--sentences", *options.sentences]
    given += ["--length", options.length, "--repeats", options.repeats, "--levels", level, "--here"]
    command = [sys.executable, "-m", "benchmarks.decoding_dtypes", *map(str, given)]
    environment = {**os.environ, **machine.hold(level), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=machine.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{level}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return json.loads(done.stdout)


@torch.no_grad()
def _measure(options: argparse.Namespace) -> list[dict]:
    torch.set_num_threads(1)
    results = []
    for size in options.sizes:
        model = _model(size)
        searches = {dtype: BatchSearch([model], _options(options.length, dtype)) for dtype in DTYPES}
        for sentences in options.sentences:
            source = torch.randint(4, _VOCABULARY, (sentences, options.length))
            source[:, -1] = _EOS
            seconds: dict[str, float] = {}
            for number in range(1 + options.repeats):
                for dtype, search in searches.items():
                    begin = time.process_time()
                    search.search(source)
                    taken = time.process_time() - begin
                    if number:  # the first is the warm-up
                        seconds[dtype] = min(taken, seconds.get(dtype, taken))
            results.append({"size": size, "sentences": sentences, "seconds": seconds})
    return results


def _options(length: int, dtype: str) -> SearchOptions:
    size = length - 1
    return SearchOptions(pad=1, unk=3, eos=_EOS, beam_size=_BEAM, min_len=size, max_len_b=size, dtype=dtype)


def _model(size: int) -> EncoderDecoder:
    torch.manual_seed(1)

    def stack(causal: bool) -> StackConfig:
        mixer = MixerSpec("dynamic", 7, size, 4, True, 0.0, 0.0, "softmax", 0.0, causal=causal)
        return StackConfig(
            _VOCABULARY, size, 2 * size, 4, (mixer,) * _LAYERS, encoder_dim=size if causal else None,
            share_input_output=causal,
        )  # fmt: skip

    return EncoderDecoder(ModelConfig(stack(True), stack(False), share_embeddings=True)).eval()


if __name__ == "__main__":
    sys.exit(report.run(main))
