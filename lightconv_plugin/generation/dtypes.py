"""Which type decodes fastest on this machine: the choice of "auto", and the warning about a type without CPU
instructions.

On a GPU it is the type that the tensor cores have: bfloat16 from compute capability 8.0, float16 in 7.x.
On a CPU it is chosen from a table.

TABLE was measured by `python -m benchmarks.decoding_dtypes --threads 1 --sizes 128 256 512 --length 14 --repeats 4`
(benchmarks/results/cpu_decoding_dtypes.json; docs/decoding.md shows it). It gives the speed of the other types relative
to float32, for one sentence and for a batch of 32, on one CPU that was limited to each instruction set.

"auto" chooses the type that is fastest for both together, among those that are not slower than float32 for either.
Both types cost at most 0.1 BLEU on a CPU (docs/performance_cpu.md).
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from lightconv_plugin.modules.transformer import EncoderDecoder
from lightconv_plugin.ops.instructions import instruction_set

# Instruction set → d (channels between the layers) → type → (one sentence, 32 sentences), × float32's speed.
TABLE: dict[str, dict[int, dict[str, tuple[float, float]]]] = {
    "AVX2": {
        128: {"bfloat16": (0.84, 0.86), "int8": (1.70, 1.41)},
        256: {"bfloat16": (2.06, 1.04), "int8": (3.36, 1.75)},
        512: {"bfloat16": (1.79, 0.99), "int8": (6.61, 1.91)},
    },
    "AVX-512": {
        128: {"bfloat16": (1.02, 1.00), "int8": (1.49, 1.46)},
        256: {"bfloat16": (1.27, 0.98), "int8": (2.08, 1.61)},
        512: {"bfloat16": (1.26, 1.02), "int8": (3.41, 1.90)},
    },
    "AVX-512 VNNI": {
        128: {"bfloat16": (1.02, 0.94), "int8": (2.00, 1.85)},
        256: {"bfloat16": (1.13, 1.02), "int8": (2.54, 2.45)},
        512: {"bfloat16": (0.99, 0.97), "int8": (4.08, 2.80)},
    },
    "AVX-512 VNNI BF16": {
        128: {"bfloat16": (1.51, 1.53), "int8": (1.86, 1.88)},
        256: {"bfloat16": (2.01, 1.66), "int8": (2.90, 2.41)},
        512: {"bfloat16": (2.35, 1.94), "int8": (5.52, 3.13)},
    },
}


def fastest_type(
    models: Sequence[EncoderDecoder], device: torch.device, not_native: ValueError | None
) -> tuple[str, str]:
    """(type, reason): the fastest type for an ensemble on this device; float32 if there is no table for it.

    not_native: why the native search cannot run the models, if it cannot.
    """
    if device.type == "cuda":
        return fastest_on_gpu(models, device)
    instructions = instruction_set()
    if instructions is None:
        return "float32", f"nothing else was measured on this CPU ({platform.machine()})"
    if not_native is not None:
        return "float32", f"nothing else was measured without the native search ({not_native})"
    size = max(model.config.decoder.embed_dim for model in models)
    dtype = best(instructions, size)
    return dtype, f"the fastest for {size} channels on a CPU with {instructions}"


def fastest_on_gpu(models: Sequence[EncoderDecoder], device: torch.device) -> tuple[str, str]:
    """(type, reason), by the GPU's compute capability; models in another type than float32 keep it."""
    for model in models:
        own = next(model.parameters()).dtype
        if own != torch.float32:
            return "float32", f"the model is already in {str(own).removeprefix('torch.')}"
    major, minor = torch.cuda.get_device_capability(device)
    dtype = "bfloat16" if major >= 8 else "float16" if major == 7 else "float32"
    return dtype, f"the fastest on a GPU of compute capability {major}.{minor}"


def products() -> str:
    """How a GPU multiplies float32."""
    # From torch 2.9 on. The older setting cannot be read once a program has set the new one.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is None:
        precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "with TF32" if precision == "tf32" else "without TF32"


def best(instructions: str, size: int) -> str:
    """The type for models of `size` channels, from TABLE's largest size that is not above it; float32 below all."""
    sizes = [measured for measured in TABLE.get(instructions, {}) if measured <= size]
    if not sizes:
        return "float32"
    measured = TABLE[instructions][max(sizes)]
    no_slower = {"float32": 1.0} | {
        dtype: speeds[0] * speeds[1] for dtype, speeds in measured.items() if min(speeds) >= 1
    }
    return max(no_slower, key=lambda dtype: no_slower[dtype])


def slow_type(dtype: str, device: torch.device) -> str | None:
    """A warning of one line if this CPU has no instructions for the requested type; it names the better ones."""
    instructions = instruction_set()
    if dtype != "bfloat16" or device.type != "cpu" or instructions in (None, "AVX-512 VNNI BF16"):
        return None
    return (
        f"this CPU ({instructions}) has no bfloat16 instructions: bfloat16 is no faster than float32 for a batch; "
        "`dtype` int8 or auto is"
    )
