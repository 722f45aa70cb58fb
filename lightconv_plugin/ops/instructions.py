"""Which vector instructions the CPU kernels use on this machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from lightconv_plugin.errors import VariableError

LEVELS = {
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 VNNI BF16",
}
"""Values of LIGHTCONV_CPU_ISA, which limits the kernels to a level, and the name of each level; lowest first."""


def instruction_set() -> str | None:
    """The highest of LEVELS that this CPU has and that LIGHTCONV_CPU_ISA and ATEN_CPU_CAPABILITY allow; None on a CPU
    that has none of them (Arm, x86 without AVX2).

    Raises VariableError for an unknown value of LIGHTCONV_CPU_ISA.
    """
    here, held = _level_of_this_cpu(), _held()
    if here is None:
        return None
    names = list(LEVELS.values())
    return names[min(names.index(here), names.index(held))]


def bf16_advice() -> str | None:
    """Why not to train in bfloat16 on this CPU; None with AVX-512, where torch's products are fast enough, and if this
    is not known."""
    if instruction_set() != LEVELS["avx2"]:
        return None
    return "with AVX2 alone, common.bf16 (--bf16) makes a training more than ten times as slow as float32: leave it out"


def compiled_for() -> str:
    """What the whole CPU library is compiled for: "AVX512", "AVX2", or "" for what every CPU has.

    Kernels that need more than that are selected at run time.
    """
    level = instruction_set()
    return "" if level is None else "AVX2" if level == "AVX2" else "AVX512"


def cpu_name() -> str:
    """The processor's name, with family and model if the system reports them: "AMD EPYC" alone is ambiguous."""
    fields: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    except OSError:
        pass
    named = [
        f"{word} {fields[field]}" for field, word in (("cpu family", "family"), ("model", "model")) if field in fields
    ]
    return ", ".join([fields.get("model name") or platform.processor() or platform.machine(), *named])


def compilable() -> tuple[str, ...]:
    """All values of `compiled_for` for CPUs of this architecture, the best first."""
    return ("AVX512", "AVX2", "") if _is_x86() else ("",)


def runnable() -> tuple[str, ...]:
    """The values of `compiled_for` whose libraries run on this CPU, the best first."""
    sets = compilable()
    return sets[sets.index(compiled_for()) :]


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _held() -> str:
    value = os.environ.get("LIGHTCONV_CPU_ISA", "").strip().lower()
    if value and value not in LEVELS:
        raise VariableError(f"LIGHTCONV_CPU_ISA must be one of {', '.join(LEVELS)}, or unset, got {value!r}")
    return LEVELS[value] if value else list(LEVELS.values())[-1]


def _level_of_this_cpu() -> str | None:
    capability = torch.backends.cpu.get_cpu_capability()  # respects ATEN_CPU_CAPABILITY
    if not _is_x86() or capability not in ("AVX2", "AVX512"):
        return None
    if capability == "AVX2":
        return "AVX2"
    if not torch.cpu._is_vnni_supported():
        return "AVX-512"
    # The oldest supported torch does not have this function: then BF16 is not assumed.
    bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return "AVX-512 VNNI BF16" if bf16 else "AVX-512 VNNI"
