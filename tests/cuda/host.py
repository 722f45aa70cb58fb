"""Builds the .cu sources for the host (cuda_on_host.h, runner.cpp) and calls their launchers from Python.

`build` compiles every source to an object and links them under the address and undefined-behaviour sanitizers. Objects
are kept in the system's folder for temporary files under a hash of all that goes into them, so that a source is
compiled once, whoever asks: a lock keeps the processes of pytest-xdist from doing it twice.

A `Runner` is a process that makes calls as long as it lives. A call that the sanitizers stop ends it: that call raises
`HostError` with what they wrote, and the next one starts a new process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightconv_plugin.cgroups import cores

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent.parent / "cuda"
EMULATOR = (HERE / "cuda_on_host.cpp", HERE / "cuda_on_host_warp.cpp")

# Locals that nobody sets are filled with a pattern, so that a result that depends on one is seen to be wrong.
COMPILE = ["-std=c++20", "-O1", "-g1", "-DLIGHTCONV_HOST", "-Wno-unknown-pragmas", "-ftrivial-auto-var-init=pattern"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Objects that no test asked for in so many days are removed.
KEPT_DAYS = 7


class HostError(AssertionError):
    """A call did not end well: the sanitizers, the emulated device or a launcher complained."""


# ------------------------------------------------------------------------------------------------ building


def compiler() -> str:
    """The C++ compiler; skips the test where there is none that knows C++20 and the sanitizers."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no g++: the CUDA sources cannot be run on the host")
    if not _compiles(found):
        pytest.skip("this g++ lacks C++20 with -fsanitize=address,undefined")
    return found


@functools.cache
def _compiles(gxx: str) -> bool:
    program = "#include <source_location>\nint main() { return 0; }"
    command = [gxx, *COMPILE, *SANITIZE, "-x", "c++", "-", "-o", os.devnull]
    return subprocess.run(command, input=program, text=True, capture_output=True).returncode == 0


def build(*sources: Path, folders: tuple[Path, ...] = (), sanitize: bool = True) -> Path:
    """Compile `sources` (.cu and .cpp), looking for headers in `folders` too, and link them; returns the program."""
    return _link(_compile(sources, folders, sanitize), sanitize)


def _compile(sources: Iterable[Path], folders: tuple[Path, ...], sanitize: bool = True) -> list[Path]:
    flags = [*COMPILE, *(SANITIZE if sanitize else []), *(f"-I{folder}" for folder in (*folders, HERE))]
    return objects(compiler(), flags, sources)


def objects(gxx: str, flags: list[str], sources: Iterable[Path]) -> list[Path]:
    """The sources, compiled: each once for its content, flags and compiler."""
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(lambda source: _object(gxx, flags, source), sources))


def _link(objects: list[Path], sanitize: bool = True) -> Path:
    program = cache() / (digest(*(path.name for path in objects)) + ".run")
    return _made_once(program, [compiler(), *(SANITIZE if sanitize else []), *map(str, objects)])


def _object(gxx: str, flags: list[str], source: Path) -> Path:
    language = ["-x", "c++", str(source)]
    listed = subprocess.run([gxx, *flags, "-MM", "-MT", "x", *language], capture_output=True, text=True)
    if listed.returncode:
        raise HostError(f"{source.name} does not compile on the host:\n{listed.stderr}")
    # A rule for make: lines go on after a backslash, and one stands before a space in a name.
    files = shlex.split(listed.stdout.replace("\\\n", " "))[1:]
    content = [Path(file).read_bytes() for file in files]
    # Folders differ between copies of the sources; what is in them counts.
    options = [flag for flag in flags if not flag.startswith("-I")]
    target = cache() / (digest(_version(gxx), *options, *content) + ".o")
    return _made_once(target, [gxx, *flags, "-c", *language])


def _made_once(target: Path, command: list[str]) -> Path:
    with locked(target.with_suffix(".lock")):
        if target.exists():
            os.utime(target)
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            result = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            if result.returncode:
                raise HostError(f"{' '.join(command)}\n{result.stderr}")
            made.replace(target)
    return target


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def cache() -> Path:
    """The folder of what is compiled once, without what nobody has used for long."""
    folder = Path(tempfile.gettempdir()) / f"lightconv-cuda-on-host-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise HostError(f"{folder} belongs to somebody else")
    oldest = time.time() - KEPT_DAYS * 24 * 3600
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if file.is_file() and file.stat().st_mtime < oldest:
                file.unlink()
    return folder


@functools.cache
def _version(gxx: str) -> str:
    return subprocess.run([gxx, "--version"], capture_output=True, text=True, check=True).stdout


def digest(*parts: str | bytes) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()[:32]


def environment() -> dict[str, str]:
    """What a program under the sanitizers is started with."""
    asan = "detect_leaks=0:exitcode=98:allocator_may_return_null=1:detect_stack_use_after_return=0"
    return {**os.environ, "ASAN_OPTIONS": asan, "UBSAN_OPTIONS": "print_stacktrace=1"}


def build_runner(changed: Path = SOURCES, units: Sequence[str] = ()) -> Path:
    """The runner with all kernels; the files `units` of them, with their headers, from the folder `changed`."""
    # The largest first: the cores are then busy to the end.
    kernels = sorted(SOURCES.rglob("*.cu"), key=lambda path: (-path.stat().st_size, path))
    kept = [kernel for kernel in kernels if kernel.relative_to(SOURCES).as_posix() not in units]
    anew = _compile([changed / unit for unit in units], (changed,))
    return _link(anew + _compile([*kept, HERE / "runner.cpp", *EMULATOR], (SOURCES,)))


# ------------------------------------------------------------------------------------------------ calling


class Sparse:
    """A tensor for the runner whose elements lie `strides` apart, in memory of which no more than they is touched.

    `values` is dense, holds what is sent, and takes what comes back.
    """

    def __init__(self, values: Tensor, strides: tuple[int, ...]) -> None:
        self.values, self.strides = values.contiguous(), strides

    def stride(self) -> tuple[int, ...]:
        return self.strides


class Runner:
    """Calls of the launchers in cuda/*/launchers.h, each made twice in another process."""

    def __init__(self, program: Path) -> None:
        self.program = program
        self.process: subprocess.Popen | None = None
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the runner)

    def call(
        self,
        numbers: Mapping[str, int],
        fractions: Mapping[str, float],
        inputs: Mapping[str, Tensor | Sparse | None],
        outputs: Mapping[str, Tensor | Sparse | None],
    ) -> None:
        """Make one call; `outputs` are sent as they are, and overwritten with what they are afterwards."""
        given = {name: (tensor, False) for name, tensor in inputs.items() if tensor is not None}
        given |= {name: (tensor, True) for name, tensor in outputs.items() if tensor is not None}
        request = [struct.pack("<qq", 1, len(numbers))]
        request += [_text(name) + struct.pack("<q", value) for name, value in numbers.items()]
        request += [struct.pack("<q", len(fractions))]
        request += [_text(name) + struct.pack("<d", value) for name, value in fractions.items()]
        request += [struct.pack("<q", len(given))]
        request += [_text(name) + _tensor(tensor, writable) for name, (tensor, writable) in given.items()]
        try:
            self._exchange(b"".join(request), {name: outputs[name] for name in sorted(given) if given[name][1]})
        except (EOFError, BrokenPipeError):
            raise HostError(f"the call ended the process: {self._last_words()}") from None

    def _exchange(self, request: bytes, outputs: dict[str, Tensor | Sparse]) -> None:
        if self.process is None:
            self.errors.seek(0)
            self.errors.truncate()
            self.process = subprocess.Popen(
                [self.program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env=environment(),
            )
        self.process.stdin.write(request)
        self.process.stdin.flush()
        error, length = struct.unpack("<qq", self._read(16))
        trouble = self._read(length).decode()
        for tensor in outputs.values():
            for pointer, size in _pieces(tensor):
                ctypes.memmove(pointer, self._read(size), size)
        if error:
            raise HostError(f"the launcher returned cudaError_t {error}")
        if trouble:
            raise HostError(trouble)

    def _read(self, size: int) -> bytes:
        data = self.process.stdout.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def _last_words(self) -> str:
        status = self.process.wait()
        self.close()
        self.errors.seek(0)
        return f"exit status {status}\n{self.errors.read().decode(errors='replace')[-6000:]}"

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
            self.process = None


def _text(name: str) -> bytes:
    return struct.pack("<q", len(name)) + name.encode()


def _span(tensor: Tensor) -> int:
    """Elements from a view's first to its last, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _pieces(tensor: Tensor | Sparse) -> list[tuple[int, int]]:
    """Address and bytes of each piece of memory that is sent, and comes back: all of a view's span, gaps too."""
    if isinstance(tensor, Tensor):
        return [(tensor.data_ptr(), _span(tensor) * tensor.element_size())]
    rows = tensor.values.flatten(0, -2)
    return [(row.data_ptr(), row.numel() * row.element_size()) for row in rows]


def _tensor(tensor: Tensor | Sparse, writable: bool) -> bytes:
    strides = tensor.stride()
    if isinstance(tensor, Tensor):
        # The runner's memory is aligned to 16 bytes; the view keeps its distance from that.
        lead, size = tensor.data_ptr() % 16, _span(tensor) * tensor.element_size()
        offsets, sparse = [0], False
    else:
        rows = torch.cartesian_prod(*(torch.arange(n) for n in tensor.values.shape[:-1]), torch.zeros(1, dtype=int))
        offsets = (rows * torch.tensor(strides)).sum(-1) * tensor.values.element_size()
        lead, size, sparse = 0, int(offsets.max()) + tensor.values.shape[-1] * tensor.values.element_size(), True
        offsets = offsets.tolist()
    message = [struct.pack("<8q", writable, sparse, lead, size, *(*strides, 0, 0, 0, 0)[:4])]
    pieces = _pieces(tensor)
    message.append(struct.pack("<q", len(pieces)))
    for offset, (pointer, length) in zip(offsets, pieces, strict=True):
        message.append(struct.pack("<qq", offset, length) + ctypes.string_at(pointer, length))
    return b"".join(message)
