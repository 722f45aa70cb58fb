"""Which type decodes fastest, by instruction set and size of the model: the table behind `--dtype auto`.

    python -m benchmarks.decoding_dtypes --json benchmarks/results/cpu_decoding_dtypes.json

DynamicConv encoder-decoders with random weights and two layers on each side (every layer has the same products, so
their number changes no ratio), d channels, FFN of 2·d, 8,000 words; beam 5, every hypothesis has `--length` tokens.
Each instruction set is a process of its own in which the libraries are held down to it; within it the types take
turns. Times are processor seconds of one thread, the least of all rounds: they hold on a machine that is busy too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time

import torch

from benchmarks import machine, report
from benchmarks.report import BenchmarkError
from lightconv_plugin.generation.beam_search import SearchOptions
from lightconv_plugin.generation.linear import DTYPES
from lightconv_plugin.generation.batch_search import BatchSearch
from lightconv_plugin.modules.config import ModelConfig, StackConfig
from lightconv_plugin.modules.mixers import MixerSpec
from lightconv_plugin.modules.transformer import EncoderDecoder

# The variables by which torch's kernels, MKL, oneDNN and FBGEMM are held down.
_VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS")
LEVELS = {
    "AVX2": ("avx2", "AVX2", "AVX2", "AVX2"),
    "AVX-512": ("avx512", "AVX512", "AVX512_CORE", "AVX512"),
    "AVX-512 VNNI": ("avx512", "AVX512", "AVX512_CORE_VNNI", "AVX512_VNNI"),
    "AVX-512 VNNI BF16": ("avx512", "AVX512", "AVX512_CORE_BF16", "AVX512_VNNI"),
}
_VOCABULARY, _LAYERS, _BEAM = 8000, 2, 5
_EOS = 2


def parser() -> argparse.ArgumentParser:
    result = machine.parser("decoding_dtypes", __doc__)
    result.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS), metavar="SET")
    result.add_argument("--sizes", type=machine.positive, nargs="+", metavar="D", help="(default: 128 256 512 1024)")
    result.add_argument("--sentences", type=machine.positive, nargs="+", default=[1, 32], help="of a batch")
    result.add_argument("--length", type=machine.positive, help="tokens of a source and a translation (default: 20)")
    result.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the process of one instruction set
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints the table and writes the JSON; BenchmarkError for wrong options."""
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
    levels = {level: _in_a_process(level, options) for level in options.levels}
    rows = []
    for level, measured in levels.items():
        for found in measured:
            base = found["seconds"]["float32"]
            ratios = [report.digits(base / found["seconds"].get(dtype, math.nan)) for dtype in DTYPES[1:]]
            rows.append([level, found["size"], found["sentences"], report.milliseconds(base), *ratios])
    print("\nHow many times as fast as float32")
    print(report.table(["instruction set", "d", "sentences", "float32, ms", *DTYPES[1:]], rows))
    if options.json:
        report.write_json(
            options.json,
            {"benchmark": "decoding_dtypes", "machine": description, "length": options.length, "levels": levels},
        )


def _in_a_process(level: str, options: argparse.Namespace) -> list[dict]:
    """What `_measure` finds where the libraries use this instruction set at the most."""
    held = dict(zip(_VARIABLES, LEVELS[level], strict=True))
    given = ["--sizes", *options.sizes, "--sentences", *options.sentences]
    given += ["--length", options.length, "--repeats", options.repeats, "--levels", level, "--here"]
    command = [sys.executable, "-m", "benchmarks.decoding_dtypes", *map(str, given)]
    environment = {**os.environ, **held, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=machine.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{level}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return json.loads(done.stdout)


@torch.no_grad()
def _measure(options: argparse.Namespace) -> list[dict]:
    torch.set_num_threads(1)
    if "VNNI" not in options.levels[0]:
        # Where a CPU has VNNI, torch gives 8-bit products to oneDNN, else to FBGEMM; nothing holds down that choice.
        torch.backends.quantized.engine = "fbgemm"
    results = []
    for size in options.sizes:
        model = _model(size)
        searches = {}
        for dtype in DTYPES:
            with contextlib.suppress(RuntimeError):  # oneDNN has no bfloat16 below AVX-512
                searches[dtype] = BatchSearch([model], _options(options.length), dtype=dtype)
        for sentences in options.sentences:
            source = torch.randint(4, _VOCABULARY, (sentences, options.length))
            source[:, -1] = _EOS
            lengths = torch.full((sentences,), options.length)
            seconds: dict[str, float] = {}
            for number in range(1 + options.repeats):
                for dtype, search in searches.items():
                    begin = time.process_time()
                    search.search(source, lengths, options.length - 1)
                    taken = time.process_time() - begin
                    if number:  # the first is the warm-up
                        seconds[dtype] = min(taken, seconds.get(dtype, taken))
            results.append({"size": size, "sentences": sentences, "seconds": seconds})
    return results


def _options(length: int) -> SearchOptions:
    return SearchOptions(pad=1, unk=3, eos=_EOS, beam_size=_BEAM, min_len=length - 1)


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
