"""What a call launches, on which kernel: from launches.cpp and nvcc's .cubin."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import subprocess
from pathlib import Path

from lightconv_plugin.files import atomic_write

from .. import host
from .listing import Kernel, NoTool, kernels

TYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of lightconv or dynamicconv; softmax unless `normalize` is 1 (none). Strides are those of (T, B, …). Or,
    with `talk`, of talkconv, with windows that reach as far as the K taps."""

    dynamic: bool
    backward: bool
    steps: int
    batch: int
    channels: int
    heads: int
    size: int
    padding: int
    type: int = TYPES.index("bfloat16")
    normalize: int = 0
    dropout: bool = False
    batch_first: bool = False
    talk: bool = False


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: str  # mangled, as the host's compiler does
    blocks: int
    threads: int
    shared: int
    parameters: bytes


def launches(call: Call) -> list[Launch]:
    program = _program()
    arguments = [f"{name}={int(value)}" for name, value in dataclasses.asdict(call).items()]
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise host.HostError(f"{call}: {done.stderr}")
    names = _symbols(program)
    found = []
    for line in done.stdout.splitlines():
        distance, blocks, threads, shared, parameters = line.split()
        found.append(Launch(names[int(distance)], int(blocks), int(threads), int(shared), bytes.fromhex(parameters)))
    return found


def _sources() -> list[Path]:
    return sorted(host.SOURCES.rglob("*.cu"))


@functools.cache
def _program() -> Path:
    sources = _sources()
    folder = Path(__file__).parent
    return host.build(*sources, folder / "launches.cpp", *host.EMULATOR, folders=(host.SOURCES,), sanitize=False)


@functools.cache
def _symbols(program: Path) -> dict[int, str]:
    listed = subprocess.run(["nm", str(program)], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in listed.splitlines() if line[0] != " "]
    at = {name: int(address, 16) for address, _, name in lines}
    return {address - at["origin"]: name for name, address in at.items()}


def without_file(name: str) -> str:
    """A mangled name as every compiler has it: an anonymous namespace is called after its file, or not."""
    match = re.search(r"(\d+)(?=_GLOBAL__N_)", name)
    if match is None:
        return name
    return name[: match.start()] + name[match.end() + int(match[1]) :]


@functools.cache
def device_kernels(source: Path) -> dict[str, tuple[Kernel, int]]:
    """A source's kernels for sm_90 and their registers, by `without_file(name)`; compiled once for a text."""
    cubin = compiled(source)
    registers = dict(re.findall(r"^(\S+) (\d+)$", cubin.with_suffix(".registers").read_text("utf-8"), re.MULTILINE))
    return {without_file(name): (kernel, int(registers[name])) for name, kernel in kernels(cubin).items()}


def compiled(source: Path) -> Path:
    """The source's .cubin for sm_90, with a file of the kernels' registers beside it."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise NoTool("nvcc is needed")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    headers = [path for path in sorted(host.SOURCES.rglob("*")) if path.suffix in (".h", ".cuh")]
    parts = [part for path in headers for part in (path.name, path.read_bytes())]
    kept = host.cache() / (host.digest(version, source.name, source.read_bytes(), *parts) + ".cubin")
    with host.locked(kept.with_suffix(".lock")):
        if not kept.exists():
            made = kept.with_suffix(".part")
            command = [nvcc, "-std=c++17", "-O3", "-cubin", "-arch=sm_90", "-Xptxas", "-v", "-I", str(host.SOURCES)]
            done = subprocess.run([*command, "-o", str(made), str(source)], capture_output=True, text=True)
            if done.returncode:
                raise host.HostError(done.stderr)
            pairs = re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", done.stderr, re.DOTALL)
            with atomic_write(kept.with_suffix(".registers")) as file:
                file.write("".join(f"{name} {registers}\n" for name, registers in pairs))
            made.replace(kept)
    return kept


def find(launch: Launch) -> tuple[Kernel, int]:
    """The launched kernel for the device, and its registers."""
    name = without_file(launch.kernel)
    for source in sorted(_sources(), key=lambda path: not _likely(path, name)):
        if (found := device_kernels(source).get(name)) is not None:
            return found
    raise LookupError(f"no source has the kernel {launch.kernel}")


def _likely(source: Path, name: str) -> bool:
    if "slabs" in name:
        return source.stem == "slabs"
    kind = {"float32": "If", "float16": "I6__half", "bfloat16": "I13__nv_bfloat16"}
    if "talk_kernel" in name:
        return source.stem == "talk_band"
    if "talk_" in name:
        return source.stem.startswith("talk_") and kind.get(source.stem.removeprefix("talk_"), "?") in name
    way = "backward" if "backward" in name or "gradient" in name or "reduce" in name or "finish" in name else "forward"
    return (
        source.stem.startswith("band" if "band" in name else way)
        and way in source.stem
        and ("band" in name or kind[source.stem.rpartition("_")[2]] in name)
    )
