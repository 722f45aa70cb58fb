"""The tables of docs/ that were measured on a GPU: see benchmarks/pages.py."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import timing
from benchmarks.figures import OURS, median
from benchmarks.tables import SHARE, Cell, Form, Table, cell, judged, load, ratio, ratio_cell, sizes, source

_MS = Form(None, 1e-3)
_FILE, _MODELS, _SEARCH = "gpu_timing", "gpu_fairseq_timing", "gpu_fairseq_generation"
_BEFORE = "gpu_versions/gpu_fairseq_timing_3e4b69f"
_TRANSFORMER = "fairseq Transformer"


def _part(name: str) -> dict:
    return load(_FILE)["results"][name]


def _share(case: dict, rates: dict, name: str) -> Cell:
    """Of the bandwidth of a copy."""
    return cell(case["floor"][name]["bytes"] / rates["bytes_per_s"] / median(case, OURS, name), SHARE)


def operators() -> Table:
    swept = [
        case for case in _part("sweep")["cases"] if case["case"]["steps"] * case["case"]["batch"] in (4096, 65_536)
    ]
    ends = [case for case in swept if (case["case"]["steps"], case["case"]["batch"]) in ((8192, 8), (64, 64))]
    parts = [(case, "main") for case in _part("main")["cases"]] + [(case, "sweep") for case in ends]
    rows = []
    for case, part in parts:
        rates = _part(part)["rates"]
        row: list[Cell | str] = [sizes(case)]
        for name in ("forward", "backward"):
            row += [cell(median(case, OURS, name), _MS), _share(case, rates, name)]
        peers = ("our reference", "conv1d depthwise", "attention (flash)")
        rows.append([*row, *(ratio(case, peer, "both") for peer in peers)])
    peers = ["our reference", "`conv1d` depthwise", "attention"]
    return Table(source(_FILE), ["T, B, C, H, K", "forward, ms", "share", "backward, ms", "share", *peers], rows)


def against_fairseq() -> Table:
    rows = []
    for case in _part("fairseq")["cases"]:
        ours, theirs = (case["candidates"][name]["peak_bytes"] for name in (OURS, "fairseq CUDA"))
        times = [ratio(case, "fairseq CUDA", name) for name in ("forward", "both")]
        rows.append([sizes(case), *times, cell(ours / theirs, SHARE)])
    return Table(source(_FILE), ["T, B, C, H, K", "forward", "forward + backward", "memory"], rows)


def short() -> Table:
    """Each peer's ratio is from its own run with ours, our times from the run without them."""
    peers = {"dynamic-conv1d": _part("dynamic_conv1d"), "Jet-Nemotron": _part("jet_nemotron")}
    rows = []
    for number, case in enumerate(_part("short")["cases"]):
        row: list[Cell | str] = [str(case["case"]["channels"] // case["case"]["heads"])]
        row += [cell(median(case, OURS, name), Form(0, 1e-6)) for name in ("forward", "both")]
        for peer, run in peers.items():
            row += [ratio(run["cases"][number], peer, name, Form(2)) for name in ("forward", "both")]
        rows.append(row)
    times = ["C/H", "ours, forward, µs", "both, µs"]
    return Table(source(_FILE), [*times, "dynamic-conv1d, forward", "both", "Jet-Nemotron, forward", "both"], rows)


def bandwidth() -> Table:
    """Of a copy: what the forward pass of dynamic-conv1d reaches where it is faster than ours, and the copy itself."""
    run = _part("dynamic_conv1d")
    peer, copy = "dynamic-conv1d", run["rates"]["bytes_per_s"]
    rows: list[list[Cell | str]] = [["copy", cell(copy, Form(2, 1e12)), cell(1.0, SHARE)]]
    for case in run["cases"]:
        for name in ("forward", "both"):
            if median(case, peer, name) < median(case, OURS, name):
                rate = case["floor"][name]["bytes"] / median(case, peer, name)
                heads = case["case"]["channels"] // case["case"]["heads"]
                rows.append([f"{peer}, C/H {heads}, {name}", cell(rate, Form(2, 1e12)), cell(rate / copy, SHARE)])
    return Table(source(_FILE), ["", "TB/s", "share"], rows)


def training() -> Table:
    systems, before = (load(name)["results"]["training"]["systems"] for name in (_MODELS, _BEFORE))
    rows = [
        [
            name.replace(" (ours)", ", ours"),
            cell(of["tokens_per_s"], Form(0)),
            cell(before[name]["tokens_per_s"], Form(0)),
            ratio_cell(timing.ratio(systems[_TRANSFORMER], of)),
            cell(of["peak_bytes"], Form(0, 2**20)),
        ]
        for name, of in systems.items()
    ]
    headers = ["", "tokens/s", "before", "× fairseq's Transformer", "peak, MiB"]
    return Table(source(_MODELS, _BEFORE), headers, rows)


def training_large() -> Table:
    """Steps of a batch that fills the GPU."""
    systems = load(_MODELS)["results"]["training_16k"]["systems"]
    rows = [
        [
            name.replace(" (ours)", ", ours"),
            cell(of["tokens_per_s"], Form(0)),
            ratio_cell(timing.ratio(systems[_TRANSFORMER], of)),
            cell(of["peak_bytes"], Form(0, 2**20)),
        ]
        for name, of in systems.items()
    ]
    return Table(source(_MODELS), ["", "tokens/s", "× fairseq's Transformer", "peak, MiB"], rows)


def generation() -> Table:
    settings = {of["sentences"]: of["systems"] for of in load(_SEARCH)["results"]["generation"]["settings"]}
    names = sorted(settings[1], key=lambda name: "(ours)" not in name)
    rows = []
    for name in names:
        row: list[Cell | str] = [name.replace(" (ours)", ", ours").replace("fairseq ", "fairseq's ")]
        for systems, places in ((settings[1], 1), (settings[32], 0), (settings[256], 0)):
            speed = systems[name]["sentences_per_s"]
            row += [
                cell(speed, Form(places)),
                ratio_cell(timing.ratio(systems[_TRANSFORMER], systems[name]), Form(2)),
            ]
        rows.append(row)
    ratios = "× fairseq's Transformer"
    headers = ["", "1 sentence", ratios, "32 sentences", ratios, "256 sentences", ratios]
    return Table(source(_SEARCH), headers, rows)


TABLES: dict[str, Callable[[], Table]] = {
    "GPU operators": operators,
    "fairseq's CUDA layers": against_fairseq,
    "short filters": short,
    "bandwidth": bandwidth,
    "GPU training": training,
    "GPU training, large batches": training_large,
    "GPU generation": generation,
    "GPU targets": lambda: judged("GPU"),
}
