"""README.md's table of speed, like for like: see benchmarks/pages.py.

Each row has the same task, machine, type and sizes for all systems, and the command that measures the row again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.tables import Cell, Form, Table, cell, load, source

# The columns: our DynamicConv, fairseq's, fairseq's Transformer in its own search and in ours.
_OURS, _THEIRS, _TRANSFORMER = "DynamicConv (ours)", "fairseq DynamicConv", "fairseq Transformer"
_SYSTEMS = (_OURS, _THEIRS, _TRANSFORMER, f"{_TRANSFORMER}, our search")
_HEADERS = ("DynamicConv, ours", "fairseq's DynamicConv", "fairseq's Transformer", "that Transformer, our search")
_NOT_MEASURED, _NO_SEARCH = "not measured", "–"
_TRAINING = ("cpu_training_iwslt", "cpu_training_iwslt_bfloat16", "gpu_fairseq_timing")
_CPU_SEARCH, _GPU_SEARCH = "cpu_generation", "gpu_fairseq_generation"


def _content(file: str, part: str) -> Mapping[str, Any]:
    """What one program wrote: the whole file, or its part of what benchmarks/gpu_fairseq.sh collects."""
    content = load(file)
    return content["results"][part] if "results" in content else content


def _about(content: Mapping[str, Any], dtype: str, work: str) -> str:
    """The machine, the type, the sizes."""
    machine = content["machine"]
    where = f"one {machine['gpu']}" if "gpu" in machine else f"{machine['cores']} cores, {machine['cpu']}"
    return f"{where}; {dtype}; `{content['preset']}` sizes, {work}"


def _command(program: str, content: Mapping[str, Any], *options: str) -> str:
    """The command that measures the row; what it leaves out is the default."""
    words = ["python -m", f"benchmarks.{program}", *options]
    if content["preset"] != "iwslt_de_en":
        words += ["--preset", content["preset"]]
    if content["dtype"] != "float32":
        words += ["--dtype", content["dtype"]]
    if "gpu" in content["machine"]:
        words += ["--device cuda"]
    return f"`{' '.join(words)}`"


def _training(file: str) -> list[Cell | str]:
    content = _content(file, "training")
    speeds = [content["systems"][name]["tokens_per_s"] for name in _SYSTEMS[:3]]
    work = content["data"].removeprefix("random, ")
    return [
        f"**training**, tokens/s: {_about(content, content['dtype'], work)}",
        *(cell(speed, Form(0)) for speed in speeds),
        _NO_SEARCH,
        _command("training", content),
    ]


def _search(file: str, beam: int, sentences: int, suffix: str = "") -> list[Cell | str]:
    """A row of translation. suffix: of the systems' names, such as ", int8"."""
    content = _content(file, "generation")
    (setting,) = [s for s in content["settings"] if (s["beam"], s["sentences"]) == (beam, sentences)]
    speeds = [setting["systems"].get(name + suffix, {}).get("sentences_per_s") for name in _SYSTEMS]
    form = Form(0) if "gpu" in content["machine"] else Form()
    dtype = "int8" if suffix == ", int8" else content["dtype"] + suffix
    work = f"beam {beam}, {sentences} × {setting['length']} tokens"
    return [
        f"**translation**, sentences/s: {_about(content, dtype, work)}",
        *(cell(speed, form) if speed else _NOT_MEASURED for speed in speeds),
        _command("generation", content, f"--beam {beam}", f"--sentences {sentences}"),
    ]


def like_for_like() -> Table:
    rows = [
        *(_training(file) for file in _TRAINING[:2]),
        _search(_CPU_SEARCH, 5, 32),
        _search(_CPU_SEARCH, 5, 32, ", int8"),
        _training(_TRAINING[2]),
        _search(_GPU_SEARCH, 4, 256),
        _search(_GPU_SEARCH, 4, 256, ", CUDA graphs"),
    ]
    return Table(source(*_TRAINING, _CPU_SEARCH, _GPU_SEARCH), ["", *_HEADERS, "command"], rows)


TABLES: dict[str, Callable[[], Table]] = {"like for like": like_for_like}
