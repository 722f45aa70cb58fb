"""Which type decodes fastest here: what "auto" stands for, and what is said of a type this CPU has no instructions for.

TABLE is what `python -m benchmarks.decoding_dtypes --threads 1 --sizes 128 256 512 --length 14 --repeats 4` measured
(benchmarks/results/cpu_decoding_dtypes.json; docs/decoding.md shows it): how many times as fast as float32 the others
are, for one sentence and for a batch of 32. The rows of AVX-512 alone are `python -m benchmarks.generation` on a CPU
that has no more: 42M parameters with random weights, and trained models of Multi30k.

"auto" takes the type that is fastest for both together, among those that are not slower than float32 for either. Both
types cost at most 0.2 BLEU (docs/performance.md).
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from lightconv_plugin.generation.linear import DTYPES
from lightconv_plugin.generation.native import why_not
from lightconv_plugin.modules.transformer import EncoderDecoder
from lightconv_plugin.ops.instructions import instruction_set

AUTO = "auto"
CHOICES = (AUTO, *DTYPES)

# Instruction set → d (channels between the layers) → type → (one sentence, 32 sentences), × float32's speed.
TABLE: dict[str, dict[int, dict[str, tuple[float, float]]]] = {
    "AVX2": {
        128: {"int8": (0.87, 0.87)},
        256: {"int8": (1.60, 1.24)},
        512: {"int8": (2.44, 1.47)},
    },
    # Of a Xeon (Skylake) with no more than these; a newer CPU held down to them gives int8 too much (1.14 for 512).
    "AVX-512": {
        128: {"bfloat16": (0.52, 0.59), "int8": (0.57, 0.77)},
        512: {"bfloat16": (0.67, 0.29), "int8": (1.14, 0.81)},
    },
    "AVX-512 VNNI": {
        128: {"bfloat16": (0.63, 0.39), "int8": (0.93, 0.71)},
        256: {"bfloat16": (0.81, 0.35), "int8": (1.54, 1.12)},
        512: {"bfloat16": (0.79, 0.28), "int8": (1.90, 1.50)},
    },
    "AVX-512 VNNI BF16": {
        128: {"bfloat16": (0.71, 0.79), "int8": (0.84, 0.98)},
        256: {"bfloat16": (1.20, 0.70), "int8": (1.52, 1.08)},
        512: {"bfloat16": (1.34, 0.66), "int8": (1.86, 1.48)},
    },
}


def fastest_type(models: Sequence[EncoderDecoder], device: str = "cpu") -> tuple[str, str]:
    """(the type, why): the fastest for an ensemble on this CPU, by TABLE; float32 wherever nothing was measured."""
    if torch.device(device).type != "cpu":
        return "float32", "nothing else was measured on a GPU"
    instructions = instruction_set()
    if instructions is None:
        return "float32", f"nothing else was measured on this CPU ({platform.machine()})"
    if (reason := why_not(models)) is not None:
        return "float32", f"nothing else was measured without the native search ({reason})"
    size = max(model.config.decoder.embed_dim for model in models)
    dtype = best(instructions, size)
    return dtype, f"the fastest for {size} channels on a CPU with {instructions}"


def best(instructions: str, size: int) -> str:
    """The type for models of `size` channels, by the largest size of TABLE that is not above; float32 below all."""
    sizes = [measured for measured in TABLE.get(instructions, {}) if measured <= size]
    if not sizes:
        return "float32"
    measured = TABLE[instructions][max(sizes)]
    no_slower = {"float32": 1.0} | {
        dtype: speeds[0] * speeds[1] for dtype, speeds in measured.items() if min(speeds) >= 1
    }
    return max(no_slower, key=lambda dtype: no_slower[dtype])


def slow_type(dtype: str, device: str = "cpu") -> str | None:
    """One line where this CPU has no instructions for a type that was asked for; it names the better one."""
    instructions = instruction_set()
    if dtype != "bfloat16" or torch.device(device).type != "cpu" or instructions in (None, "AVX-512 VNNI BF16"):
        return None
    return (
        f"this CPU ({instructions}) has no bfloat16 instructions: bfloat16 is slower than float32 here; "
        "`dtype` float32 or auto is faster"
    )
