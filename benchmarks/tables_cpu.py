"""The tables of docs/ that were measured on a CPU: see benchmarks/pages.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import timing
from benchmarks.figures import OURS, median
from benchmarks.tables import Cell, Form, Table, cell, judged, load, ratio, ratio_cell, sizes, source

_MS = Form(None, 1e-3)
_LOOP = "fused loop, no blocking"
_PEERS = {
    "our reference": "our reference",
    "fairseq band": "fairseq, band",
    "fairseq unfold": "fairseq, unfold",
    "conv1d depthwise": "`conv1d` depthwise",
    "attention": "attention",
}
_SIZES = "T, B, C, H, K"
_OUR_SEARCH = "fairseq's Transformer, our search"
_ENGINE = {f"CTranslate2 Transformer, {kind}": kind for kind in ("float32", "int8")}


def _system(name: str, engine: str = "CTranslate2") -> str:
    """The benchmarks' name of a system, as a page has it."""
    name = name.replace(" (ours)", ", ours").replace("fairseq Transformer, our search", _OUR_SEARCH)
    return name.replace("CTranslate2 Transformer", f"{engine}, Transformer")


def operators() -> Table:
    rows = [
        [
            sizes(case),
            cell(ours := median(case, OURS, "both"), _MS),
            cell(ours / case["floor"]["both"]["seconds"]),
            *(ratio(case, peer, "both") for peer in _PEERS),
        ]
        for case in load("cpu_operators")["cases"]
    ]
    return Table(source("cpu_operators"), [_SIZES, "ours, ms", "÷ floor", *_PEERS.values()], rows)


def _lengths() -> list[dict]:
    return [case for case in load("cpu_operators_lengths")["cases"] if case["operator"] == "dynamicconv"]


def lengths() -> Table:
    rows = []
    for case in _lengths():
        row: list[Cell | str] = [sizes(case).partition(" ")[2]]
        for name in ("forward", "both"):
            ours = median(case, OURS, name)
            row += [cell(ours, Form(2, 1e-3)), cell(ours / case["floor"][name]["bytes_as_copy_s"], Form(1))]
            row += [ratio(case, peer, name, Form(1)) for peer in (_LOOP, "fairseq band")]
        rows.append(row)
    titles = ["÷ bytes", "loop", "fairseq, band"]
    return Table(source("cpu_operators_lengths"), [_SIZES, "forward, ms", *titles, "both, ms", *titles], rows)


def reached() -> Table:
    """How many cases of `lengths` reach the targets."""

    def counts(kernels: tuple[int, ...], good: Callable[[dict, str], bool]) -> list[Cell | str]:
        cases = [case for case in _lengths() if case["case"]["kernel_size"] in kernels]
        numbers = [sum(good(case, name) for case in cases) for name in ("forward", "both")]
        return [Cell(number, f"{number} of {len(cases)}") for number in numbers]

    def bytes_within(times: float) -> Callable[[dict, str], bool]:
        return lambda case, name: median(case, OURS, name) <= times * case["floor"][name]["bytes_as_copy_s"]

    rows = [
        ["K = 3 and 7: at most 2 × the time of the bytes", *counts((3, 7), bytes_within(2))],
        ["K = 15 and 31: at most 2.5 × the time of the bytes", *counts((15, 31), bytes_within(2.5))],
        [
            "twice as fast as the loop",
            *counts((3, 7, 15, 31), lambda case, name: median(case, _LOOP, name) >= 2 * median(case, OURS, name)),
        ],
    ]
    return Table(source("cpu_operators_lengths"), ["target", "forward", "forward + backward"], rows)


def apart() -> Table:
    parts = ("whole", "linear", "walk", "in caches")
    rows = [
        [
            sizes(case).partition(" ")[2],
            *(cell(case["seconds"][name][part], Form(2, 1e-3)) for name in ("forward", "both") for part in parts),
        ]
        for case in load("cpu_operators_apart")["cases"]
        if case["operator"] == "dynamicconv"
    ]
    return Table(source("cpu_operators_apart"), [_SIZES, "forward", *parts[1:], "both", *parts[1:]], rows)


def without_avx512() -> Table:
    names = [f"instruction_sets/operators_lengths_{level}" for level in ("avx2", "avx512")]
    kernels, rows = (3, 7, 15, 31), []
    for operator in ("lightconv", "dynamicconv"):
        for name, title in (("forward", "forward"), ("both", "forward and backward")):
            row: list[Cell | str] = [f"{operator}, {title}"]
            for kernel in kernels:
                of = [
                    [
                        median(case, OURS, name)
                        for case in load(file)["cases"]
                        if case["operator"] == operator and case["case"]["kernel_size"] == kernel
                    ]
                    for file in names
                ]
                times = [slow / fast for slow, fast in zip(*of, strict=True)]
                row.append(Cell(max(times), f"{min(times):.2f} – {max(times):.2f}"))
            rows.append(row)
    return Table(source(*names), ["", *(f"K {kernel}" for kernel in kernels)], rows)


def host_time() -> Table:
    columns = [
        ("forward", "forward", "native"),
        ("recorded", "forward, recorded", "native"),
        ("in Python", "forward, recorded", "in_python"),
        ("forward + backward", "forward + backward", "native"),
        ("in Python", "forward + backward", "in_python"),
    ]
    rows = [
        [
            f"`{call}`" if "." in call else call,
            *(cell(modes[mode].get(how, {}).get("median_s"), Form(1, 1e-6)) for _, mode, how in columns),
        ]
        for call, modes in load("cpu_host_time")["calls"].items()
    ]
    return Table(source("cpu_host_time"), ["call", *(title for title, _, _ in columns)], rows)


_IWSLT, _MULTI30K = "`_iwslt_de_en` sizes, 40 × 25 tokens", "`configs/multi30k_en_de` sizes, 256 × 16 tokens"
_IWSLT_BFLOAT16, _MULTI30K_BFLOAT16 = (
    "`_iwslt_de_en` sizes with `--bf16`",
    "`configs/multi30k_en_de` sizes with `--bf16`",
)


def training() -> Table:
    names = {
        "cpu_training_iwslt": _IWSLT,
        "cpu_training_iwslt_bfloat16": _IWSLT_BFLOAT16,
        "cpu_training_multi30k": _MULTI30K,
        "cpu_training_multi30k_bfloat16": _MULTI30K_BFLOAT16,
    }
    return _training(names)


def training_others() -> Table:
    """Other processors, measured with older programs: file name after `training_`, title."""
    files = {
        "iwslt_family_26": f"family 26: {_IWSLT}",
        "iwslt_bfloat16_family_26": f"family 26: {_IWSLT_BFLOAT16}",
        "multi30k_family_26": f"family 26: {_MULTI30K}",
        "multi30k_bfloat16_family_26": f"family 26: {_MULTI30K_BFLOAT16}",
        "iwslt_avx2_alone": f"AVX2 alone: {_IWSLT}",
        "multi30k_avx2_alone": f"AVX2 alone: {_MULTI30K}",
    }
    return _training({f"instruction_sets/training_{name}": title for name, title in files.items()})


def _training(names: Mapping[str, str]) -> Table:
    """Tokens per second of all systems; a row for each of these files, with the row's title."""
    systems = [*load(next(iter(names)))["systems"]]
    rows = [
        [title, *(cell(load(name)["systems"][system]["tokens_per_s"], Form(0)) for system in systems)]
        for name, title in names.items()
    ]
    return Table(source(*names), ["", *map(_system, systems)], rows)


_SETTINGS = {"greedy, 1 sentence": (1, 1), "greedy, 32": (1, 32), "beam 5, 1 sentence": (5, 1), "beam 5, 32": (5, 32)}


def _settings(file: str) -> dict[str, dict]:
    """The systems of each setting, by its title."""
    of = {(setting["beam"], setting["sentences"]): setting["systems"] for setting in load(file)["settings"]}
    return {title: of[key] for title, key in _SETTINGS.items()}


def generation() -> Table:
    settings = _settings("cpu_generation")
    engine = f"CTranslate2 {load('cpu_generation')['machine']['versions']['ctranslate2']}"
    names = [name for name in settings["beam 5, 32"] if "our search" not in name]
    place = names.index("DynamicConv (ours), fairseq's search")
    names[place:place] = [name for name in settings["beam 5, 32"] if "our search" in name]
    rows = [
        [_system(name, engine), *(cell(systems[name]["sentences_per_s"]) for systems in settings.values())]
        for name in names
    ]
    return Table(source("cpu_generation"), ["", *settings], rows)


def instruction_sets() -> Table:
    levels = {
        "AVX2": "instruction_sets/generation_avx2",
        "a CPU with AVX2 alone": "instruction_sets/generation_avx2_alone",
        "AVX-512 without VNNI": "instruction_sets/generation_avx512",
        "AVX-512, VNNI, BF16": "cpu_generation",
    }
    peers = {"DynamicConv": "DynamicConv (ours){}", "Transformer": "fairseq Transformer, our search{}"}
    # There CTranslate2 was not tried with one thread for one sentence.
    left_out = {("a CPU with AVX2 alone", title) for title, (_, sentences) in _SETTINGS.items() if sentences == 1}
    rows = []
    for level, file in levels.items():
        for engine, kind in _ENGINE.items():
            for model, name in peers.items():
                ours = name.format("" if kind == "float32" else ", int8")
                times: list[Cell | str] = []
                for title, systems in _settings(file).items():
                    ratio = systems[ours]["sentences_per_s"] / systems[engine]["sentences_per_s"]
                    times.append("not measured" if (level, title) in left_out else cell(ratio, Form(2)))
                rows.append([f"{level}, {kind}, {model}", *times])
    return Table(source(*levels.values()), ["", *_SETTINGS], rows)


def memory() -> Table:
    systems = ("DynamicConv (ours), int8", "CTranslate2 Transformer, int8")
    rows = [
        [title, *(cell(of[name]["peak_bytes"], Form(0, 2**20)) for name in systems)]
        for title, of in _settings("cpu_generation").items()
    ]
    return Table(source("cpu_generation"), ["", "ours", "CTranslate2"], rows)


def translation() -> Table:
    rows = []
    for name, of in load("cpu_translation")["systems"].items():
        title = _system(name).replace("CTranslate2, Transformer", "CTranslate2")
        if title.startswith("Transformer"):
            title = f"fairseq's {title}" if "search" in title else title.replace("Transformer", _OUR_SEARCH)
        latencies = [cell(of[f"latency_{part}_s"], _MS) for part in ("p50", "p95")]
        rows.append([title, cell(of["bleu"], Form(2)), cell(of["sentences_per_s"], Form(0)), *latencies])
    return Table(source("cpu_translation"), ["", "BLEU", "sentences/s", "one sentence, median, ms", "95 %, ms"], rows)


def dtypes() -> Table:
    def faster(level: str, size: int, dtype: str, sentences: int) -> Cell | str:
        (seconds,) = [
            of["seconds"]
            for of in load("cpu_decoding_dtypes")["levels"][level]
            if (of["size"], of["sentences"]) == (size, sentences)
        ]
        return cell(seconds["float32"] / seconds[dtype], Form(2))

    columns = [(dtype, sentences) for dtype in ("bfloat16", "int8") for sentences in (1, 32)]
    headers = [f"{dtype}, {sentences} sentence{'s' * (sentences > 1)}" for dtype, sentences in columns]
    rows = [
        [level, str(size), *(faster(level, size, *column) for column in columns)]
        for level, results in load("cpu_decoding_dtypes")["levels"].items()
        for size in dict.fromkeys(of["size"] for of in results)
    ]
    return Table(source("cpu_decoding_dtypes"), ["instruction set", "d", *headers], rows)


_TYPES = ("float32", "bfloat16", "float16", "int8")


def exported() -> Table:
    content = load("cpu_exported")
    rows = []
    for name in dict.fromkeys(name.rpartition(", ")[0] for name in content["models"]):
        models = [content["models"][f"{name}, {dtype}"] for dtype in _TYPES]
        starts = [content["start_up"][f"{name}, {dtype}"]["processor_s"] for dtype in _TYPES]
        of = [
            [f"{model['bytes'] / 1e6:.1f}" for model in models],
            [f"{model['bleu']:.2f}" for model in models],
            [f"{seconds:.2f}" for seconds in starts],
        ]
        checkpoint = cell(content["start_up"][f"{name}, checkpoint"]["processor_s"], Form(2))
        rows.append([name, *(" / ".join(texts) for texts in of), checkpoint])
    headers = ["", "MB on disk", "BLEU, tst2013, beam 5", "start to first translation, processor s"]
    return Table(source("cpu_exported"), [*headers, "the same with the checkpoint"], rows)


def start() -> Table:
    """What starting programs take besides a model."""
    seconds = load("cpu_exported")["start_up"]["import torch"]["processor_s"]
    return Table(source("cpu_exported"), ["", "processor s"], [["import torch", cell(seconds, Form(2))]])


def preparation() -> Table:
    rows = [
        [
            step["title"],
            cell(step["seconds"]),
            cell(step["processor_s"] / step["seconds"], Form(1)),
            cell(step["peak_bytes"], Form(0, 2**20)),
        ]
        for step in load("cpu_preparation")["steps"]
    ]
    return Table(source("cpu_preparation"), ["step", "seconds", "cores busy", "peak memory, MiB"], rows)


def shortlists() -> Table:
    """Trained models with and without a shortlist, compared with CTranslate2 of the same beam, with one or without."""
    points = load(name := "cpu_pareto_iwslt15")["points"]
    engine = {(point["beam"], point["shortlist"]): point for point in points if point["engine"] == "CTranslate2"}
    rows = []
    for point in points:
        title = f"{point['model']}, {point['engine']}, beam {point['beam']}"
        rows.append(_speed(title, point, engine[point["beam"], point["shortlist"]]))
    return Table(source(name), ["int8, one thread", "BLEU", "sentences/s", "× CTranslate2"], rows)


def student(name: str) -> Table:
    """Students and their teacher, compared with the teacher in our search, in int8 with beam 4."""
    points = load(name)["points"]
    key = {"model": "teacher", "engine": "ours", "dtype": "int8", "beam": 4, "shortlist": False}
    [base] = [point for point in points if key.items() <= point.items()]
    rows = [
        _speed(", ".join((point["model"], point["engine"], point["dtype"], f"beam {point['beam']}")), point, base)
        for point in points
    ]
    return Table(source(name), ["one thread", "BLEU", "sentences/s", "× teacher"], rows)


def _speed(title: str, point: Mapping[str, Any], base: Mapping[str, Any]) -> list[Cell | str]:
    """A row about a point of benchmarks.pareto, and how many times as fast as `base` it is."""
    return [
        title + (", shortlist" if point["shortlist"] else ""),
        cell(point["bleu"], Form(2)),
        cell(point["sentences_per_s"], Form(0)),
        "1" if point is base else ratio_cell(timing.ratio(base, point), Form(2)),
    ]


def rates() -> Table:
    """What the machine reached in two of the runs."""
    files = ("cpu_operators", "cpu_operators_lengths")
    rows = [
        [file, *(cell(load(file)["rates"][name], Form(0, 1e9)) for name in ("bytes_per_s", "flops_per_s"))]
        for file in files
    ]
    return Table(source(*files), ["run", "GB/s", "GFLOP/s"], rows)


TABLES: dict[str, Callable[[], Table]] = {
    "rates": rates,
    "operators": operators,
    "lengths": lengths,
    "lengths reached": reached,
    "apart": apart,
    "without AVX-512": without_avx512,
    "host time": host_time,
    "training": training,
    "training, other processors": training_others,
    "generation": generation,
    "instruction sets": instruction_sets,
    "memory": memory,
    "translation": translation,
    "dtypes": dtypes,
    "exported": exported,
    "start": start,
    "preparation": preparation,
    "shortlists": shortlists,
    "student": lambda: student("cpu_pareto_multi30k"),
    "student, IWSLT15": lambda: student("cpu_pareto_iwslt15_student"),
    "CPU targets": lambda: judged("CPU"),
}
