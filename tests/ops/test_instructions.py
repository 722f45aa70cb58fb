"""Which instructions the kernels use: what the CPU has, held down by two variables."""

import pytest
import torch

from lightconv_plugin.errors import InputError
from lightconv_plugin.ops import artifacts, instructions


@pytest.fixture
def cpu(monkeypatch):
    """A CPU as torch would describe it, and the value of LIGHTCONV_CPU_ISA."""

    def describe(capability="AVX512", vnni=True, bf16=True, machine="x86_64", held=None):
        monkeypatch.delenv("LIGHTCONV_CPU_ISA", raising=False)
        if held is not None:
            monkeypatch.setenv("LIGHTCONV_CPU_ISA", held)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16, raising=False)
        monkeypatch.setattr(instructions.platform, "machine", lambda: machine)

    return describe


@pytest.mark.parametrize(
    "description, expected, compiled",
    [
        ({}, "AVX-512 VNNI BF16", "AVX512"),
        ({"bf16": False}, "AVX-512 VNNI", "AVX512"),
        ({"vnni": False, "bf16": False}, "AVX-512", "AVX512"),
        ({"capability": "AVX2"}, "AVX2", "AVX2"),
        ({"capability": "DEFAULT"}, None, ""),
        ({"capability": "DEFAULT", "machine": "aarch64"}, None, ""),
        ({"held": "avx512_vnni"}, "AVX-512 VNNI", "AVX512"),
        ({"held": "AVX512"}, "AVX-512", "AVX512"),
        ({"held": "avx2"}, "AVX2", "AVX2"),
        ({"held": ""}, "AVX-512 VNNI BF16", "AVX512"),
        ({"held": "avx512_bf16", "capability": "AVX2"}, "AVX2", "AVX2"),
    ],
    ids=str,
)
def test_the_instruction_set_is_what_the_cpu_has_and_may_use(description, expected, compiled, cpu):
    cpu(**description)
    assert (instructions.instruction_set(), instructions.compiled_for()) == (expected, compiled)


def test_an_unknown_level_names_the_known_ones(cpu):
    cpu(held="avx3")
    with pytest.raises(InputError, match=r"LIGHTCONV_CPU_ISA must be one of avx2, avx512, .* got 'avx3'"):
        instructions.instruction_set()


def test_the_library_is_another_one_for_each_set_that_it_is_compiled_for(cpu):
    cpu()
    best = artifacts.recipe("cpu")
    cpu(held="avx512")
    assert artifacts.recipe("cpu") == best  # the same code: what is beyond is chosen when it runs
    cpu(held="avx2")
    other = artifacts.recipe("cpu")
    assert other.key != best.key and "-mavx512f" not in other.cflags and "-mavx2" in other.cflags


def test_a_processor_is_named_with_family_and_model(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(instructions, "Path", lambda name: info)
    one = "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\n"
    info.write_text(one + one)
    assert instructions.cpu_name() == "AMD EPYC, family 26, model 2"
    info.write_text("processor\t: 0\nBogoMIPS\t: 100\n\n")  # as on Arm
    assert instructions.cpu_name() and "family" not in instructions.cpu_name()
    info.unlink()
    assert instructions.cpu_name()
