"""The tables of docs/ with scores, from the rows of `lightconv reproduce`: see benchmarks/pages.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from benchmarks.kernel_schedules import named
from benchmarks.tables import RESULTS, Cell, Form, Table, cell, load, source
from lightconv_plugin.paths import configs_dir
from lightconv_plugin.recipes.reproduce.protocol import load_yaml
from lightconv_plugin.recipes.reproduce.rows import read_rows
from lightconv_plugin.recipes.reproduce.table import number, sections, with_sd
from lightconv_plugin.scoring.paper import ABLATION

_FOLDER = RESULTS / "reproduction"
_ATTENTION = "self-attention (fairseq's Transformer)"


@cache
def _titles() -> dict[tuple[str, str], str]:
    """The names of systems in RESULTS.md, by task and system."""
    return {
        (section.task, system): section.title_of(system).rstrip("*")
        for section in sections(_FOLDER, configs_dir(), not_run=False)
        for system in section.systems()
    }


def _title(task: str, system: str) -> str:
    return _ATTENTION if system == "transformer" else _titles()[task, system]


def _score(summary: Mapping[str, float | None]) -> Cell:
    return Cell(summary["mean"], with_sd(summary))


def _scores(row: Mapping[str, Any]) -> list[Cell | str]:
    """Parameters, the score on the validation set, that on the test set."""
    (parameters,) = {run["parameters"] for run in row["runs"]}
    summary = row["summary"]
    return [Cell(parameters, f"{parameters:,}"), _score(summary["valid"]), _score(summary["test"][row["by"]])]


def _each(row: Mapping[str, Any]) -> str:
    return ", ".join(number(run["test"][row["by"]]) for run in row["runs"])


def scores(task: str, *systems: str, each: bool = False, more: Mapping[str, str] | None = None) -> Table:
    """Rows of one task. each: with the test score of every seed. more: further scores, and their titles."""
    more, rows = more or {}, []
    for system in systems:
        row = read_rows(_FOLDER)[task][system]
        line = [_title(task, system), *_scores(row), *(_score(row["summary"]["test"][name]) for name in more)]
        rows.append([*line, _each(row)] if each else line)
    headers = ["system", "parameters", "valid", "test", *more.values(), *(["each seed"] if each else [])]
    return Table(f"reproduction/{task}", headers, rows)


_FOUR = ("lightweightconv", "dynamicconv", "talkconv", "transformer")
_TASK, _DROPOUT = "multi30k_en_de", "multi30k_en_de/bpe_dropout"
_RDROP, _STUDENTS = "multi30k_en_de/rdrop", "multi30k_en_de/student"


def bpe_dropout() -> Table:
    with_it, without = (scores(task, *_FOUR, each=each) for task, each in ((_DROPOUT, True), (_TASK, False)))
    rows = [[*row, *other[2:]] for row, other in zip(with_it.rows, without.rows, strict=True)]
    return Table(with_it.source, [*with_it.headers, "without: valid", "without: test"], rows)


def iwslt15_student() -> Table:
    """With the row of their teacher, which is of another folder."""
    teacher = scores("iwslt15_en_vi/small", "talkconv")
    students = scores("iwslt15_en_vi/student", "dynamicconv", "transformer")
    return Table(students.source, students.headers, [["their teacher, TaLK", *teacher.rows[0][1:]], *students.rows])


def newer() -> Table:
    names = (
        "dynamicconv",
        "dynamicconv_residual",
        "dynamicconv_low_rank",
        "transformer",
        "attention_conv",
        "gated_short",
    )
    return scores(_TASK, *names)


def overview() -> Table:
    """Multi30k, a column for each system."""
    rows = read_rows(_FOLDER)
    titles = [_title(_TASK, system) for system in _FOUR]
    lines = [
        ["test BLEU", *(_scores(rows[_TASK][system])[2] for system in _FOUR)],
        ["parameters", *(_scores(rows[_TASK][system])[0] for system in _FOUR)],
        ["test BLEU with BPE-dropout and twice the updates", *(_scores(rows[_DROPOUT][s])[2] for s in _FOUR)],
    ]
    return Table(f"reproduction/{_TASK}", ["", *titles], lines)


def choices() -> Table:
    """One seed of each setting that was tried: validation, then test."""
    names = {
        "dropout_3": "dropout 0.3",
        "dropout_2": "dropout 0.2: the configuration",
        "bpe_dropout_2": "BPE-dropout 0.1, dropout 0.2",
        "bpe_dropout_1": "BPE-dropout 0.1, dropout 0.1",
    }
    rows = []
    for name, title in names.items():
        row: list[Cell | str] = [title]
        for system in ("dynamicconv", "transformer"):
            row += _scores(load(f"multi30k_choices/{system}_{name}"))[1:]
        rows.append(row)
    headers = ["", "DynamicConv: valid", "test", "self-attention: valid", "test"]
    return Table("multi30k_choices", headers, rows)


def rdrop() -> Table:
    """With the row of another weight."""
    table, other = scores(_RDROP, "dynamicconv", "transformer"), load("multi30k_choices/dynamicconv_rdrop_alpha_5")
    ours, attention = table.rows
    convolution = [["DynamicConv, α 1", *ours[1:]], ["DynamicConv, α 5", *_scores(other)]]
    rows = [*convolution, [f"{_ATTENTION}, α 1", *attention[1:]]]
    return Table(table.source, table.headers, rows)


def learning_rates() -> Table:
    """Rows that were trained with another learning rate, each after the row of its configuration."""
    tried = [load(f"learning_rates/{path.stem}") for path in sorted((RESULTS / "learning_rates").glob("*.json"))]
    rows: list[list[Cell | str]] = []
    for task, system in dict.fromkeys((row["task"], row["system"]) for row in tried):
        others = [row for row in tried if (row["task"], row["system"]) == (task, system)]
        for row in (read_rows(_FOLDER)[task][system], *others):
            rows.append([f"`{task}`, {_title(task, system)}, {_learning_rate(row)}", *_scores(row)[1:]])
    return Table("learning_rates", ["row, learning rate", "valid", "test"], rows)


def _learning_rate(row: Mapping[str, Any]) -> str:
    """As a table shows it."""
    overridden = [text for text in row["overrides"] if text.startswith("optimization.lr=")]
    if overridden:
        return overridden[-1].partition("=")[2].strip("[]")
    config = load_yaml(configs_dir() / f"{row['config']}.yaml")
    return f"{config['optimization']['lr'][0]}: the configuration"


# The ablation's configurations, and the paper's names of their rows.
_ROWS = {
    "self_attention": "self-attention",
    "self_attention_window": "self-attention, windows",
    "cnn": "CNN",
    "depthwise": "depthwise",
    "depthwise_increasing_kernel": "+ increasing kernel",
    "depthwise_dropconnect": "+ DropConnect",
    "weight_sharing": "+ weight sharing",
    "softmax": "+ softmax (LightConv)",
    "dynamic": "+ dynamic (DynamicConv)",
    "dynamic_no_softmax": "DynamicConv without softmax",
}


def ablation() -> Table:
    """The rows of the paper's table with the paper's BLEU, then those that it does not have."""
    task, other = f"{_TASK}/ablation", f"{_TASK}/hybrid"
    rows = [[*row, ABLATION[name]] for row, name in zip(scores(task, *_ROWS).rows, _ROWS.values(), strict=True)]
    hybrids = ("convolution_below_attention_above", "attention_below_convolution_above")
    for row in (*scores(task, "talk").rows, *scores(other, *hybrids).rows):
        rows.append([f"not in that table: {row[0]}", *row[1:], "–"])
    return Table(f"reproduction/{task}, {other}", ["row", "parameters", "valid", "test", "the paper: BLEU"], rows)


def training(*tasks: str) -> Table:
    """The speed of training of the slowest and the fastest seed, and the hours of all seeds together."""
    rows = []
    for task in tasks:
        for system, row in read_rows(_FOLDER)[task].items():
            minutes = [run["train_seconds"] / 60 for run in row["runs"]]
            rates = sorted(run["tokens_per_second"] for run in row["runs"])
            numbers = [cell(rates[0], Form(0)), cell(rates[-1], Form(0)), cell(sum(minutes), Form(1, 60))]
            rows.append([f"{task}/{system}", *numbers])
    return Table("reproduction", ["row", "least tokens/s", "most tokens/s", "hours"], rows)


def kernel_schedules() -> Table:
    """The validation losses of a search over kernel sizes, those that were trained longest first."""
    trials = load(name := "kernel_schedules")["schedules"]
    updates = sorted({int(update) for trial in trials for update in trial["valid_loss"]})
    rows: list[list[Cell | str]] = []
    for trial in trials:
        losses = {int(update): loss for update, loss in trial["valid_loss"].items()}
        title = named((trial["encoder"], trial["decoder"]))
        rows.append([title, *(cell(losses[update], Form(3)) if update in losses else "" for update in updates)])
    return Table(source(name), ["kernel sizes", *(f"{update:,} updates" for update in updates)], rows)


_NUMBERS = (1, 5, 10, 20)  # of averaged checkpoints, as the protocols try them


def averages(*tasks: str) -> Table:
    """How many seeds chose each number of averaged checkpoints on the validation set."""
    rows = []
    for task in tasks:
        chosen = [run["average"] for row in read_rows(_FOLDER)[task].values() for run in row["runs"]]
        rows.append([f"`{task}`", *(cell(chosen.count(number), Form(0)) for number in _NUMBERS)])
    return Table("reproduction", ["recipe", "none", *(f"last {number}" for number in _NUMBERS[1:])], rows)


TABLES: dict[str, Callable[[], Table]] = {
    "averages": lambda: averages(_TASK, _DROPOUT, f"{_TASK}/ablation", "tatoeba_de_en"),
    "Multi30k": lambda: scores(_TASK, *_FOUR, each=True),
    "Multi30k overview": overview,
    "BPE-dropout": bpe_dropout,
    "newer mixers": newer,
    "choices": choices,
    "learning rates": learning_rates,
    "ablation": ablation,
    "Tatoeba": lambda: scores(
        "tatoeba_de_en", "dynamicconv", "transformer", more={"sacrebleu": "sacreBLEU", "chrf": "chrF2"}
    ),
    "WikiText-2": lambda: scores(
        "wikitext2", "lightweightconv", "dynamicconv", "dynamicconv_residual", "dynamicconv_low_rank", "talkconv",
        "transformer", "attention", "attention_conv", "gated_short", "gated_short_k3",
    ),
    "R-Drop": rdrop,
    "SimCut": lambda: scores(f"{_TASK}/simcut", "dynamicconv"),
    "kernel schedules": kernel_schedules,
    "kernel sizes": lambda: scores(f"{_TASK}/kernels", "all_7", "all_31"),
    "students": lambda: scores(_STUDENTS, "dynamicconv", "dynamicconv_shallow", "transformer"),
    "students, IWSLT15": iwslt15_student,
    "training times": lambda: training(_TASK, _DROPOUT, "tatoeba_de_en", "wikitext2"),
}  # fmt: skip
