"""A kernel's instructions and constants, from a .cubin by nvdisasm."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

_LINE = re.compile(r"\s+/\*([0-9a-f]{4,6})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.L_x_\d+|\$\S+):$")


class NoTool(Exception):
    """nvcc or nvdisasm is not installed."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """guard: a predicate such as "!P0", or None. opcode: "ISETP", modifiers: ("GE", "AND"), operands as printed."""

    address: int
    guard: str | None
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]

    def __str__(self) -> str:
        name = ".".join((self.opcode, *self.modifiers))
        return f"{self.address:#x}: {f'@{self.guard} ' if self.guard else ''}{name} {', '.join(self.operands)}"


class UnknownInstruction(Exception):
    """A newer compiler's instruction, or a form of one, whose effect is not written down here: nothing is guessed."""

    def __init__(self, instruction: Instruction) -> None:
        super().__init__(f"tests/cuda/speed does not know what this instruction does: {instruction}")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Instructions by address, addresses of labels, and the constant banks that its code comes with."""

    name: str
    code: dict[int, Instruction]
    labels: dict[str, int]
    banks: dict[int, bytes]


def nvdisasm() -> str:
    """The program: $NVDISASM, or in PATH, or the toolkit's, or that of the wheel nvidia-cuda-nvdisasm."""
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvdisasm"
    places = [os.environ.get("NVDISASM", ""), shutil.which("nvdisasm") or "", toolkit, *wheels.glob("*/bin/nvdisasm")]
    for place in places:
        if place and Path(place).is_file():
            return str(place)
    raise NoTool("nvdisasm is needed: install the wheel nvidia-cuda-nvdisasm, or name the program in NVDISASM")


def kernels(cubin: Path) -> dict[str, Kernel]:
    """All kernels of a file, by mangled name."""
    text = subprocess.run([nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    sections = _sections(cubin.read_bytes())
    found: dict[str, Kernel] = {}
    kernel = None
    for line in text.splitlines():
        if line.startswith("\t.section\t"):
            kernel = None
        elif line.startswith(".text.") and line.endswith(":"):
            name = line[len(".text.") : -1]
            banks = {bank: sections.get(f".nv.constant{bank}.{name}", b"") for bank in (2, 3, 4)}
            kernel = found[name] = Kernel(name, {}, {}, banks)
        elif kernel is not None:
            _read(kernel, line)
    return found


def _read(kernel: Kernel, line: str) -> None:
    if label := _LABEL.match(line):
        kernel.labels[label[1]] = max(kernel.code, default=-16) + 16
    elif match := _LINE.match(line):
        address, guard, name, operands = int(match[1], 16), *match.groups()[1:]
        opcode, *modifiers = name.split(".")
        operands = re.sub(r"\(\*.*?\*\)", "", operands)
        split = tuple(part.strip().replace(".reuse", "") for part in operands.split(",")) if operands.strip() else ()
        kernel.code[address] = Instruction(address, guard, opcode, tuple(modifiers), split)


def _sections(elf: bytes) -> dict[str, bytes]:
    """The sections of a 64-bit ELF file, by name."""
    (at,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, at + i * size) for i in range(count)]
    strings = headers[names][4]

    def name(offset: int) -> str:
        start = strings + offset
        return elf[start : elf.index(b"\0", start)].decode()

    return {name(header[0]): elf[header[4] : header[4] + header[5]] for header in headers if header[1] == 1}
