"""Chooses the backend: compiles the native kernels at first use and loads them, or falls back to the reference.

    backend("cpu")      "cpu": cpu/**/*.cpp, compiled here;   "reference": reference.py, in plain PyTorch
    backend("cuda")     "cuda": cuda/**/*.cu, compiled here;  "reference"

The choice is made once per device type, at the first call with such tensors or the first call of `backend`. A library
in the cache loads in milliseconds; otherwise one process compiles it while others wait (compilation.py).

Values of LIGHTCONV_BACKEND:

    auto (or unset)   native kernels; if they cannot be used, one warning with the cause, then the reference
    reference         no native code is compiled or loaded
    cpu, cuda         that backend, or an error, also for tensors on another device

Loading the CPU kernels also tells malloc to keep freed memory (allocator.py).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from lightconv_plugin import allocator
from lightconv_plugin.errors import BackendError, VariableError
from lightconv_plugin.ops import artifacts, compilation
from lightconv_plugin.ops.artifacts import NativeError

CHOICES = ("auto", "cpu", "cuda", "reference")
OPERATORS = (
    *(
        name + suffix
        for name in ("lightconv", "dynamicconv", "talkconv")
        for suffix in ("", "_backward", "_step", "_step_backward")
    ),
    "label_smoothed_nll",
    "label_smoothed_nll_backward",
    "relu_dropout",
    "relu_dropout_backward",
    "dropout_add_norm",
    "dropout_add_norm_backward",
)
CPU_OPERATORS = ("dropout",)  # on a GPU torch's own is as fast
CUDA_OPERATORS = ("ring_step", "best_words")  # a search on a CPU has kernels for whole batches (cpu/search)

_logger = logging.getLogger("lightconv_plugin")
_lock = threading.RLock()
_decided: dict[str, Decision] = {}


@dataclass(frozen=True)
class Decision:
    """The backend of a device type, and the reason if it is the reference.

    `error`: why there are no native kernels, or with a `library` only kernels for fewer instructions than this CPU has.
    """

    backend: str
    library: Path | None = None
    reason: str = ""
    error: NativeError | None = None


def backend(device_type: str) -> str:
    """The backend for tensors on "cpu", "cuda" or another device type: "cpu", "cuda" or "reference".

    Compiles and loads the kernels if necessary.

    Raises:
        VariableError: LIGHTCONV_BACKEND has an unknown value.
        BackendError: it asks for a backend that is not available, or not for this device.
    """
    return decision(device_type).backend


def decision(device_type: str) -> Decision:
    """Like `backend`, with the reason."""
    forced = _forced()
    if forced in artifacts.KINDS and forced != device_type:
        raise BackendError(
            f"LIGHTCONV_BACKEND={forced}: these kernels are for {forced} tensors, got tensors on {device_type}"
        )
    if (decided := _decided.get(device_type)) is None:
        with _lock:
            if (decided := _decided.get(device_type)) is None:
                decided = _decided[device_type] = _decide(device_type, forced)
    if forced in artifacts.KINDS and decided.backend != forced:
        raise BackendError(f"LIGHTCONV_BACKEND={forced}: {decided.reason}") from decided.error
    return decided


def chosen(device_type: str) -> str | None:
    """The backend of a device type if it has been chosen already."""
    decided = _decided.get(device_type)
    return decided.backend if decided else None


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether what is written for GPUs is meant for this tensor; those on "meta" stand in (benchmarks/launches.py)."""
    return tensor.device.type in ("cuda", "meta")


def has_kernel(operator: str, device_type: str) -> bool:
    """Whether an operator currently has a kernel of its own for a device type."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"lightconv::{operator}", device_type.upper())


def _forced() -> str:
    value = os.environ.get("LIGHTCONV_BACKEND") or "auto"
    if value not in CHOICES:
        raise VariableError(f"LIGHTCONV_BACKEND must be one of {', '.join(CHOICES)}, or unset, got {value!r}")
    return value


def _decide(device_type: str, forced: str) -> Decision:
    if forced == "reference":
        decided = Decision("reference", reason="LIGHTCONV_BACKEND=reference")
    elif device_type not in artifacts.KINDS:
        decided = Decision("reference", reason=f"there are no native kernels for {device_type} tensors")
    else:
        try:
            decided = _load(device_type)
        except NativeError as error:
            reason = f"the {device_type.upper()} kernels cannot be used: {error}"
            decided = Decision("reference", reason=reason, error=error)
            if forced == "auto":
                # Not with `warnings`: a filter could hide it, or turn it into an exception.
                _logger.warning("%s. Falling back to the reference, which is slower", reason)
    why = f" ({decided.library or decided.reason})" if decided.library or decided.error is None else ""
    _logger.debug("operators on %s tensors: backend %s%s", device_type, decided.backend, why)
    return decided


def _load(kind: str) -> Decision:
    """Register the native kernels with torch's dispatcher."""
    if kind == "cpu":
        allocator.users_choice()  # once the kernels are registered, an unknown value would stop the first call only
    if kind == "cuda" and not torch.cuda.is_available():
        raise NativeError("torch sees no CUDA device")
    unusable: dict[Path, str] = {}
    error: NativeError | None = None
    if (library := opened(artifacts.find_all(kind), unusable)) is None:
        library, error = _build_or_lesser(kind, unusable)
    wanted = OPERATORS + (CPU_OPERATORS if kind == "cpu" else CUDA_OPERATORS)
    missing = [name for name in wanted if not has_kernel(name, kind)]
    if missing:
        raise NativeError(f"{library} has no kernel for {', '.join(missing)}", log=library.with_name("build.log"))
    if kind == "cpu":
        allocator.keep_freed_memory()
    return Decision(kind, library, error=error)


def opened(libraries: Iterable[Path], unusable: dict[Path, str]) -> Path | None:
    """Load the first library that this system can load; why it cannot load one goes into `unusable`."""
    for library in libraries:
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            unusable[library] = " ".join(str(error.__cause__ or error).split())
        else:
            return library
    return None


def _build_or_lesser(kind: str, unusable: dict[Path, str]) -> tuple[Path, NativeError | None]:
    """Build the library and load it; if that fails, load a finished one with fewer instructions, such as the package's.

    Returns it, with the failure if it is such a lesser one.

    Those that are `unusable` already, built on a system with a newer C library perhaps, are no reason not to build.
    """
    causes = [f"cannot load {library}: {cause}" for library, cause in unusable.items()]
    cache = artifacts.cache_folder()
    noexec = [library for library, why in unusable.items() if "failed to map" in why and library.is_relative_to(cache)]
    try:
        if noexec:  # nor could what is compiled there be loaded
            raise NativeError(f"cannot load {noexec[0]}: {unusable[noexec[0]]}", compilation.NO_EXEC)
        library = _build(kind, unusable, causes)
    except NativeError as error:
        if causes and not noexec:
            error = NativeError("; nor compile it: ".join([causes[0], error.cause]), error.remedy, error.log)
        lesser = opened(artifacts.find_lesser(), unusable) if kind == "cpu" else None
        if lesser is None:
            raise error
        target = artifacts.information(lesser).get("capability")
        _logger.warning("using the CPU kernels for %s, which are slower: those for this CPU fail: %s", target, error)
        return lesser, error
    if opened([library], unusable) is None:
        raise NativeError(f"cannot load {library}: {unusable[library]}", log=library.with_name("build.log"))
    return library, None


def _build(kind: str, unusable: Collection[Path], causes: Iterable[str]) -> Path:
    try:
        architectures = artifacts.chosen_architectures() if kind == "cuda" else ()
    except ValueError as error:
        raise NativeError(str(error), "unset TORCH_CUDA_ARCH_LIST: the default is the GPUs of this machine") from None
    for device in artifacts.capabilities() if kind == "cuda" else ():
        if not any(artifacts.covers(name, device) for name in architectures):
            raise NativeError(
                f"TORCH_CUDA_ARCH_LIST={';'.join(architectures)} lacks this machine's GPU of capability "
                f"{device[0]}.{device[1]}",
                "add it, or unset TORCH_CUDA_ARCH_LIST",
            )

    def started() -> None:
        for cause in causes:
            _say(cause)
        _say(f"compiling the {kind.upper()} kernels (once, about {_SECONDS[kind]} s) ...")

    return compilation.build(
        artifacts.recipe(kind, architectures),
        started=started,
        waiting=lambda: _say(f"waiting for another process that is compiling the {kind.upper()} kernels ..."),
        unusable=unusable,
    )


_SECONDS = {"cpu": 35, "cuda": 60}


def _say(message: str) -> None:
    """Tell the user: in the program's log or, if it has none at this level, on stderr."""
    if _logger.isEnabledFor(logging.INFO) and _logger.hasHandlers():
        _logger.info(message)
    else:
        print(f"lightconv_plugin: {message}", file=sys.stderr, flush=True)


def _after_fork() -> None:
    """A forked child has none of the threads that may have held the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
