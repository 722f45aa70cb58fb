"""The directory of a deployed model: the two graphs as torch files, and what else a program needs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from lightconv_plugin.checkpoints.exported import TEXT, TEXT_FILES, Exported, dictionary_name, load_model, open_exported
from lightconv_plugin.deployment.graphs import export_start, export_step, state_tensors
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import DirectoryKind, atomic_directory, check_new_directory

FORMATS = ("aoti", "export")
ABOUT = "deployment.json"
FORMAT_VERSION = 1
_GRAPHS = ("start", "step")
DEPLOYED_MODEL = DirectoryKind(
    "a deployed model",
    recognise=lambda directory: (directory / ABOUT).is_file(),
    files=(*(f"{name}.pt2" for name in _GRAPHS), ABOUT, *TEXT_FILES),
)


def deploy(
    directory: Path,
    output: Path,
    *,
    format: str = "aoti",
    force: bool = False,
    said: Callable[[str], object] = lambda line: None,
) -> None:
    """Write an exported model as float32 graphs for the CPU.

    The directory has start.pt2, step.pt2, deployment.json, dictionaries, and merges or sentencepiece models. It is
    written atomically: a killed process leaves all of it or nothing.

    Args:
        directory: the exported model.
        output: the directory to create.
        format: "aoti": libraries compiled by torch's AOTInductor for this machine's processor and version of torch;
            "export": torch.export files for any processor, which are slower and need Python.
        force: replace a directory of a deployed model, if it has no other files.
        said: called with one line for each step.

    Raises:
        InputError: unknown format, `directory` is not an exported model, `output` is in use, or there is no compiler.
        OSError: `output` cannot be written.
    """
    if format not in FORMATS:
        raise InputError(f"`format` must be one of {', '.join(FORMATS)}, got {format!r}")
    check_new_directory(output, force, DEPLOYED_MODEL)
    exported = open_exported(directory)
    model = load_model(exported, "float32")
    with atomic_directory(output, replace=force) as new:
        for name, make in zip(_GRAPHS, (export_start, export_step), strict=True):
            path = new / f"{name}.pt2"
            said(f"tracing {name}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch warns about its own code
                graph = make(model)
                if format == "aoti":
                    said(f"compiling {name}")
                    _compile(graph, path)
                else:
                    torch.export.save(graph, path)
        for path in _text_files(exported):
            (new / path.name).write_bytes(path.read_bytes())
        about = _about(exported, format) | {"state": [asdict(tensor) for tensor in state_tensors(model)]}
        (new / ABOUT).write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _compile(graph: ExportedProgram, path: Path) -> None:
    from torch._inductor import aoti_compile_and_package

    try:
        aoti_compile_and_package(graph, package_path=str(path))
    except Exception as error:  # torch raises several kinds of errors for a failing compiler
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        raise InputError(
            f"AOTInductor cannot compile here: {type(error).__name__}: {first[:300]}. It needs a C++ compiler (CXX, or "
            "g++); `format` torch.export needs none"
        ) from error


def _text_files(exported: Exported) -> list[Path]:
    """Dictionaries, merges or sentencepiece models, and text.json."""
    names = {dictionary_name(exported.settings.target_lang), TEXT}
    if exported.source is not None:
        names.add(dictionary_name(exported.settings.source_lang))
    for side in (exported.source_text, exported.target_text):
        if side is not None and side.file is not None:
            names.add(side.file.name)
    return [exported.directory / name for name in sorted(names)]


def _about(exported: Exported, format: str) -> dict[str, Any]:
    """deployment.json without the state."""
    config, settings = exported.config, exported.settings
    return {
        "format_version": FORMAT_VERSION,
        "format": format,
        "torch": torch.__version__,
        "source_lang": settings.source_lang,
        "target_lang": settings.target_lang,
        "max_source_positions": settings.max_source_positions,
        "max_target_positions": settings.max_target_positions,
        "vocab_size": config.decoder.vocab_size,
        "bos": config.bos,
        "pad": config.pad,
        "eos": config.eos,
        "unk": config.unk,
    }
